"""Single bits of bytes and of files, changed."""

import os
import pathlib


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
  return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def flip_in_middle(file: pathlib.Path):
  """Writes a new file: the old one may be linked to from elsewhere."""
  data = file.read_bytes()
  file.unlink()
  file.write_bytes(flipped(data, len(data) // 2))


def rewrite_in_place(path: pathlib.Path):
  """Changes a byte in place, with the size and the time of modification as before."""
  before, data = path.stat(), bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  with open(path, 'r+b') as f:
    f.write(data)
  os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
