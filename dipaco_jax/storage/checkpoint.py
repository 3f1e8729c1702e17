"""What survives: files and directories published whole or not at all, and modules that others read.

A module of a version is one self-contained safetensors object, `modules/<version>/<level>/<c0-c1>.safetensors`, the
version being the number of outer steps inside; `load_path` reads one path's objects and no more.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dipaco_jax.core.errors import InputError
from dipaco_jax.core.grid import Coordinates, Level
from dipaco_jax.core.modules import Layout, Modules
from dipaco_jax.storage import seals, trees

Path = pathlib.Path
Data = bytes | memoryview
HOLD_ATTEMPTS = 10
DTYPES = {  # in safetensors' order
  'U64': np.uint64, 'I64': np.int64, 'F64': np.float64, 'F32': np.float32, 'U32': np.uint32, 'I32': np.int32,
  'BF16': jnp.bfloat16, 'F16': np.float16, 'U16': np.uint16, 'I16': np.int16, 'I8': np.int8, 'U8': np.uint8,
  'BOOL': np.bool_,
}  # fmt: skip
BARRIER_MS = 7 * 24 * 3_600_000


def read_file(path: Path) -> memoryview:
  """A file's bytes, which may be written to; in NumPy's huge pages, twice as fast as into `bytes`."""
  with open(path, 'rb') as f:
    data = np.empty(os.fstat(f.fileno()).st_size, np.uint8).data
    return data[: f.readinto(data)]


def write_file(path: Path, *parts: Data | str):
  """Whole or not at all, on the disk before it is seen: written aside, synced, renamed."""
  path.parent.mkdir(parents=True, exist_ok=True)
  aside = beside(path)
  try:
    with open(aside, 'wb') as f:
      f.writelines(part.encode() if isinstance(part, str) else part for part in parts)
      f.flush()
      os.fsync(f.fileno())
    os.replace(aside, path)
  finally:
    aside.unlink(missing_ok=True)
  sync(path.parent)


def beside(path: Path) -> Path:
  """Where a file is written before it has its name. Two containers that share a folder have processes of one number."""
  return path.with_name(f'.{path.name}.{secrets.randbits(63)}')


def sync(path: Path):
  """Makes a file's bytes, or the names in a directory, survive a power cut."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def write_sealed(path: Path, data: Data):
  """As `write_file`, after a seal beside it: where nothing but the seal is new, the file is made again."""
  write_file(path.with_name(f'{path.name}.sha256'), seals.line(path.name, hashlib.sha256(data).hexdigest()))
  write_file(path, data)


def write_array(path: Path, array: np.ndarray):
  """As `write_sealed`: an .npy file."""
  data = io.BytesIO()
  np.save(data, array)
  write_sealed(path, data.getbuffer())


def write_json(path: Path, value: Any):
  """As `write_file`, with the seal inside; keys in the order given."""
  write_file(path, seals.dumps(value))


@contextlib.contextmanager
def publish_directory(path: Path, sealed: bool = True) -> Iterator[Path]:
  """Yields a directory aside, and renames it to `path` if the block ends well. Leftovers of killed runs are removed.

  `sealed`: a seal of its files is written; else it is a copy, which has that of the original.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  for leftover in path.parent.iterdir():
    if leftover != path and trees.written_as(leftover) == path and leftover.is_dir():
      shutil.rmtree(leftover)
  aside = beside(path)
  aside.mkdir()
  try:
    yield aside
  except BaseException:
    shutil.rmtree(aside, ignore_errors=True)
    raise
  if sealed and (sums := seals.sums(aside)):
    (aside / seals.SUMS).write_text(sums)
  for written in (*aside.rglob('*'), aside):
    sync(written)
  put_in_place(aside, path)


def missing(paths: Sequence[Path], share: tuple[int, int]) -> list[int]:
  """Of the parts of share (k, n), which are k, k + n, k + 2n..., those that are not there as they were written."""
  return [i for i in range(len(paths))[share[0] :: share[1]] if not (paths[i].is_dir() or seals.is_whole(paths[i]))]


def put_in_place(aside: Path, path: Path):
  """Renames a directory that is complete; one that has its name goes. What has the name is whole at every moment."""
  old = path.with_name(f'.{path.name}.old')
  shutil.rmtree(old, ignore_errors=True)  # of a run that was killed
  if path.exists():
    os.replace(path, old)
  os.replace(aside, path)
  sync(path.parent)
  shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
  """One run per workdir; raises InputError that says who holds it."""
  with open(workdir / 'lock', 'a+') as f:
    for attempt in range(HOLD_ATTEMPTS):  # `status` looks at the lock for a moment, a killed process takes one to go
      with contextlib.suppress(BlockingIOError):
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      time.sleep(0.2 * (attempt + 1 < HOLD_ATTEMPTS))
    else:
      f.seek(0)
      owner = json.loads(f.read() or '{}')
      raise InputError(
        f'--workdir={workdir} is in use by process {owner.get("pid")} on {owner.get("host")} since '
        f'{owner.get("started")}: wait for it, stop it, or choose another; where that host is gone for good and a '
        'file server still keeps its lock, remove the file `lock` there'
      )
    f.truncate(0)
    started = time.strftime('%Y-%m-%d %H:%M:%S')
    f.write(json.dumps({'pid': os.getpid(), 'host': socket.gethostname(), 'started': started}))
    f.flush()
    yield


# -- published modules


def module_name(module: Coordinates) -> str:
  """A module's name among those of its level: its coordinates."""
  return '-'.join(map(str, module)) or 'shared'


def module_key(level: Level, module: Coordinates) -> str:
  """A module's name among those of its version."""
  return f'{level.name}/{module_name(module)}'


def module_file(workdir: Path, version: int, level: Level, module: Coordinates) -> Path:
  """Where a module of a version is."""
  return workdir / 'modules' / str(version) / f'{module_key(level, module)}.safetensors'


def to_bytes(arrays: Mapping[str, np.ndarray]) -> memoryview:
  """What `safetensors.numpy.save` makes, with one copy instead of two: equal arrays give equal bytes."""
  names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
  order, header, end = list(names), {}, 0
  for name, x in sorted(arrays.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
    header[name] = {'dtype': names[x.dtype], 'shape': x.shape, 'data_offsets': [end, end := end + x.nbytes]}
  text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
  text += b' ' * (-len(text) % 8)
  data = np.empty(8 + len(text) + end, np.uint8).data
  data[: 8 + len(text)] = len(text).to_bytes(8, 'little') + text
  for name, view in from_bytes(data).items():
    np.copyto(view, arrays[name])
  return data


def from_bytes(data: memoryview) -> dict[str, np.ndarray]:
  """Arrays of a safetensors object: views of its bytes, where `safetensors.numpy.load` makes copies."""
  start = 8 + int.from_bytes(data[:8], 'little')
  header = json.loads(bytes(data[8:start]))
  return {
    name: np.ndarray(x['shape'], DTYPES[x['dtype']], data, start + x['data_offsets'][0])
    for name, x in header.items()
    if name != '__metadata__'
  }


def addressable_modules(layout: Layout, modules: Modules) -> Iterator[tuple[Level, Coordinates, dict[str, np.ndarray]]]:
  """The modules that this process is to write: those whose first replica is on its devices."""
  for level in layout.levels:
    n = len(level.axes)
    found: dict[Coordinates, dict[str, np.ndarray]] = {}
    for name, stacked in modules[level.name].items():
      for shard in stacked.addressable_shards:
        if shard.replica_id == 0:
          block, first = np.asarray(shard.data), [s.start or 0 for s in shard.index[:n]]
          for local in np.ndindex(*block.shape[:n]):
            found.setdefault(tuple(f + i for f, i in zip(first, local, strict=True)), {})[name] = block[local]
    for module in sorted(found):
      yield level, module, found[module]


def publish_modules(workdir: Path, version: int, layout: Layout, modules: Modules, name: str = 'train'):
  """As `publish_module_files`: every process of a job writes the modules that are first on its own devices."""
  publish_module_files(workdir, version, addressable_modules(layout, modules), name)


def publish_module_files(
  workdir: Path, version: int, modules: Iterable[tuple[Level, Coordinates, dict[str, np.ndarray]]], name: str = 'train'
):
  """Writes `modules/<version>/`, with each file's sha256 in index-<process>.json.

  A version that is there already is replaced: a run that was killed and goes on makes it again, with the same bytes
  unless the config was lengthened or the devices changed.

  Args:
    name: of what is trained, by which the processes of a job tell their meetings apart.
  """
  aside = workdir / f'.version-{version}'
  if jax.process_index() == 0:
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
  barrier(f'{name}: version {version} begins')
  index = {}
  for level, module, arrays in modules:
    data = to_bytes(arrays)
    file = module_file(aside, version, level, module)
    write_file(file, data)
    index[f'{level.name}/{file.name}'] = hashlib.sha256(data).hexdigest()
  here = aside / 'modules' / str(version)
  write_file(here / f'index-{jax.process_index()}.json', json.dumps(index, indent=1) + '\n')
  barrier(f'{name}: version {version}')
  if jax.process_index() == 0:
    write_file(here / seals.SUMS, seals.sums(here))
    (workdir / 'modules').mkdir(exist_ok=True)
    put_in_place(here, workdir / 'modules' / str(version))
    shutil.rmtree(aside)
  barrier(f'{name}: version {version} is out')


def barrier(name: str):
  """All processes of a job wait for each other; by the coordinator, so that threads may and no device waits.

  A name serves once. It may take as long as the longest stage: a process that dies ends it for the others.
  """
  if jax.process_count() > 1:
    import orbax.checkpoint as ocp

    ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=BARRIER_MS)


def any_process(flag: bool, occasion: str) -> bool:
  """Whether it is so on any process of a job. All of them ask, once for each occasion; no device waits."""
  if jax.process_count() == 1:
    return flag
  import orbax.checkpoint as ocp

  client = ocp.multihost.get_jax_distributed_client()
  if flag:
    client.key_value_set(f'{occasion}/{jax.process_index()}', 'yes')
  barrier(occasion)  # every answer is there, and none will come
  return bool(client.key_value_dir_get(f'{occasion}/'))


def read_module(workdir: Path, version: int, level: Level, module: Coordinates) -> dict[str, np.ndarray]:
  """A module's parameters. Raises seals.Damaged."""
  file = module_file(workdir, version, level, module)
  check_module(file)
  return read_arrays(file)


def check_module(file: Path):
  """Raises seals.Damaged where a published module's sha256 is not the recorded one."""
  seals.check(file, recorded_modules(file.parent.parent).get(f'{file.parent.name}/{file.name}', seals.UNKNOWN))


def recorded_modules(folder: Path) -> dict[str, str]:
  """{module's file: sha256} of a version; every process of a job has noted its own. Raises seals.Damaged."""
  recorded: dict[str, str] = {}
  for index in folder.glob('index-*.json'):
    recorded |= seals.read_json(index)
  return recorded


def read_arrays(file: Path) -> dict[str, np.ndarray]:
  """What a safetensors file of the workdir holds. Raises seals.Damaged."""
  with seals.reading(file):
    return safetensors.numpy.load_file(file)


def read_array(file: Path, **how) -> np.ndarray:
  """What an .npy file of the workdir holds. Raises seals.Damaged."""
  with seals.reading(file):
    return np.load(file, **how)


def load_path(workdir: Path, layout: Layout, path: int, version: int | None = None) -> dict[str, np.ndarray]:
  """One path's parameters, by default of the version that its early-stopping pointer names. Reads those files only."""
  version = best_versions(workdir)[path] if version is None else version
  coordinates = layout.grid.coordinates(path)
  params: dict[str, np.ndarray] = {}
  for level in layout.levels:
    params |= read_module(workdir, version, level, layout.grid.module(level, coordinates))
  return dict(sorted(params.items()))


def best_versions(workdir: Path) -> list[int]:
  """The version that each path points at."""
  return seals.read_json(workdir / 'paths' / 'best.json', 'version')['version']


def versions(workdir: Path) -> list[int]:
  """Published versions, rising."""
  return sorted(int(p.name) for p in (workdir / 'modules').glob('*') if p.name.isdigit())


def collect(workdir: Path, keep: Iterable[int]):
  """Removes published versions other than `keep` and the newest."""
  for leftover in (*workdir.glob('.collected-*'), *workdir.glob('.version-*')):  # of runs that were killed
    shutil.rmtree(leftover)
  for version in set(versions(workdir)[:-1]) - set(keep):
    doomed = workdir / f'.collected-{version}'
    os.replace(workdir / 'modules' / str(version), doomed)  # seen whole or not at all
    shutil.rmtree(doomed)


def modules_sha256(workdir: Path, version: int) -> str:
  """sha256 over the parameters' bytes of all modules, by level, module and name in sorted order."""
  total = hashlib.sha256()
  for file in sorted((workdir / 'modules' / str(version)).glob('*/*.safetensors')):
    check_module(file)
    for name, array in sorted(read_arrays(file).items()):
      total.update(f'{file.parent.name}/{file.stem}/{name}'.encode())
      total.update(array.tobytes())
  return total.hexdigest()
