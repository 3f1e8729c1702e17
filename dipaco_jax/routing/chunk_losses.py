"""Losses of texts in chunks of W tokens, each under the path that was chosen before the chunk [2.4.3]. Pure.

Chunk i of a text is its tokens at positions iW to (i+1)W - 1, and its path is

    r_i = router(first tokens)                     iW <= prefix
          chooser(tokens before iW)                i > 0, with a learned chooser (chunk_router.py)
          router(the last tokens before iW)        otherwise

where the router sees `prefix` tokens, or the whole text if it is shorter.

Dimensions: N texts, B rows, L length, D width, P paths, X windows of T tokens in a row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.models import loss as loss_lib, transformer
from dipaco_jax.models.transformer import Params, Transformer
from dipaco_jax.routing import router
from dipaco_jax.routing.router import Router

FILE = 'evaluation/excerpts.json'  # in a run's folder: its Excerpts
DEFAULT_CHUNK = 32  # tokens in a chunk, by default


class Chunk(NamedTuple):
  """A chunk of a text; nats are means over its tokens, None if there is nothing to predict."""

  start: int  # position of its first token
  text: str
  path: int
  nats: float | None  # under its path
  base: float | None  # under the base model
  counted: int  # tokens after the prefix, which a perplexity counts


class Excerpt(NamedTuple):
  """A text in chunks; nats are means over the tokens that are counted."""

  name: str
  path: int  # chosen by the router from the first tokens
  counted: int
  nats: float | None  # under that path
  rerouted: float | None  # under the path of each chunk
  base: float | None  # under the base model
  chunks: list[Chunk]


class Excerpts(NamedTuple):
  """Texts that were cut and scored in the same way."""

  every: int  # W
  prefix_tokens: int
  by: str  # what chooses after the first chunk: 'chooser', 'router', or '' if the path never changes
  documents: list[Excerpt]

  def to_dict(self) -> dict[str, Any]:
    """Returns the excerpts as JSON values."""
    documents = [d._asdict() | {'chunks': [part._asdict() for part in d.chunks]} for d in self.documents]
    return self._asdict() | {'documents': documents}

  @classmethod
  def from_dict(cls, content: dict[str, Any]) -> 'Excerpts':
    """Restores excerpts from `to_dict`."""
    documents = [Excerpt(**d | {'chunks': [Chunk(**part) for part in d['chunks']]}) for d in content['documents']]
    return cls(**content | {'documents': documents})


class TextLosses(NamedTuple):
  """Nats of the next token after each token of N texts, [N, L]."""

  rerouted: np.ndarray  # under the path of the chunk that holds the next token
  routed: np.ndarray  # under the path of chunk 0
  base: np.ndarray


def windows(tokens: np.ndarray, W: int, prefix: int) -> list[np.ndarray]:
  """Returns the tokens of a text that the router sees to choose for each chunk."""
  begins = (max(0, start - prefix) for start in range(0, len(tokens), W))
  return [tokens[begin : begin + prefix] for begin in begins]


def pack_windows(seen: Sequence[np.ndarray], prefix: int, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Packs windows into rows, as separate segments: tokens and segment ids, int32 [B, L] each."""
  X = length // prefix
  rows = np.zeros((2, -(-len(seen) // X), length), np.int32)
  for n, tokens in enumerate(seen):
    begin = n % X * prefix
    rows[:, n // X, begin : begin + len(tokens)] = tokens, np.full(len(tokens), n % X + 1)
  return rows[0], rows[1]


@functools.partial(jax.jit, static_argnames=('model', 'prefix'))
def losses_and_routes(
  model: Transformer, prefix: int, params: Params, fitted: Router | None, tokens_BL: jax.Array, segments_BL: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
  """Returns `loss.following_nll` [B, L], and the router's path of each window, int32 [B, X], or None without router.

  One program computes both, since compilation takes longest. Paths are meaningful for the base model's parameters only;
  ties go to the lower one.
  """
  x_BLD = transformer.hidden(model, params, tokens_BL, segments_BL)
  factors: Any = model.apply(transformer.variables(params), x_BLD, method=Transformer.norm_and_head)
  normed_BLD, head_DV = factors
  nats_BL = loss_lib.following_nll(normed_BLD, head_DV, tokens_BL, segments_BL, model.config.loss_chunk)
  if fitted is None:
    return nats_BL, None
  B, X = len(tokens_BL), tokens_BL.shape[1] // prefix
  seen_BXT1 = (segments_BL[:, : X * prefix] > 0).reshape(B, X, prefix, 1)
  x_BXTD = x_BLD[:, : X * prefix].astype(jnp.float32).reshape(B, X, prefix, -1)
  z_BXD = jnp.where(seen_BXT1, x_BXTD, 0).sum(axis=2) / jnp.maximum(seen_BXT1.sum(axis=2), 1)
  scores_NP = router.scores(fitted, z_BXD.reshape(B * X, -1))
  return nats_BL, scores_NP.argmax(axis=-1).astype(jnp.int32).reshape(B, X)


def in_batches(function: Callable[..., Any], size: int, *arrays: np.ndarray) -> Any:
  """Applies a function to `size` rows at a time, the last ones padded with zeros so that it is compiled once."""
  results = []
  for start in range(0, len(arrays[0]), size):
    parts = [x[start : start + size] for x in arrays]
    filled = [np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)]) for x in parts]
    results.append(jax.tree.map(lambda x, n=len(parts[0]): np.asarray(x)[:n], function(*filled)))
  return jax.tree.map(lambda *x: np.concatenate(x), *results)


def gather_losses(
  paths: Sequence[Sequence[int]], W: int, nats: Callable[[int | None, np.ndarray], np.ndarray]
) -> TextLosses:
  """Collects the losses of texts under the paths of their chunks, `paths[text][chunk]`, asking for each path once.

  `nats`: (path, or None for the base model; indices of texts [B]) -> nats of the next token after each token, [B, L].
  """
  base_NL = nats(None, np.arange(len(paths)))
  rerouted_NL, routed_NL = np.zeros_like(base_NL), np.zeros_like(base_NL)
  chunk_L = (np.arange(base_NL.shape[1]) + 1) // W  # of the next token
  path_NL = np.array([np.asarray(mine)[np.minimum(chunk_L, len(mine) - 1)] for mine in paths])
  for path in sorted({path for mine in paths for path in mine}):
    rows = np.array([n for n, mine in enumerate(paths) if path in mine])
    found_BL = nats(path, rows)
    rerouted_NL[rows] = np.where(path_NL[rows] == path, found_BL, rerouted_NL[rows])
    first_B1 = np.array([[paths[n][0]] for n in rows])
    routed_NL[rows] = np.where(first_B1 == path, found_BL, routed_NL[rows])
  return TextLosses(rerouted_NL, routed_NL, base_NL)


def make_excerpt(
  name: str, chunks: Sequence[tuple[str, int]], length: int, W: int, prefix: int, nats: TextLosses
) -> Excerpt:
  """Makes the excerpt of a text of `length` tokens from the text and path of each chunk, and its losses, [L] each."""

  def mean(nats_L: np.ndarray, start: int, stop: int) -> float | None:
    start = max(start, 1)  # nothing predicts the first token
    return float(nats_L[start - 1 : stop - 1].mean(dtype=np.float64)) if start < stop else None

  parts = []
  for (text, path), start in zip(chunks, range(0, length, W), strict=True):
    stop = min(start + W, length)
    counted = max(0, stop - max(start, prefix, 1))
    parts.append(Chunk(start, text, int(path), mean(nats.rerouted, start, stop), mean(nats.base, start, stop), counted))
  rerouted, routed, base = (mean(nats_L, prefix, length) for nats_L in nats)
  return Excerpt(name, int(chunks[0][1]), sum(part.counted for part in parts), routed, rerouted, base, parts)
