"""Numbers, bytes and times in words."""

import datetime
import math
from collections.abc import Sequence


def count(n: float | None) -> str:
  """Returns '1.05 M', '5.3 B' or '812'; 'not known' for None."""
  return 'not known' if n is None else _scaled(n, ('K', 'M', 'B', 'T', 'P', 'E', 'Z', 'Y')) or f'{n:,.0f}'


def size(num_bytes: float) -> str:
  """Returns bytes in decimal units, as '1.05 MB'."""
  return _scaled(num_bytes, ('kB', 'MB', 'GB', 'TB', 'PB', 'EB', 'ZB', 'YB')) or f'{num_bytes:,.0f} bytes'


def _scaled(n: float, units: Sequence[str]) -> str:
  """Returns n with three digits, in the largest unit that it rounds to one of; '' for less than the first unit."""
  for power, unit in reversed([*enumerate(units, 1)]):
    if abs(n) >= 0.9995 * 1000**power:  # else 999,600 would be '1e+03 K'
      return f'{n / 1000**power:.3g} {unit}'
  return ''


def bytes_per_token(perplexity: float | None, bits_per_byte: float | None) -> float | None:
  """Returns the mean bytes of text that a token stands for, from the loss per token and the loss per byte."""
  if not perplexity or not bits_per_byte or not math.isfinite(perplexity):
    return None
  return math.log2(perplexity) / bits_per_byte


def clock_time(unix_s: float) -> str:
  """Returns a time in ISO 8601, to the second, with the offset of this machine's clock."""
  return datetime.datetime.fromtimestamp(unix_s).astimezone().isoformat(' ', 'seconds')
