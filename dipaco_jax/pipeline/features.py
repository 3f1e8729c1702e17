"""Inputs of routers: features z of sequences, kept in `features/` unless they are too large [2.4.1], and texts."""

import functools
import pathlib
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import holdouts, packing, sequences
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.processes import display, processes
from dipaco_jax.routing import own_router, router
from dipaco_jax.storage import publishing, seals, tensors

FEATURE_ROWS = 1024  # sequences whose features are handed on at one time
LARGE_MODEL = 10_000_000  # parameters, from which fewer rows keep a processor busy and tell how far it is
MAX_FEATURE_BYTES = 2**30


def compute(run: run_lib.Run, split: str, indices: np.ndarray | None = None) -> Iterator[np.ndarray]:
  """Yields z of a split's sequences (all, or those at `indices`), float32 [FEATURE_ROWS, D] at a time, or fewer.

  They are read from the kept file, which is made first; if it would be too large (`keep`), they are computed.
  """
  indices = np.arange(len(run.sequences(split))) if indices is None else indices
  if (file := keep(run, split)) is None:
    yield from _computed(run, split, indices)
    return
  kept = tensors.read_array(file, mmap_mode='r')
  yield from (kept[indices[start : start + FEATURE_ROWS]] for start in range(0, len(indices), FEATURE_ROWS))


def keep(run: run_lib.Run, split: str) -> pathlib.Path | None:
  """Makes `features/<split>.npy` if it is missing; returns it, or None if it would be too large to keep."""
  file, everything = run.workdir / 'features' / f'{split}.npy', np.arange(len(run.sequences(split)))
  if not seals.keep_if_whole(file):
    if run.disk.is_apart and not processes.is_first():  # no other process reads them, and each needs only its share
      return None
    if 4 * len(everything) * run.settings.model.width > MAX_FEATURE_BYTES:
      return None
    publishing.write_array(file, np.concatenate(list(_computed(run, split, everything))))
  return file


def _computed(run: run_lib.Run, split: str, indices: np.ndarray) -> Iterator[np.ndarray]:
  split_sequences, prefix = run.sequences(split), run.settings.routing.prefix_tokens
  base = jax.device_put(run.base())
  of_conversations = run.settings.data.format == 'messages'  # of which a few tokens may choose the path
  rows = FEATURE_ROWS if sum(x.size for x in base.values()) < LARGE_MODEL else FEATURE_ROWS // 16
  progress = display.Progress(f'features of {split}', len(indices), 'sequences')
  for start in range(0, len(indices), rows):
    chosen = indices[start : start + rows]
    empty = [np.zeros(0, np.int32)] * (rows - len(chosen))  # for one shape, and so one program
    prefixes = [sequence.prefix(prefix) for sequence in split_sequences.read(chosen)]
    tokens, seen = packing.pad(prefixes + empty, prefix)
    compute_z = program(run.model, of_conversations)
    yield np.asarray(compute_z(base, tokens, seen) if of_conversations else compute_z(base, tokens))[: len(chosen)]
    progress.update(start + len(chosen))
  progress.close()


def texts(run: run_lib.Run, split: str, chunks: Iterable[np.ndarray]) -> Iterator[own_router.Texts]:
  """Yields the inputs of a user-defined router for a split's sequences, for each of the `chunks` of their indices."""
  split_sequences, routing = run.sequences(split), run.settings.routing
  lengths_N, sees = split_sequences.lengths(), own_router.uses_features(routing)

  def decode(tokens: np.ndarray) -> str:
    return run.tokenizer.decode(tokens)  # which is opened only for routers that read words

  for indices in chunks:
    tokens = [sequence.tokens for sequence in split_sequences.read(indices)]
    z_ND = np.concatenate(list(compute(run, split, indices))) if sees else None
    yield own_router.make_texts(tokens, lengths_N[indices], routing.prefix_tokens, decode, z_ND)


@functools.cache
def program(network: transformer.Transformer, may_be_short: bool = False):
  """Returns (params, tokens [B, L]) -> z [B, D], or (params, tokens, seen) where texts may be shorter than L."""
  compute_z = transformer.features_of_seen if may_be_short else transformer.features
  return jax.jit(functools.partial(compute_z, network))


def routed_by(run: run_lib.Run) -> np.ndarray:
  """Returns the index of the sequence whose features route each training sequence, int64 [N].

  It is the first sequence of the same document with `routing.by_document`, otherwise the sequence itself.
  """
  train = run.sequences('train')
  if not run.settings.routing.by_document:
    return np.arange(len(train))
  _, first_M, document_N = np.unique(train.columns()[0], return_index=True, return_inverse=True)
  return first_M[document_N]


def sum_routed_together(routed_by_N: np.ndarray, values_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the sequences that others are routed by, ascending [M], and the sums of the values of all these, [M, P]."""
  indices_M, text_N = np.unique(routed_by_N, return_inverse=True)
  sums_MP = np.zeros((len(indices_M), values_NP.shape[1]))
  np.add.at(sums_MP, text_N, values_NP)
  return indices_M, sums_MP


def router_data(run: run_lib.Run) -> np.ndarray:
  """Returns whether each training sequence belongs to a document that is kept from all training, bool [N] [2.4.2]."""
  return draw_router_data(run.sequences('train'), run.settings)


def draw_router_data(train: sequences.Sequences, settings: settings_lib.Settings) -> np.ndarray:
  """Returns the same of a run's training sequences and its settings."""
  contents, fraction = train.contents(), settings.routing.router_fraction
  return holdouts.draw_documents(contents, settings.seed, fraction, 'router data', router_pieces(train, fraction))


def router_pieces(train: sequences.Sequences, fraction: float) -> holdouts.DrawnPieces | None:
  """Returns the pieces of longer texts that are router data; hold-outs lie before them."""
  draws = train.draws()
  return None if draws is None else holdouts.draw_pieces(train.contents(), draws, fraction)


def check_router_data(run: run_lib.Run):
  """Raises InputError if there is too little router data for a router that has no other to fall back on."""
  has_other = run.settings.routing.method in router.FITS
  if not (run.settings.rounds or (run.settings.evaluate.refit_router and not has_other)):
    return
  num_paths, count = run.layout.grid.num_paths, len(np.unique(routed_by(run)[router_data(run)]))
  if count < num_paths:
    kind = 'documents' if run.settings.routing.by_document else 'sequences'
    problem = f'{count} {kind}, fewer than the {num_paths} paths: raise it, or give more text'
    raise InputError(f'config.routing.router_fraction={run.settings.routing.router_fraction} keeps {problem}')
