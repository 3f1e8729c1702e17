"""Arrays as bytes: safetensors, where equal arrays give equal bytes, and .npy."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from dipaco_jax.core import json_text
from dipaco_jax.storage import files, seals

SHA256 = 32  # bytes of a digest

DTYPES = {  # in safetensors' order
  'U64': np.uint64, 'I64': np.int64, 'F64': np.float64, 'F32': np.float32, 'U32': np.uint32, 'I32': np.int32,
  'BF16': ml_dtypes.bfloat16, 'F16': np.float16, 'U16': np.uint16, 'I16': np.int16, 'I8': np.int8, 'U8': np.uint8,
  'BOOL': np.bool_,
}  # fmt: skip


def to_bytes(arrays: Mapping[str, np.ndarray]) -> memoryview:
  """Returns the bytes of `safetensors.numpy.save`, with one copy of the arrays instead of two."""
  start = header(arrays)
  data = np.empty(len(start) + sum(x.nbytes for x in arrays.values()), np.uint8).data
  data[: len(start)] = start
  for name, view in from_bytes(data).items():
    np.copyto(view, arrays[name])
  return data


def header(shapes: Mapping[str, Any]) -> bytes:
  """Returns the bytes before the arrays of `to_bytes`, of arrays or of anything else that has a shape and a dtype."""
  names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
  order = list(names)
  places = {}
  end = 0
  for name, x in sorted(shapes.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
    size = np.dtype(x.dtype).itemsize * math.prod(x.shape)
    places[name] = {'dtype': names[np.dtype(x.dtype)], 'shape': x.shape, 'data_offsets': [end, end := end + size]}
  text = json.dumps(places, separators=(',', ':'), ensure_ascii=False).encode()
  text += b' ' * (-len(text) % 8)
  return len(text).to_bytes(8, 'little') + text


def from_bytes(data: memoryview) -> dict[str, np.ndarray]:
  """Returns the arrays of a safetensors object as views of its bytes; `safetensors.numpy.load` copies them."""
  start = 8 + int.from_bytes(data[:8], 'little')
  header = json_text.parse(bytes(data[8:start]))
  return {
    name: np.ndarray(x['shape'], DTYPES[x['dtype']], data, start + x['data_offsets'][0])
    for name, x in header.items()
    if name != '__metadata__'
  }


def num_bytes(arrays: Mapping[str, np.ndarray]) -> int:
  """Returns the bytes of all arrays in memory."""
  return sum(x.nbytes for x in arrays.values())


def find_not_finite(arrays: Mapping[str, np.ndarray]) -> str:
  """Returns the name of an array that holds NaN or infinities, or '' if none does. A sum takes little time."""
  with np.errstate(all='ignore'):
    suspects = (name for name, x in arrays.items() if not np.isfinite(np.sum(x, dtype=np.float32)))
    return next((name for name in suspects if not np.isfinite(arrays[name]).all()), '')


def write_with_digest(file: Path, arrays: Mapping[str, np.ndarray]):
  """Writes arrays behind the sha256 of their bytes, for this machine alone."""
  data = to_bytes(arrays)
  files.write_file(file, hashlib.sha256(data).digest(), data)


def read_with_digest(file: Path) -> dict[str, np.ndarray] | None:
  """Reads what `write_with_digest` wrote; None if it is damaged. Raises OSError if it cannot be read."""
  content = files.read_file(file)
  digest, data = content[:SHA256], content[SHA256:]
  return from_bytes(data) if hashlib.sha256(data).digest() == digest else None


def read_arrays(file: Path) -> dict[str, np.ndarray]:
  """Reads a safetensors file of a run. Raises seals.Damaged."""
  with seals.reading(file):
    return safetensors.numpy.load_file(file)


def read_array(file: Path, **options) -> np.ndarray:
  """Reads an .npy file of a run; `options` are those of `np.load`. Raises seals.Damaged."""
  with seals.reading(file):
    return np.load(file, **options)
