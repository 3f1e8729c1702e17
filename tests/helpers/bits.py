"""Single bits of bytes and of files, changed."""

import pathlib


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
  return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def flip_in_middle(file: pathlib.Path):
  """Writes a new file: the old one may be linked to from elsewhere."""
  data = file.read_bytes()
  file.unlink()
  file.write_bytes(flipped(data, len(data) // 2))
