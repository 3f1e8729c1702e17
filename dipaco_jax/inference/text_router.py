"""The router of a trained run: from the beginning of a text to its path [2.4]."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing
from dipaco_jax.data.tokenizer import Tokenizer, beginning, token_ids
from dipaco_jax.models import transformer
from dipaco_jax.routing import own_router, router


@dataclasses.dataclass(frozen=True, repr=False)
class TextRouter:
  """r(z) with the base model that computes z [2.4], or the user's own router."""

  fitted: own_router.AnyRouter
  model: transformer.Transformer
  base: transformer.Params
  prefix_tokens: int
  tokenizer: Tokenizer

  def __repr__(self) -> str:
    if isinstance(self.fitted, own_router.OwnRouter):
      return f'<router {self.fitted.config.method} to {self.fitted.num_paths} paths>'
    return f'<router to {len(self.fitted.bias)} paths, by the first {self.prefix_tokens} tokens>'

  def path(self, text: str | Sequence[int], length: int | None = None) -> int:
    """Returns the path of a text, or of token ids, by its first tokens; by fewer where there are no more.

    `length` is that of the text where only a part of it is given, which routers of the user's own may look at.
    """
    return int(self.scores(text, length).argmax())

  def scores(self, text: str | Sequence[int], length: int | None = None) -> np.ndarray:
    """Returns how well each path suits a text, [P] float32; see `path`."""
    return self.batch_scores([self.prefix(text)], [length] if length else None)[0]

  def prefix(self, text: str | Sequence[int]) -> np.ndarray:
    """Returns the tokens that decide a text's path; raises InputError if there are none.

    They are the first, but all for a user-defined router, which may look at how many they are.
    """
    is_own = isinstance(self.fitted, own_router.OwnRouter)
    tokens = token_ids(self.tokenizer, text) if is_own else beginning(self.tokenizer, text, self.prefix_tokens)
    if not len(tokens):
      raise InputError('an empty text has no path: give some text')
    return tokens

  def batch_scores(self, prefixes: Sequence[np.ndarray], lengths: Sequence[int] | None = None) -> np.ndarray:
    """Returns how well each path suits each of these prefixes, [B, P] float32. Compiles once for each B.

    `lengths` are the lengths of the texts, by default of the given parts.
    """
    tokens_BL, seen_BL = packing.pad(prefixes, self.prefix_tokens)
    if not isinstance(self.fitted, own_router.OwnRouter):
      return np.asarray(_scores(self.model, self.base, self.fitted, tokens_BL, seen_BL))
    z_BD = None
    if self.fitted.uses_features:
      z_BD = np.asarray(transformer.features_of_seen(self.model, self.base, tokens_BL, seen_BL))
    lengths = lengths or [len(tokens) for tokens in prefixes]
    texts = own_router.make_texts(prefixes, lengths, self.prefix_tokens, self.tokenizer.decode, z_BD)
    return self.fitted.scores(texts)


@functools.partial(jax.jit, static_argnums=0)
def _scores(model: transformer.Transformer, base: transformer.Params, fitted, tokens_BL, seen_BL) -> jax.Array:
  return router.scores(fitted, transformer.features_of_seen(model, base, tokens_BL, seen_BL))
