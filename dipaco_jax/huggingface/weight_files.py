"""Files of a model's weights: safetensors, or PyTorch's own by `weights_only`, whole or in shards with an index.

Headers state names, types, shapes and the size of a file, for checks before any work. `check_values` reads all weights.
"""

import functools
import hashlib
import io
import os
from collections.abc import Collection
from typing import Any, BinaryIO

import numpy as np

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import foreign_files
from dipaco_jax.storage import remote_files, tensors

MOST_HEADER_BYTES = 100 << 20  # safetensors' own limit
FLOATS = ('F64', 'F32', 'BF16', 'F16')  # safetensors' names
TORCH_FLOATS = ('torch.float64', 'torch.float32', 'torch.bfloat16', 'torch.float16')
WEIGHTS = 'model.safetensors'
TORCH = 'pytorch_model.bin'
INDEX = '.index.json'  # behind the name of the whole
AGAIN = 'download or copy the file again, or name another folder'

Shapes = dict[str, tuple[int, ...]]


def wrong(folder: str, problem: str) -> InputError:
  """Returns the error of a folder that no grid can start from."""
  return InputError(f'config.pretrain.init={folder}: {problem}')


def find(folder: str) -> list[str]:
  """Lists the files of a folder's weights, of the first kind that exists. Raises InputError."""
  for name in (WEIGHTS, TORCH):
    if remote_files.can_open(f'{folder}/{name}'):
      return [name]
    if remote_files.can_open(f'{folder}/{name}{INDEX}'):
      return _shards(folder, f'{name}{INDEX}')
  raise unreadable(folder, WEIGHTS, FileNotFoundError(2, 'No such file or directory'))


def _shards(folder: str, index: str) -> list[str]:
  of = parsed(folder, index, read(folder, index)).get('weight_map')
  file_names = sorted({str(file) for file in of.values()}) if isinstance(of, dict) else []
  if not file_names or any('/' in file or '\\' in file for file in file_names):
    raise wrong(folder, f'{index} has no weight_map with names of files next to it; name another folder')
  if missing := [file for file in file_names if not remote_files.can_open(f'{folder}/{file}')]:
    raise wrong(folder, f'{missing[0]}, which {index} names, cannot be read: {AGAIN}')
  return file_names


def all_shapes(folder: str) -> Shapes:
  """Returns names and shapes of all weights of a folder; raises InputError as `shapes`, or where two files have one."""
  merged_shapes: Shapes = {}
  for file in find(folder):
    of_file = shapes(folder, file)
    if twice := sorted(merged_shapes.keys() & of_file.keys()):
      raise wrong(folder, f'{twice[0]} is in {file} and in another file: {AGAIN}')
    merged_shapes |= of_file
  return merged_shapes


def shapes(folder: str, name: str) -> Shapes:
  """Returns names and shapes of a file's weights, by its header; raises InputError if we cannot take one's type."""
  try:
    with remote_files.waiting_for(path := f'{folder}/{name}'), remote_files.open_file(path) as file:
      _check_pointer(folder, name, file.read(len(foreign_files.LFS)))
      file.seek(0)
      return _torch_shapes(folder, name, file) if name.endswith('.bin') else _shapes(folder, name, file)
  except OSError as e:
    raise unreadable(folder, name, e) from e


def _shapes(folder: str, name: str, file: BinaryIO) -> Shapes:
  try:
    header_bytes = int.from_bytes(file.read(8), 'little')
    header = json_text.parse(file.read(min(header_bytes, MOST_HEADER_BYTES)))
    shapes = {key: (x['dtype'], tuple(x['shape'])) for key, x in header.items() if key != '__metadata__'}
    ends = [x['data_offsets'][1] for key, x in header.items() if key != '__metadata__']
    expected_bytes = 8 + header_bytes + max(ends, default=0)
  except (ValueError, AttributeError, TypeError, KeyError, IndexError) as e:
    raise wrong(folder, f'{name} is not a safetensors file, or incomplete: {AGAIN}') from e
  for key, (kind, _) in shapes.items():
    if kind not in tensors.DTYPES or (key.endswith(('.weight', '.bias')) and kind not in FLOATS):
      raise _wrong_type(folder, name, kind)
  if (num_bytes := file.seek(0, os.SEEK_END)) != expected_bytes:
    raise wrong(folder, f'{name} has {num_bytes:,} bytes, and its header describes {expected_bytes:,}: {AGAIN}')
  return {key: shape for key, (_, shape) in shapes.items()}


def check_values(folder: str, name: str) -> None:
  """Raises InputError if a weight of a file is not finite. Reads the whole file, once in a process for its size."""
  try:
    with remote_files.waiting_for(path := f'{folder}/{name}'), remote_files.open_file(path) as file:
      num_bytes = file.seek(0, os.SEEK_END)
  except OSError as e:
    raise unreadable(folder, name, e) from e
  _check_values(folder, name, num_bytes)


@functools.cache
def _check_values(folder: str, name: str, _num_bytes: int) -> None:
  load(folder, name, ())


def _check_pointer(folder: str, name: str, beginning: bytes):
  if beginning.startswith(foreign_files.LFS):
    raise wrong(folder, f'{name} {foreign_files.LFS_ADVICE}')


def _torch_shapes(folder: str, name: str, file: BinaryIO) -> Shapes:
  return {key: tuple(x.shape) for key, x in _torch_load(folder, name, file, 'meta').items()}


def load(folder: str, name: str, tensor_names: Collection[str]) -> tuple[str, dict[str, np.ndarray], Collection[str]]:
  """Returns a file's sha256, those of its weights that are wanted, and the names of all.

  Raises InputError if the file is damaged or has a value that is not finite.
  """
  data = read(folder, name)
  _check_pointer(folder, name, data)
  sha256 = hashlib.sha256(data).hexdigest()
  if name.endswith('.bin'):
    loaded = _torch_load(folder, name, io.BytesIO(data), 'cpu')
    for key, x in loaded.items():
      _check_finite(folder, name, key, int((~x.float().isfinite()).sum()))
    return sha256, {key: x.float().numpy() for key, x in loaded.items() if key in tensor_names}, loaded.keys()
  try:
    arrays = tensors.from_bytes(memoryview(data))
  except KeyError as e:
    raise _wrong_type(folder, name, e.args[0]) from e
  except (ValueError, TypeError) as e:
    raise wrong(folder, f'{name} is not a safetensors file, or incomplete: {AGAIN} ({e})') from e
  for key, x in arrays.items():
    _check_finite(folder, name, key, _count_not_finite(x))
  return sha256, {key: x for key, x in arrays.items() if key in tensor_names}, arrays.keys()


def _count_not_finite(x: np.ndarray) -> int:
  """Counts the values that are not finite as float32, in which weights are used."""
  with np.errstate(over='ignore'):
    return int(np.count_nonzero(~np.isfinite(x.astype(np.float32) if x.dtype == np.float64 else x)))


def _check_finite(folder: str, name: str, key: str, num_wrong: int):
  if num_wrong:
    places = 'place' if num_wrong == 1 else 'places'
    raise wrong(folder, f'{key} in {name} is not finite (NaN or infinity) in {num_wrong:,} {places}: {AGAIN}')


def _torch_load(folder: str, name: str, file: BinaryIO, device: str) -> dict[str, Any]:
  """Returns PyTorch's tensors, on 'meta' without their values. Runs no code from the file."""
  try:
    import torch
  except ImportError as e:
    problem = "is PyTorch's own file: pip install torch, or convert it to safetensors"
    raise wrong(folder, f'{name} {problem}') from e
  try:
    tensors = torch.load(file, map_location=device, weights_only=True)
  except Exception as e:  # of pickle, zipfile and PyTorch
    problem = f'is not a PyTorch file of weights only, or incomplete: {AGAIN}'
    raise wrong(folder, f'{name} {problem} ({" ".join(str(e).split())[:100]})') from e
  if not isinstance(tensors, dict) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
    raise wrong(folder, f'{name} does not hold tensors by name; name another folder')
  for key, x in tensors.items():
    if x.layout is not torch.strided or (key.endswith(('.weight', '.bias')) and str(x.dtype) not in TORCH_FLOATS):
      raise _wrong_type(folder, name, str(x.dtype))
  return tensors


def read(folder: str, name: str) -> bytes:
  """Returns the bytes of a file of a folder; raises InputError."""
  try:
    return remote_files.read(f'{folder}/{name}')
  except OSError as e:
    raise unreadable(folder, name, e) from e


def unreadable(folder: str, name: str, e: OSError) -> InputError:
  """Returns the error of a file that cannot be read."""
  fix = "name a folder as Hugging Face's transformers writes it, with weights in safetensors or pytorch_model.bin"
  return wrong(folder, f'{name}: {e.strerror or e}; {fix}')


def parsed(folder: str, name: str, data: bytes) -> dict[str, Any]:
  """Returns an object of JSON; raises InputError."""
  try:
    if isinstance(content := json_text.parse(data), dict):
      return content
  except ValueError:
    pass
  raise wrong(folder, f'{name} is not a JSON object; name another folder')


def _wrong_type(folder: str, name: str, kind: str) -> InputError:
  return wrong(folder, f'{name} has weights of type {kind!r}: convert them to float32, bfloat16 or float16')
