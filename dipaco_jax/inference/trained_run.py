"""A trained run, in a folder, s3:// or gs://: one path of it, its router, its tokenizer.

A path is the modules that it picks [2.3]: these are read, verified, and nothing else. What two loaded paths share is in
memory once.

    import dipaco_jax

    path = dipaco_jax.load('runs/tiny', path=3)
    path.logits('The first words of a text')
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dipaco_jax.core import modules
from dipaco_jax.core import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer as tokenizer_lib
from dipaco_jax.models import transformer as model_lib
from dipaco_jax.routing import router
from dipaco_jax.storage import module_store, remedies, seals
from dipaco_jax.storage import object_store as storage_lib

PATIENCE_S = 30  # for a bucket that does not answer
NOT_YET = 'let the run train on; python -m dipaco_jax.status says where it is'
Marks = Mapping[str, tuple[str, int]]


def load(workdir: str, path: int | Sequence[int] = 0, version: int | None = None) -> 'Path':
  """One path of a run: its number or its coordinates, at the version that early stopping chose [2.7] or another.

  Raises:
    InputError: there is no run, path or version, with what there is.
    seals.Damaged: an object is missing or is not as it was written.
  """
  return Trained(workdir).path(path, version)


def load_router(workdir: str) -> 'Router':
  """What chooses a path by a text's beginning; raises as `load`, and where text was dealt out at random."""
  return Trained(workdir).router


def block_of(name: str, num_layers: int) -> int:
  """The lowest block whose output a parameter changes: 0 for the embedding, N for what is behind all blocks."""
  part = name.partition('/')[0]
  return int(part.removeprefix('block_')) if part.startswith('block_') else 0 if part == 'embed' else num_layers


class Module(dict[str, jax.Array]):
  """A module's parameters; `sha256` is that of the object that they were read from."""

  sha256: str

  def __repr__(self) -> str:
    return f'<module of {sum(x.size for x in self.values()):,} parameters: {", ".join(self)}>'


@dataclasses.dataclass(frozen=True, repr=False)
class Path:
  """A path's parameters, ready for use: matrices are in the model's dtype."""

  number: int
  coordinates: tuple[int, ...]
  version: int
  model: model_lib.Transformer
  modules: dict[str, Module]  # by level
  run: 'Trained'

  def __repr__(self) -> str:
    size = sum(x.size for x in self.params.values())
    return f'<path {self.number} of {self.run.workdir}, version {self.version}: {size:,} parameters>'

  @functools.cached_property
  def params(self) -> model_lib.Params:
    return dict(sorted(item for module in self.modules.values() for item in module.items()))

  @property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    return self.run.tokenizer

  def logits(self, text: str | Sequence[int]) -> jax.Array:
    """[L, V] float32: of what follows each token of a text, or of token ids."""
    return _logits(self.model, self.params, _ids(self.tokenizer, text)[None])[0]

  @functools.cached_property
  def marks(self) -> Marks:
    """By level, what its module is told by from others, and the lowest block that it changes."""
    N = self.model.config.num_layers
    return {level: (m.sha256, min(block_of(name, N) for name in m)) for level, m in self.modules.items()}

  def first_difference(self, other: Marks) -> int:
    """The lowest block that computes something else in a path of these marks; N, the number of blocks: none does."""
    differ = (lowest for level, (sha256, lowest) in self.marks.items() if sha256 != other[level][0])
    return min(differ, default=self.model.config.num_layers)


@dataclasses.dataclass(frozen=True, repr=False)
class Router:
  """r(z) with the base model that makes z [2.4]."""

  fitted: router.Router
  model: model_lib.Transformer
  base: model_lib.Params
  prefix_tokens: int
  tokenizer: tokenizer_lib.Tokenizer

  def __repr__(self) -> str:
    return f'<router to {len(self.fitted.bias)} paths, by the first {self.prefix_tokens} tokens>'

  def path(self, text: str | Sequence[int]) -> int:
    """The path of a text, or of token ids, by its first tokens; by fewer where there are no more."""
    return int(self.scores(text).argmax())

  def scores(self, text: str | Sequence[int]) -> np.ndarray:
    """How well each path suits a text, [P] float32."""
    tokens = _ids(self.tokenizer, text)[: self.prefix_tokens]
    if not len(tokens):
      raise InputError('an empty text has no path: give it a word')
    padded = np.zeros((1, self.prefix_tokens), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_scores(self.model, self.base, self.fitted, padded, np.int32(len(tokens))))


class Trained:
  """A run's artefacts, read as they are asked for."""

  def __init__(self, workdir: str):
    """Raises InputError where there is no run."""
    self.storage = storage_lib.open_storage(workdir, PATIENCE_S)
    self.workdir = workdir
    try:
      self.settings = settings_lib.of_run(seals.loads(bytes(self.storage.fetch('config.json'))))
    except (storage_lib.Missing, NotADirectoryError) as e:
      raise InputError(f'--workdir={workdir}: there is no run here (no config.json); name the folder of one') from e
    except OSError as e:
      raise InputError(f'--workdir={workdir}: {e.strerror or e}; see to its name and to credentials') from e
    except (ValueError, AttributeError, TypeError) as e:
      raise InputError(
        f'--workdir={workdir}: its config.json is not that of a run, or damaged ({e}); name another, or, if it was '
        'that of a run, remove it, and the command of the run makes it again'
      ) from e
    self._loaded: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()

  def __repr__(self) -> str:
    return f'<run {self.workdir}: {self.layout.grid.num_paths} paths>'

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    return tokenizer_lib.Tokenizer(self.tokenizer_model)

  @functools.cached_property
  def tokenizer_model(self) -> bytes:
    """SentencePiece's own file."""
    with self._naming('tokenizer.model'):
      return self._read('tokenizer.model')

  @functools.cached_property
  def layout(self) -> modules.Layout:
    s = self.settings
    return modules.make_layout(s.grid, s.levels, model_lib.shapes(model_lib.make(s.model, 1)))

  @property
  def best_versions(self) -> list[int]:
    """The version that each path points at now: a run that goes on removes what none does. Raises InputError where
    nothing is published yet."""
    try:
      return self._read_json('paths/best.json', 'version')['version']
    except storage_lib.Missing as e:
      if self.storage.exists('stages/train.json'):
        raise seals.Damaged('paths/best.json', self._fault('paths/best.json')) from e
      raise InputError(f'--workdir={self.workdir}: no path is published yet: {NOT_YET}') from e

  @functools.cached_property
  def report(self) -> dict[str, Any]:
    """What report.json holds; nothing where the run has not come to its report."""
    try:
      return self._read_json('report.json')
    except storage_lib.Missing:
      return {}

  def path(self, path: int | Sequence[int], version: int | None = None) -> Path:
    """See `load`."""
    number = self.number(path)
    version = self.best_versions[number] if version is None else version
    coordinates = self.layout.grid.coordinates(number)
    found = {level: self._module(*place) for level, place in self.places(number, version).items()}
    vocab_size = next(m['embed/tokens'].shape[0] for m in found.values() if 'embed/tokens' in m)
    return Path(number, coordinates, version, model_lib.make(self.settings.model, vocab_size), found, self)

  def places(self, number: int, version: int) -> dict[str, tuple[str, str]]:
    """Where a path's modules are: by level the object and its sha256. Raises InputError where there is no version."""
    recorded, found = self._recorded(version), {}
    for level in self.layout.levels:
      module = self.layout.grid.module(level, self.layout.grid.coordinates(number))
      key = f'{module_store.module_key(level, module)}.safetensors'
      found[level.name] = f'modules/{version}/{key}', recorded.get(key, seals.UNKNOWN)
    return found

  def number(self, path: int | Sequence[int]) -> int:
    """Of a path, which may be given by its coordinates; raises InputError where there is no such path."""
    grid = self.layout.grid
    if isinstance(path, int | np.integer):
      if 0 <= path < grid.num_paths:
        return int(path)
    elif len(path) == len(grid.shape) and all(i in range(size) for i, size in zip(path, grid.shape, strict=True)):
      return grid.path(tuple(path))
    words = ','.join(map(str, path)) if isinstance(path, tuple | list) else path
    sizes = ' x '.join(map(str, grid.shape)) or 'one path'
    raise InputError(f'--path={words}: the paths are 0 to {grid.num_paths - 1}, of a grid of {sizes}')

  def parameters(self, name: str, sha256: str = '') -> dict[str, np.ndarray]:
    """Arrays of a safetensors object."""
    try:
      return safetensors.numpy.load(self._read(name, sha256))
    except safetensors.SafetensorError as e:
      raise seals.Damaged(name, self._fault(name)) from e

  @property
  def router(self) -> Router:
    """Of the last round of sharding that there was; raises InputError where there is none."""
    if self._router is None:
      method = self.settings.routing.method
      if method in ('random', 'single'):
        raise InputError(f'--workdir={self.workdir}: config.routing.method={method!r} has no router: name a path')
      raise InputError(f'--workdir={self.workdir}: there is no router yet: {NOT_YET}')
    return self._router

  @functools.cached_property
  def _router(self) -> Router | None:
    s, arrays = self.settings, None
    for number in range(s.rounds, -1, -1):
      with contextlib.suppress(storage_lib.Missing):
        arrays = self.parameters(f'routing/{number}/router.safetensors')
        break
    if arrays is None:
      return None
    fitted = router.Router(**{name: jnp.asarray(x) for name, x in arrays.items()})
    base = self.base
    made = model_lib.make(s.model, len(base['embed/tokens']))
    return Router(fitted, made, _ready(base, made), s.routing.prefix_tokens, self.tokenizer)

  @property
  def base(self) -> dict[str, np.ndarray]:
    """Parameters of the base model."""
    with self._naming('base/params.safetensors'):
      return self.parameters('base/params.safetensors')

  @functools.cached_property
  def chooser(self) -> model_lib.Params | None:
    """The learned chooser [7.2.2], where the run has trained one."""
    try:
      return {name: jnp.asarray(x) for name, x in self.parameters('evaluation/chooser.safetensors').items()}
    except storage_lib.Missing:
      return None

  def _read(self, name: str, sha256: str = '') -> bytes:
    """An object as it was written, by its seal if no sha256 is given. Raises storage.Missing, seals.Damaged."""
    folder, _, own = f'./{name}'.rpartition('/')

    def text(beside: str) -> str | None:
      try:
        return bytes(self.storage.fetch(f'{folder}/{beside}'[2:])).decode(errors='replace')
      except storage_lib.Missing:
        return None

    data = bytes(self.storage.fetch(name))
    expected = sha256 or seals.recorded(own, text)
    if expected and hashlib.sha256(data).hexdigest() != expected:
      raise seals.Damaged(name, self._fault(name))
    return data

  def _read_json(self, name: str, *needed: str) -> dict[str, Any]:
    if (found := seals.loads(self._read(name), *needed)) is None:
      raise seals.Damaged(name, self._fault(name))
    return found

  def _fault(self, name: str) -> str:
    file = self.storage.local_path(name)
    return remedies.explain(file) if file else f'{self.storage.url_of(name)} is missing or not as it was written'

  @contextlib.contextmanager
  def _naming(self, name: str) -> Iterator[None]:
    """For what a finished stage has left."""
    try:
      yield
    except storage_lib.Missing as e:
      raise seals.Damaged(name, self._fault(name)) from e

  def _recorded(self, version: int) -> dict[str, str]:
    """{object: sha256} of a version's modules; each process of a job has written an index."""
    recorded: dict[str, str] = {}
    for process in itertools.count():
      try:
        recorded |= self._read_json(f'modules/{version}/index-{process}.json')
      except storage_lib.Missing as e:
        if not recorded:
          there = sorted({int(name.split('/')[1]) for name in self.storage.names('modules')})
          words = f'there are {", ".join(map(str, there))}' if there else NOT_YET
          raise InputError(f'--workdir={self.workdir}: there is no version {version}; {words}') from e
        return recorded
    raise AssertionError

  def _module(self, name: str, sha256: str) -> Module:
    if (module := self._loaded.get(sha256)) is None:
      arrays = self.parameters(name, sha256)
      module = Module(_ready(arrays, model_lib.make(self.settings.model, 1)))
      module.sha256 = sha256
      self._loaded[sha256] = module
    return module


def _ids(tokenizer: tokenizer_lib.Tokenizer, text: str | Sequence[int]) -> np.ndarray:
  """Of a text, or those given; raises InputError where one is none of the vocabulary."""
  ids = np.asarray(tokenizer.encode(text, eos=False) if isinstance(text, str) else text, np.int64)
  if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
    raise InputError(f'token ids should be from 0 to {tokenizer.vocab_size - 1}; given are {ids.min()} to {ids.max()}')
  return ids.astype(np.int32)


def _ready(arrays: dict[str, np.ndarray], made: model_lib.Transformer) -> dict[str, Any]:
  """On the device; matrices in the model's dtype, in which they are used."""
  return {name: jnp.asarray(x, made.dtype if x.ndim > 1 else x.dtype) for name, x in arrays.items()}


@functools.partial(jax.jit, static_argnums=0)
def _logits(made: model_lib.Transformer, params: model_lib.Params, tokens_BL: jax.Array) -> jax.Array:
  x_BLD, head_DV = model_lib.normed_and_head(made, params, tokens_BL, jnp.ones_like(tokens_BL))
  return jnp.einsum('BLD,DV->BLV', x_BLD, head_DV, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _scores(made: model_lib.Transformer, base: model_lib.Params, fitted: router.Router, tokens_1L, length) -> jax.Array:
  seen_1L = (jnp.arange(tokens_1L.shape[1]) < length)[None]
  x_1LD = model_lib.hidden(made, base, tokens_1L, seen_1L.astype(jnp.int32)).astype(jnp.float32)
  z_1D = (x_1LD * seen_1L[..., None]).sum(axis=1) / length
  return router.scores(fitted, z_1D)[0]
