"""The router of a trained run: from the beginning of a text to its path [2.4]."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing
from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.models import transformer
from dipaco_jax.routing import router


@dataclasses.dataclass(frozen=True, repr=False)
class TextRouter:
  """r(z) with the base model that computes z [2.4]."""

  fitted: router.Router
  model: transformer.Transformer
  base: transformer.Params
  prefix_tokens: int
  tokenizer: Tokenizer

  def __repr__(self) -> str:
    return f'<router to {len(self.fitted.bias)} paths, by the first {self.prefix_tokens} tokens>'

  def path(self, text: str | Sequence[int]) -> int:
    """Returns the path of a text, or of token ids, by its first tokens; by fewer where there are no more."""
    return int(self.scores(text).argmax())

  def scores(self, text: str | Sequence[int]) -> np.ndarray:
    """Returns how well each path suits a text, [P] float32."""
    tokens = token_ids(self.tokenizer, text)[: self.prefix_tokens]
    if not len(tokens):
      raise InputError('an empty text has no path: give it a word')
    tokens_1L, seen_1L = packing.pad([tokens], self.prefix_tokens)
    return np.asarray(_scores(self.model, self.base, self.fitted, tokens_1L, seen_1L))


def token_ids(tokenizer: Tokenizer, text: str | Sequence[int]) -> np.ndarray:
  """Encodes a text, or takes its token ids; raises InputError where one is not in the vocabulary."""
  # Without a dtype, which could not hold all that may be given: an id may be larger than int64 holds.
  ids = np.asarray(tokenizer.encode(text, eos=False) if isinstance(text, str) else text)
  if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
    raise InputError(f'token ids should be from 0 to {tokenizer.vocab_size - 1}; given are {ids.min()} to {ids.max()}')
  return ids.astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _scores(model: transformer.Transformer, base: transformer.Params, fitted, tokens_1L, seen_1L) -> jax.Array:
  x_1LD = transformer.hidden(model, base, tokens_1L, seen_1L).astype(jnp.float32)
  z_1D = (x_1LD * seen_1L[..., None]).sum(axis=1) / seen_1L.sum()
  return router.scores(fitted, z_1D)[0]
