"""User-defined routers, 'package.module:name' in config.routing.method, which are fitted on texts and score paths.

make(config.routing) returns an object with

    fit(texts, num_paths, seed) -> state        {name: array}, which is kept as router.safetensors
    scores(state, texts) -> [N, P]              higher is better; of each text by itself
    uses_features = True                        if it looks at texts.features

These scores are used like those of built-in routers: they choose the best `top_n` paths, within `capacity`. Pure,
except for the user's part, which is imported and called here.

Dimensions: N texts, P paths, T tokens of the prefix, D width.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.routing.router import Router, check_features

FIELD = 'routing.method'
REHEARSED = 256  # made-up texts, at least
ALONE = 0.01  # of the largest score: more than numerics alone change where a text is scored by itself


@dataclasses.dataclass(frozen=True)
class Texts:
  """Inputs of a router for N texts, the same in training, evaluation and serving."""

  tokens: np.ndarray  # int32 [N, T], the first `routing.prefix_tokens`; 0 behind the end of a shorter text
  lengths: np.ndarray  # int32 [N], tokens of the whole document; in serving of what there is, as a prompt
  _decode: Callable[[np.ndarray], str]
  _features: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.tokens)

  @functools.cached_property
  def words(self) -> list[str]:
    """The texts of `tokens`."""
    sizes = np.minimum(self.lengths, self.tokens.shape[1])
    return [self._decode(tokens[:size]) for tokens, size in zip(self.tokens, sizes, strict=True)]

  @property
  def features(self) -> np.ndarray:
    """z of the first tokens, float32 [N, D]."""
    if self._features is None:
      raise ValueError('texts.features are made for routers with `uses_features = True` alone: set that')
    return self._features


def make_texts(
  tokens: Iterable[np.ndarray],
  lengths: Sequence[int] | np.ndarray,
  prefix: int,
  decode: Callable[[np.ndarray], str],
  features: np.ndarray | None = None,
) -> Texts:
  """Makes the inputs of a router from token lists, each cut to its first `prefix` tokens."""
  tokens_NT = np.zeros((len(lengths), prefix), np.int32)
  for row, mine in zip(tokens_NT, tokens, strict=True):
    row[: len(mine)] = mine[:prefix]
  return Texts(tokens_NT, np.asarray(lengths, np.int32), decode, features)


@dataclasses.dataclass(frozen=True)
class OwnRouter:
  """A fitted user-defined router."""

  config: settings.Routing
  num_paths: int
  state: Mapping[str, np.ndarray]

  @functools.cached_property
  def router(self) -> Any:
    return make(self.config)

  @property
  def uses_features(self) -> bool:
    return bool(getattr(self.router, 'uses_features', False))

  def scores(self, texts: Texts) -> np.ndarray:
    """Returns the score of each path for each text, float32 [N, P]; raises InputError for other results."""
    router, shape = self.router, (len(texts), self.num_paths)
    with extension.blaming(FIELD, self.config.method):
      scores = np.asarray(router.scores(self.state, texts))
    if scores.shape != shape or scores.dtype.kind in 'OSU':
      expected = f'a number for each of {len(texts)} texts and {self.num_paths} paths is asked, {[*shape]}'
      raise _wrong(self.config, f'scores returns {scores.dtype} {[*scores.shape]}: {expected}')
    scores = scores.astype(np.float32)
    if not np.isfinite(scores).all():
      text, path = np.argwhere(~np.isfinite(scores))[0]
      raise _wrong(self.config, f'scores are not finite: {scores[text, path]} for text {text} and path {path}')
    return scores

  def route(self, texts: Texts, top_n: int = 1) -> np.ndarray:
    """Returns the `top_n` best paths of each text, best first, ties to the lower: int32 [N, top_n]."""
    return np.argsort(-self.scores(texts), axis=1, kind='stable')[:, :top_n].astype(np.int32)


AnyRouter = Router | OwnRouter


def make(config: settings.Routing) -> Any:
  """Makes the user's router, not yet fitted; raises InputError if it lacks a method of routers."""
  router = extension.make(FIELD, config.method, config)
  for name in ('fit', 'scores'):
    if not callable(getattr(router, name, None)):
      problem = f'returns a {type(router).__name__} without {name}(...)'
      raise _wrong(config, f'{problem}: expected an object with fit and scores')
  return router


def uses_features(config: settings.Routing) -> bool:
  """Returns whether the router of these settings uses features; built-in routers always do."""
  return not extension.is_reference(config.method) or OwnRouter(config, 0, {}).uses_features


def fit(config: settings.Routing, num_paths: int, seed: int, texts: Texts) -> OwnRouter:
  """Fits the user's router; raises InputError if its state is not arrays by name, or a feature is not finite."""
  router = make(config)
  if texts._features is not None:
    check_features(texts._features)
  with extension.blaming(FIELD, config.method):
    returned = router.fit(texts, num_paths, seed)
    state = {name: np.asarray(x) for name, x in returned.items()} if isinstance(returned, Mapping) else None
  if state is None or not all(isinstance(name, str) and x.dtype.kind in 'biuf' for name, x in state.items()):
    what = type(returned).__name__ if state is None else {name: str(x.dtype) for name, x in state.items()}
    raise _wrong(config, f'fit returns {what}: its state, a dict of arrays of numbers by name, is expected')
  return OwnRouter(config, num_paths, state)


def rehearse(s: settings.Settings) -> None:
  """Fits the user's router on texts that are made up, before any work. Raises InputError if it fails."""
  rng = np.random.default_rng(0)
  prefix = s.routing.prefix_tokens
  num_texts = max(REHEARSED, 2 * s.num_paths)
  z_ND = rng.normal(size=(num_texts, s.model.width)).astype('f') if uses_features(s.routing) else None
  lengths = rng.integers(prefix + 1, 16 * s.model.seq_len, num_texts)
  tokens = rng.integers(0, s.tokenizer.vocab_size, (num_texts, prefix))

  def some(count: int) -> Texts:
    features = None if z_ND is None else z_ND[:count]
    return make_texts(tokens[:count], lengths[:count], prefix, lambda ids: ' '.join(map(str, ids)), features)

  fitted = fit(s.routing, s.num_paths, s.seed, some(num_texts))
  together, alone = fitted.scores(some(num_texts)), fitted.scores(some(1))
  if np.abs(together[0] - alone[0]).max() > ALONE * max(1.0, np.abs(together[0]).max()):
    raise _wrong(s.routing, 'the scores of a text differ if it is scored alone: they may depend on it only')


def arrays(fitted: AnyRouter) -> dict[str, np.ndarray]:
  """Returns the arrays of a router, as its file holds them."""
  by_name = fitted.state if isinstance(fitted, OwnRouter) else fitted._asdict()
  return {name: np.asarray(x) for name, x in by_name.items()}


def of_arrays(s: settings.Settings, by_name: Mapping[str, np.ndarray]) -> AnyRouter:
  """Makes the router of a run from the arrays of its file; built-in routers are put on the device."""
  if extension.is_reference(s.routing.method):
    return OwnRouter(s.routing, s.num_paths, dict(by_name))
  return Router(**{name: jnp.asarray(x) for name, x in by_name.items()})


def _wrong(config: settings.Routing, problem: str) -> InputError:
  return InputError(f'config.{FIELD}={config.method!r}: {problem}')
