"""Files of tokens as other projects write them: nanoGPT's prepare.py, llm.c's, and Megatron's preprocess_data.

Megatron's writer here is of our own; megatron-core's IndexedDatasetBuilder gives the same bytes.
"""

import pathlib
import struct
from collections.abc import Sequence

import numpy as np

MEGATRON_TYPES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}
LLM_C = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}  # magic, version


def nanogpt(file: pathlib.Path, documents: Sequence[Sequence[int]], eos: int, dtype=np.uint16) -> None:
  """Writes documents with an end-of-text token behind each."""
  np.array([token for ids in documents for token in (*ids, eos)], dtype).tofile(file)


def llm_c(file: pathlib.Path, documents: Sequence[Sequence[int]], eos: int, dtype=np.uint16) -> None:
  """Writes documents with an end-of-text token before each, behind a header."""
  tokens = np.array([token for ids in documents for token in (eos, *ids)], dtype)
  header = np.zeros(256, np.int32)
  header[:3] = *LLM_C[dtype], len(tokens)
  file.write_bytes(header.tobytes() + tokens.tobytes())


def megatron(
  stem: pathlib.Path, documents: Sequence[Sequence[Sequence[int]]], dtype=np.int32, written: slice = slice(None)
) -> None:
  """Writes documents, each of some sequences (of sentences, or one of all), to STEM.bin and STEM.idx.

  Of the borders of documents only those of a slice are written, as by writers that leave some out.
  """
  sequences = [ids for document in documents for ids in document]
  lengths = np.array([len(ids) for ids in sequences], np.int32)
  starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * np.dtype(dtype).itemsize])[: len(lengths)]
  borders = np.cumsum([0, *map(len, documents)], dtype=np.int64)[written]
  header = struct.pack('<9sQBQQ', b'MMIDIDX\0\0', 1, MEGATRON_TYPES[dtype], len(sequences), len(borders))
  stem.with_suffix('.idx').write_bytes(
    header + lengths.tobytes() + starts.astype(np.int64).tobytes() + borders.tobytes()
  )
  stem.with_suffix('.bin').write_bytes(b''.join(np.array(ids, dtype).tobytes() for ids in sequences))
