"""Shards: the sequences of each path, packed into rows, in files [2.4, 2.4.4, 2.7]. Nothing here imports JAX."""

import collections
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.data import holdouts, packing
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.storage.records import READ_RECORDS, read_meta, record_writer, write_meta

NOTHING = {'tokens': 0, 'rows': 0, 'sequences': 0}
EMPTY: dict[str, Any] = {
  'train': NOTHING,
  'holdout': NOTHING,
  'domains': list[int](),
}  # meta.json of a shard that is elsewhere


class Dealt(NamedTuple):
  """The document, domain and paths of each sequence, and the hold-outs; `assignment` is not copied."""

  seed: int
  documents: np.ndarray  # uint32
  assignment: np.ndarray  # [N, top_n] paths, the best first; -1: it is not used
  held: np.ndarray  # bool: whether its document is held back
  domains: np.ndarray  # uint8
  undrawn: list[int]  # paths with a hold-out that is not drawn, see `holdouts.held_out`


def deal(
  sequences: Sequences, assignment: np.ndarray, num_paths: int, seed: int, holdout_fraction: float, after: float = 0.0
) -> Dealt:
  """Draws the documents that are held back, and deals the other sequences to their paths.

  A document is held back whole, with all its copies, from all paths [2.7]: its sequences are the hold-out of the path
  they are routed to first, and every other sequence trains all its paths. Pieces of longer texts are held back by their
  own draws.

  Args:
    assignment: int [N, top_n] paths of each sequence, the best first; -1: it is not used.
    after: where draws of longer texts begin that are not held back already, see `holdouts.draw_pieces`.
  """
  (documents, domains) = sequences.columns()
  contents = sequences.contents()
  draws = sequences.draws()
  pieces = None if draws is None else holdouts.draw_pieces(contents, draws, holdout_fraction, after)
  held, undrawn = holdouts.held_out(contents, assignment[:, 0], num_paths, seed, holdout_fraction, pieces)
  return Dealt(seed, documents, assignment, held, domains, undrawn)


def write_shard(sequences: Sequences, dealt: Dealt, path: int, out_dir: str, seq_len: int) -> dict[str, Any]:
  """Writes a path's `train.array_record`, `holdout.array_record` and `meta.json`; returns the content of the last."""
  train = write_rows(f'{out_dir}/train.array_record', sequences, _indices_of(dealt, path, False), seq_len)
  held = holdouts.spread_out(dealt.documents, _indices_of(dealt, path, True), dealt.seed)
  holdout = write_rows(f'{out_dir}/holdout.array_record', sequences, held, seq_len, in_order=True)
  domains = np.zeros(len(sequences.domains), np.int64)
  for block in holdouts.blocks(len(dealt.held)):
    domains += np.bincount(dealt.domains[block][dealt.assignment[block, 0] == path], minlength=len(domains))
  return write_meta(out_dir, {'train': train, 'holdout': holdout, 'domains': domains.tolist()})


def merge_meta(folder: str, num_paths: int, seq_len: int, own_paths: Collection[int] | None = None) -> dict[str, Any]:
  """Returns what `meta.json` holds of the shards in `folder`/<path>: lists by path, and figures of all rows.

  `own_paths`: those whose shards are in the folder, None for all; the others count as empty.
  """
  here = range(num_paths) if own_paths is None else own_paths
  metas = [read_meta(os.path.join(folder, str(path))) if path in here else EMPTY for path in range(num_paths)]
  tokens, rows = ([meta['train'][name] for meta in metas] for name in ('tokens', 'rows'))
  return {
    'shard_tokens': tokens,
    'shard_sequences': [meta['train']['sequences'] for meta in metas],
    'shard_rows': rows,
    'holdout_rows': [meta['holdout']['rows'] for meta in metas],
    'sequences_by_path_and_domain': [meta['domains'] for meta in metas],
    'padding_fraction': 1 - sum(tokens) / max(1, sum(rows) * seq_len),
    'seq_len': seq_len,
  }


def _indices_of(dealt: Dealt, path: int, held: bool) -> Iterator[np.ndarray]:
  """Yields indices of the sequences of a path's hold-out, or of its training rows, in their order, some at a time."""
  columns = slice(0, 1 if held else None)  # a hold-out is the first path's
  for block in holdouts.blocks(len(dealt.held)):
    mine = (dealt.assignment[block, columns] == path).any(1) & (dealt.held[block] == held)
    indices = block.start + np.flatnonzero(mine)
    yield from (indices[i : i + READ_RECORDS] for i in range(0, len(indices), READ_RECORDS))


def write_rows(
  file: str, sequences: Sequences, chunks: Iterable[np.ndarray], seq_len: int, in_order: bool = False
) -> dict[str, int]:
  """Packs the sequences at the indices into a file; returns the numbers of sequences, tokens and rows."""
  counts = collections.Counter(sequences=0, tokens=0, rows=0)

  def tokens():
    for indices in chunks:
      counts.update(sequences=len(indices))
      yield from (sequence.to_pack for sequence in sequences.read(indices))

  with record_writer(file) as writer:
    for row in packing.pack_in_order(tokens(), seq_len) if in_order else packing.pack(tokens(), seq_len):
      writer.write(row.tobytes())
      counts.update(tokens=int(np.count_nonzero(row[1])), rows=1)
  return counts
