"""A trained run, in a folder, s3:// or gs://: one path of it, its router, its tokenizer.

A path is the modules that it picks [2.3]: these are read and verified, and no others. What two loaded paths share is in
memory once.

    import dipaco_jax

    path = dipaco_jax.load('runs/tiny', path=3)
    path.logits('The first words of a text')
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.algorithm import modules
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer_files
from dipaco_jax.data.tokenizer import Tokenizer, token_ids
from dipaco_jax.inference import path_arrays
from dipaco_jax.inference.run_files import RunFiles
from dipaco_jax.inference.text_router import TextRouter
from dipaco_jax.models import transformer
from dipaco_jax.routing import own_router
from dipaco_jax.storage import files, module_store, seals, user_modules
from dipaco_jax.storage.object_store import Missing

NOT_YET = 'let the run train on; python -m dipaco_jax.status shows its progress'
BASE = 'base/params.safetensors'
ModuleMarks = Mapping[str, tuple[str, int]]
T = TypeVar('T')


def load(
  workdir: str, path: int | Sequence[int] = 0, version: int | None = None, *, trust_modules: str | Sequence[str] = ()
) -> 'Path':
  """Loads one path of a run.

  Args:
    path: its number or its coordinates.
    version: of its modules; None: the version that early stopping chose [2.7].
    trust_modules: Python modules that configs of runs may name for parts of their own. Their code is executed when it
      is needed, in this and all later calls of this process.

  Raises:
    InputError: there is no such run, path or version; the message names those that exist. Or the run's config names a
      module that is not in `trust_modules`.
    seals.Damaged: an object is missing or is not as it was written.
  """
  return TrainedRun(workdir, trust_modules).path(path, version)


def load_router(workdir: str, *, trust_modules: str | Sequence[str] = ()) -> TextRouter:
  """Loads the router, which chooses a path by a text's beginning. Raises as `load`, or where there is no router."""
  return TrainedRun(workdir, trust_modules).router


@dataclasses.dataclass(frozen=True, repr=False)
class Path:
  """A path's parameters, ready for use: matrices are in the model's dtype."""

  number: int
  coordinates: tuple[int, ...]
  version: int
  model: transformer.Transformer
  modules: dict[str, path_arrays.Module]  # by level
  run: 'TrainedRun'

  def __repr__(self) -> str:
    size = sum(x.size for x in self.params.values())
    return f'<path {self.number} of {self.run.workdir}, version {self.version}: {size:,} parameters>'

  @functools.cached_property
  def params(self) -> transformer.Params:
    return dict(sorted(item for module in self.modules.values() for item in module.items()))

  @property
  def tokenizer(self) -> Tokenizer:
    return self.run.tokenizer

  def check_finite(self):
    """Raises InputError if a module holds numbers that are not finite; `load` only warns of them."""
    if fault := next((module.fault for module in self.modules.values() if module.fault), ''):
      raise InputError(fault)

  def logits(self, text: str | Sequence[int]) -> jax.Array:
    """Returns logits of the token after each token of a text, or of token ids: [L, V] float32."""
    return path_arrays.logits(self.model, self.params, token_ids(self.tokenizer, text)[None])[0]

  @functools.cached_property
  def marks(self) -> ModuleMarks:
    """The sha256 of each level's module, and the lowest block whose output it changes."""
    N = self.model.config.num_layers
    lowest = path_arrays.lowest_block
    return {level: (m.sha256, min(lowest(name, N) for name in m)) for level, m in self.modules.items()}

  def first_difference(self, other: ModuleMarks) -> int:
    """Returns the lowest block that differs in a path of these marks; the number of blocks where none does."""
    differ = (lowest for level, (sha256, lowest) in self.marks.items() if sha256 != other[level][0])
    return min(differ, default=self.model.config.num_layers)


class TrainedRun:
  """A run's settings, tokenizer, router and paths, read when they are first asked for."""

  def __init__(self, workdir: str, trust_modules: str | Sequence[str] = (), needs_modules: bool = True):
    """Reads the settings; imports nothing.

    Args:
      trust_modules: as for `load`.
      needs_modules: whether parts of the user's will be needed, so that each has to be trusted.

    Raises InputError if there is no run, or where it needs a module that is not trusted.
    """
    self.workdir, self.files = workdir, RunFiles(workdir)
    self.settings = _read_settings(self.files)
    user_modules.trust(trust_modules or ())
    if needs_modules:
      user_modules.check_run(self.settings, self.files.storage.url)
    for module in user_modules.find_changed(self.settings):
      logging.warning('the source of %s has changed since this run was trained: results may differ', module)
    self._loaded: weakref.WeakValueDictionary[str, path_arrays.Module] = weakref.WeakValueDictionary()

  def __repr__(self) -> str:
    return f'<run {self.workdir}: {self.layout.grid.num_paths} paths>'

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    def read(name: str) -> bytes:
      if file := self.files.storage.local_path(name):  # an export copies it
        files.check_inside(file, file.parent)
      with self.files.required(name):
        return self.files.read(name)

    return tokenizer_files.read(self.settings.tokenizer, self.files.storage.exists, read)

  @functools.cached_property
  def layout(self) -> modules.Layout:
    shapes = transformer.shapes(transformer.make_model(self.settings.model, 1))
    return modules.make_layout(self.settings.grid, self.settings.levels, shapes)

  @property
  def best_versions(self) -> list[int]:
    """The version that each path points at now (others are removed). Raises InputError if none is published yet."""
    try:
      versions = self.files.read_json('paths/best.json', 'version')['version']
    except Missing as e:
      if self.files.storage.exists('stages/train.json'):
        raise self.files.damaged('paths/best.json') from e
      raise InputError(f'--workdir={self.workdir}: no path is published yet: {NOT_YET}') from e
    if not module_store.are_versions(versions) or len(versions) != self.layout.grid.num_paths:
      raise self.files.damaged('paths/best.json')
    return versions

  @property
  def paths_here(self) -> list[int]:
    """The paths that can be loaded: all, but in an owner's store those of the owner."""
    paths = range(self.layout.grid.num_paths)
    if not self.settings.data.own_text:
      return [*paths]
    here = []
    for path in paths:
      with contextlib.suppress(InputError):
        self.module_files(path, self.best_versions[path])
        here.append(path)
    return here

  @functools.cached_property
  def report(self) -> dict[str, Any]:
    """The contents of report.json, or {} if the run has not come to its report."""
    try:
      return self.files.read_json('report.json')
    except Missing:
      return {}

  def path(self, path: int | str | Sequence[int | str], version: int | None = None) -> Path:
    """Loads a path; see `load`."""
    number = self.number(path)
    return self.at_version(number, version, functools.partial(self._path, number))

  def at_version(self, number: int, version: int | None, read: Callable[[int], T]) -> T:
    """Returns read(version); of None with the path's best one, and the next where a run that trains has removed it."""
    if version is not None:
      return read(version)
    while True:
      version = self.best_versions[number]
      try:
        return read(version)
      except InputError:
        if self.best_versions[number] == version:
          raise

  def _path(self, number: int, version: int) -> Path:
    coordinates = self.layout.grid.coordinates(number)
    modules = {level: self._module(*place) for level, place in self.module_files(number, version).items()}
    params = {name: x for module in modules.values() for name, x in module.items()}
    vocab_size = self.check_parameters(params, f'modules of path {number}, version {version}')
    return Path(number, coordinates, version, transformer.make_model(self.settings.model, vocab_size), modules, self)

  def finite_arrays(self, name: str, sha256: str = '') -> dict[str, np.ndarray]:
    """Reads the arrays of a file; raises InputError if some of their numbers are not finite."""
    arrays = self.files.required_arrays(name, sha256)
    if fault := path_arrays.find_fault(arrays, name):
      raise InputError(fault)
    return arrays

  def check_parameters(self, params: Mapping[str, np.ndarray | jax.Array], where: str) -> int:
    """Returns the rows of the embedding; raises InputError if the parameters are not those of the run's model."""
    rows = path_arrays.check(params, self.settings.model, where)
    if rows != (num_tokens := self.tokenizer.vocab_size):
      difference = f'embed/tokens has {rows:,} rows, and the tokenizer of this run {num_tokens:,} tokens'
      raise InputError(f'{where}: {difference}: these are not the files of one run')
    return rows

  def number(self, path: int | str | Sequence[int | str]) -> int:
    """Returns the number of a path given by number, name or coordinates; raises InputError if there is no such path."""
    try:
      return self.layout.grid.find(path)
    except InputError as e:
      raise InputError(f'--path={e}') from e

  def module_files(self, number: int, version: int) -> dict[str, tuple[str, str]]:
    """Returns {level: (file, sha256)} of a path's modules; raises InputError if there is no such version."""
    digests, files_by_level = self._digests(version), {}
    for level in self.layout.levels:
      module = self.layout.grid.module(level, self.layout.grid.coordinates(number))
      key = f'{module_store.module_key(level, module)}.safetensors'
      if key not in digests and self.settings.data.own_text:
        name = self.layout.grid.path_name(number)
        raise InputError(f'--path={name}: it is not in {self.workdir}; its owner has it, in a store of its own')
      files_by_level[level.name] = f'modules/{version}/{key}', digests.get(key, seals.UNKNOWN)
    return files_by_level

  @property
  def router(self) -> TextRouter:
    """The router of the newest round, or that fitted after training.

    Raises InputError, without the workdir, as servers pass it on to clients.
    """
    if self._router is None:
      method = self.settings.routing.method
      if method in ('random', 'owner', 'single') and not self.settings.evaluate.refit_router:
        raise InputError(f'config.routing.method={method!r} has no router: name a path')
      raise InputError(f'there is no router yet: {NOT_YET}')
    return self._router

  @functools.cached_property
  def _router(self) -> TextRouter | None:
    s = self.settings
    if s.evaluate.refit_router and self._is_refitted():
      return self._text_router(self.finite_arrays('evaluation/router.safetensors'))
    for number in range(s.rounds, -1, -1):
      if self.files.storage.exists(name := f'routing/{number}/router.safetensors'):
        return self._text_router(self.finite_arrays(name))
    return None

  def _is_refitted(self) -> bool:
    """Whether the run is evaluated, with a router that was fitted after training; not so while it trains on."""
    return 'router_refit' in self._result('evaluate')

  def _text_router(self, arrays: Mapping[str, np.ndarray]) -> TextRouter:
    s, base = self.settings, self.base
    fitted = own_router.of_arrays(s, arrays)
    model = transformer.make_model(s.model, len(base['embed/tokens']))
    return TextRouter(fitted, model, path_arrays.on_device(base, model), s.routing.prefix_tokens, self.tokenizer)

  @property
  def base(self) -> dict[str, np.ndarray]:
    arrays = self.finite_arrays(BASE)
    self.check_parameters(arrays, BASE)
    return arrays

  @property
  def max_positions(self) -> int:
    """Returns the tokens that a text may have, as the model says that the base is of, or 0 if it is of none."""
    most = self.origin.get('max_positions', 0)
    if type(most) is not int:
      raise self.files.damaged('stages/pretrain.json')
    return most

  @functools.cached_property
  def origin(self) -> dict[str, Any]:
    """Returns what the run has recorded of the model that its base is of, or {} if it is of none."""
    return self._result('pretrain', 'init')

  def _result(self, stage: str, part: str = '') -> dict[str, Any]:
    """Returns the result of a stage, or a part of it, or {} if there is none."""
    try:
      result = self.files.read_json(name := f'stages/{stage}.json', 'result')['result']
    except Missing:
      return {}
    content = result.get(part, {}) if part and isinstance(result, dict) else result
    if not isinstance(content, dict):
      raise self.files.damaged(name)
    return content

  @functools.cached_property
  def chooser(self) -> transformer.Params | None:
    """The learned chooser [7.2.2], where the run has trained one."""
    try:
      arrays = self.files.read_arrays('evaluation/chooser.safetensors')
    except Missing:
      return None
    return {name: jnp.asarray(x) for name, x in arrays.items()}

  def _digests(self, version: int) -> dict[str, str]:
    """Returns {file: sha256} of a version's modules; each process of the job has written an index."""
    digests: dict[str, str] = {}
    for process in itertools.count():
      try:
        digests |= self.files.read_json(f'modules/{version}/index-{process}.json')
      except Missing as e:
        if not digests:
          parts = {name.split('/')[1] for name in self.files.storage.names('modules')}
          versions = sorted(int(part) for part in parts if part.isdecimal())
          hint = f'there are {", ".join(map(str, versions))}' if versions else NOT_YET
          raise InputError(f'--workdir={self.workdir}: there is no version {version}; {hint}') from e
        break
    return digests

  def _module(self, name: str, sha256: str) -> path_arrays.Module:
    if (module := self._loaded.get(sha256)) is None:
      arrays = self.files.required_arrays(name, sha256)
      module = path_arrays.Module(path_arrays.on_device(arrays, transformer.make_model(self.settings.model, 1)))
      module.sha256, module.fault = sha256, path_arrays.find_fault(arrays, name)
      if module.fault:
        logging.warning('%s', module.fault)
      self._loaded[sha256] = module
    return module


def _read_settings(files: RunFiles) -> settings_lib.Settings:
  try:
    return settings_lib.of_run(seals.loads(bytes(files.storage.fetch('config.json'))))
  except (Missing, NotADirectoryError) as e:
    raise InputError(f'--workdir={files.workdir}: there is no run here (no config.json); name the folder of one') from e
  except OSError as e:
    raise InputError(f'--workdir={files.workdir}: {e.strerror or e}; check its name and your credentials') from e
  except InputError as e:
    raise InputError(f'--workdir={files.workdir}: {e}') from e
