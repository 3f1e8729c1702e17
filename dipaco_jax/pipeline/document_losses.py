"""Losses of every validation document under each model that was evaluated, for comparisons between runs.

`evaluation/documents.safetensors` has, of N documents, in their order:

    nats/<model>  [N] float64, over the tokens that count; models are `paths`, `base`, `control`...
    tokens        [N] int64, the number of those
    bytes         [N] int64, of text that they stand for
    domain, path  [N] int32
    content       [N] uint64, digest of the document that a sequence is of, as `Sequences.contents`
    text          [N] uint64, from the sha256 of all text of the sequence
    beginning     [N] uint64, from that of its first BEGINNING bytes, by which other tokenizers know a document too;
                  white space is one space there, as tokenizers differ in how they keep it; of conversations `content`
"""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.storage import publishing, seals, tensors

FILE = 'evaluation/documents.safetensors'
BEGINNING = 96  # bytes


class Documents(NamedTuple):
  """Columns of a run's validation documents, [N] each."""

  nats: dict[str, np.ndarray]  # by model
  tokens: np.ndarray
  num_bytes: np.ndarray
  domain: np.ndarray
  path: np.ndarray
  text: np.ndarray
  beginning: np.ndarray
  content: np.ndarray


def write(run: run_lib.Run, path: np.ndarray, tokens: np.ndarray, nats: Mapping[str, np.ndarray]):
  """Writes the file, once for all processes. path, tokens: [N]; nats: [N] by model."""
  run.disk.only_first(lambda: _write(run, path, tokens, nats), 'losses of documents')


def _write(run: run_lib.Run, path: np.ndarray, tokens: np.ndarray, nats: Mapping[str, np.ndarray]):
  validation = run.sequences('validation')
  sequences = validation.read(range(len(validation)))
  texts = [run.tokenizer.decode(x.tokens).encode('utf-8', 'replace') for x in sequences]
  arrays = {f'nats/{name}': np.asarray(x, np.float64) for name, x in nats.items()} | {
    'tokens': np.asarray(tokens, np.int64),
    'bytes': run.validation_bytes(),
    'domain': np.array([x.domain for x in sequences], np.int32),
    'path': np.asarray(path, np.int32),
    'content': validation.contents(),
    'text': np.array([_number(text) for text in texts], np.uint64),
    'beginning': _beginnings(run, texts),
  }
  publishing.write_sealed(run.workdir / FILE, tensors.to_bytes(arrays))


def _beginnings(run: run_lib.Run, texts: list[bytes]) -> np.ndarray:
  if run.settings.data.format == 'messages':  # which begin alike: with instructions, and as each template has it
    return run.sequences('validation').contents()
  return np.array([_number(b' '.join(text.split())[:BEGINNING]) for text in texts], np.uint64)


def _number(text: bytes) -> int:
  return int.from_bytes(hashlib.sha256(text).digest()[:8], 'little')


def read(workdir: pathlib.Path) -> Documents | None:
  """Reads the file of a run; None if there is none, as before evaluation. Raises seals.Damaged."""
  file = workdir / FILE
  if not file.exists():
    return None
  arrays = tensors.from_bytes(memoryview(seals.read(file)))
  nats = {name.removeprefix('nats/'): x for name, x in arrays.items() if name.startswith('nats/')}
  names = ('tokens', 'bytes', 'domain', 'path', 'text', 'beginning', 'content')
  return Documents(nats, *(arrays[name] for name in names))
