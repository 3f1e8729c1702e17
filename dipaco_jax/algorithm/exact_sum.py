"""Sums of outer gradients that do not depend on the order of the paths, to the bit: the online average of [3].

A contribution c = w (old - new) is computed in float32, as in SPMD, and rounded to a multiple of 2^-40. Rounding and
conversion to an integer are one addition: with M = 1.5 * 2^12 and |c| <= 2^11, the float64 M + c is in [2^12, 2^13],
where neighbours are 2^-40 apart and their bits, read as integers, 1 apart. So it rounds to the nearest multiple, and

    bits(M + c) = bits(M) + 2^40 round(c),    sum_i bits(M + c_i) = n bits(M) + 2^40 sum_i round(c_i)   (mod 2^64).

Integers modulo 2^64 add in any order. The sum is recovered if 2^40 |sum_i round(c_i)| < 2^63. It stays within 2^62,
because |c| >= `LIMIT` = 2^7 is rejected, and so are more than `MAX_CONTRIBUTIONS` = 2^15. A sum of weights of 2^23 is
rejected, too, because 2^63 quanta exceed an int64. Whether a set of contributions is rejected does not depend on their
order.
"""

import concurrent.futures
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
QUANTUM = 2.0**-40
LIMIT = 2.0**7
MAX_CONTRIBUTIONS = 2**15
LARGEST_WEIGHT = 2.0**20
WEIGHT_QUANTA_LIMIT = 2**63  # of int64, in which `state` holds them
M = 1.5 * 2.0**12
BITS_OF_M = int(np.float64(M).view(np.uint64))
ROW = 2**13  # below the length from which BLAS starts threads of its own
BLOCK = 16 * ROW  # smaller blocks are slower: memory is then read in short runs
STRIP = 16 * BLOCK  # elements that a thread takes at one time


class ExactSum:
  """The sums sum_i w_i (old - new_i), of float32 arrays by name, and sum_i w_i; 8 bytes per parameter. Not thread-safe.

  The first contribution decides names and shapes.
  """

  def __init__(self) -> None:
    self.sums: dict[str, np.ndarray] = {}  # uint64: the sums of bits, as above
    self.contributions = 0
    self.weight_quanta = 0  # sum_i w_i / 2^-40

  @property
  def weight(self) -> float:
    """The sum of the weights, rounded once."""
    return self.weight_quanta * QUANTUM

  def add(self, weight: float, old: Arrays, new: Arrays) -> float:
    """Adds weight * (old - new), on all cores, and returns the square of its norm, which is not exact.

    The weight is rounded to float32, and to a multiple of 2^-40. An error leaves the sum as it was: FloatingPointError
    if a contribution is not finite; ValueError if it is out of range or has another shape, or with it there are too
    many, or their weights too large.
    """
    w, quanta = quantize(weight)
    if self.contributions >= MAX_CONTRIBUTIONS:
      raise ValueError(f'more than {MAX_CONTRIBUTIONS} contributions to one sum')
    if self.weight_quanta + quanta >= WEIGHT_QUANTA_LIMIT:
      raise ValueError(f'weights of {self.weight:g} and {w:g}: their sum has to stay below 2^23')
    sums = self.sums or zeros_like(old, np.uint64)
    check_arrays(sums, old)
    check_arrays(sums, new)
    strips = strips_with(sums, old, new)
    done = on_all_cores(lambda strip: add_strip(w, np.add, *strip), strips)
    for (name, _), strip, (_, added) in zip(strips_of(sums), strips, done, strict=True):
      if added < strip[0].size:
        self._subtract(w, strips, [n for _, n in done])
        old_n, new_n = (x[added : added + BLOCK] for x in strip[1:])
        with np.errstate(over='ignore', invalid='ignore'):
          largest = np.abs((old_n - new_n) * w).max()
        if np.isfinite(largest):
          raise ValueError(f'{name}: weight * (old - new) is {largest:g}, {LIMIT:.0f} and more is out of range')
        raise FloatingPointError(f'{name}: weight * (old - new) is {largest}')
    self.sums = sums
    self.contributions = self.contributions + 1
    self.weight_quanta = self.weight_quanta + quanta
    return math.fsum(square for square, _ in done)

  def take_back(self, weight: float, old: Arrays, new: Arrays) -> None:
    """Undoes an `add` of the same contribution, to the bit."""
    w, quanta = quantize(weight)
    strips = strips_with(self.sums, old, new)
    self._subtract(w, strips, [strip[0].size for strip in strips])
    self.contributions, self.weight_quanta = self.contributions - 1, self.weight_quanta - quanta

  def _subtract(self, w: np.float32, strips: list, counts: list[int]) -> None:
    """Takes away the first elements of each strip, as many as `counts` says."""
    for strip, n in zip(strips, counts, strict=True):
      add_strip(w, np.subtract, *(x[:n] for x in strip))

  def mean(self) -> dict[str, np.ndarray]:
    """Returns sum_i w_i (old - new_i) / sum_i w_i, float32; raises ValueError if nothing has been added."""
    if not self.contributions:
      raise ValueError('there are no contributions, and so there is no mean: skip the outer step of this module')
    means = zeros_like(self.sums, np.float32)
    base = np.uint64(self.contributions * BITS_OF_M % 2**64)
    strips = strips_with(self.sums, means)
    on_all_cores(lambda strip: divide_strip(base, float(self.weight_quanta), *strip), strips)
    return means

  def state(self) -> dict[str, np.ndarray]:
    """Returns the sums by parameter, and the counts under two more names; the sums are views, not copies."""
    counts = {'#contributions': self.contributions, '#weight_quanta': self.weight_quanta}
    return self.sums | {name: np.array(count, np.int64) for name, count in counts.items()}

  @classmethod
  def from_state(cls, state: Arrays) -> 'ExactSum':
    """Restores a sum from its `state`, without copying arrays that are writable."""
    sums = dict(state)
    restored = cls()
    restored.contributions = int(sums.pop('#contributions'))
    restored.weight_quanta = int(sums.pop('#weight_quanta'))
    restored.sums = {name: np.require(x, np.uint64, ['C', 'W']) for name, x in sums.items()}
    return restored


def quantize(weight: float) -> tuple[np.float32, int]:
  """Rounds a weight to a multiple of 2^-40: returns it as float32 and as an integer, or raises ValueError."""
  quanta = round(float(np.float32(weight)) / QUANTUM) if math.isfinite(weight) else 0
  if not 0 < quanta < LARGEST_WEIGHT / QUANTUM:
    raise ValueError(f'weight {weight} is not between 2^-40 and {LARGEST_WEIGHT:.0f}')
  return np.float32(quanta * QUANTUM), quanta


def check_arrays(sums: Arrays, arrays: Arrays) -> None:
  """Raises ValueError if an array is missing on one side, has another shape, or is not float32."""
  for name in sorted({*sums, *arrays}):
    total, added = sums.get(name), arrays.get(name)
    if total is None or added is None or total.shape != added.shape or added.dtype != np.float32:
      descriptions = ['nothing' if x is None else f'{x.dtype}{list(x.shape)}' for x in (added, total)]
      raise ValueError(f'{name}: {descriptions[0]} cannot be added to a sum of {descriptions[1]}')


def zeros_like(like: Arrays, dtype: type) -> dict[str, np.ndarray]:
  """Makes arrays in one piece of memory, which returns to the system as a whole; many small pieces may not."""
  flat: np.ndarray = np.zeros(sum(x.size for x in like.values()), dtype)
  arrays = {}
  start = 0
  for name, x in like.items():
    arrays[name] = flat[start : start + x.size].reshape(x.shape)
    start += x.size
  return arrays


def strips_of(arrays: Arrays) -> Iterator[tuple[str, slice]]:
  """Yields slices of `STRIP` elements of the flat arrays, by name; the last slice of each is shorter."""
  for name in sorted(arrays):
    for start in range(0, arrays[name].size, STRIP):
      yield name, slice(start, min(start + STRIP, arrays[name].size))


def strips_with(sums: Arrays, *others: Arrays) -> list[tuple[np.ndarray, ...]]:
  """Returns the same strips of all, flat."""
  return [tuple(x[name].reshape(-1)[part] for x in (sums, *others)) for name, part in strips_of(sums)]


def on_all_cores(work: Callable, strips: list) -> list:
  """Maps over strips with a thread per core; NumPy releases the interpreter lock while it computes."""
  with concurrent.futures.ThreadPoolExecutor(multiprocessing.cpu_count()) as pool:
    return list(pool.map(work, strips))


def add_strip(
  w: np.float32, accumulate: np.ufunc, sum_N: np.ndarray, old_N: np.ndarray, new_N: np.ndarray
) -> tuple[float, int]:
  """Adds w (old - new) to flat sums (or subtracts it), block by block, up to the first block that must be rejected.

  Returns the sum of the squares, and the number of elements that were added.
  """
  c_B, moved_B = np.zeros(BLOCK, np.float32), np.empty(BLOCK)
  square = 0.0
  with np.errstate(over='ignore', invalid='ignore'):
    for start in range(0, sum_N.size, BLOCK):
      block = slice(start, min(start + BLOCK, sum_N.size))
      n = block.stop - start
      c_B[n:] = 0  # left from the block before
      c_n = c_B[:n]
      moved_n = moved_B[:n]
      sum_n = sum_N[block]
      np.subtract(old_N[block], new_N[block], out=c_n)
      if w != 1:
        np.multiply(c_n, w, out=c_n)
      c_RR = c_B.reshape(-1, ROW)
      block_square = float(np.sum(np.vecdot(c_RR, c_RR), dtype=np.float64))
      # A small norm of the block shows that no element is too large; otherwise look at each.
      if not block_square < (LIMIT / 2) ** 2 and not np.abs(c_n).max() < LIMIT:
        return square, start
      square += block_square
      np.copyto(moved_n, c_n)
      np.add(moved_n, M, out=moved_n)
      accumulate(sum_n, moved_n.view(np.uint64), out=sum_n)
  return square, sum_N.size


def divide_strip(base: np.uint64, weight_quanta: float, sum_N: np.ndarray, mean_N: np.ndarray) -> None:
  """Writes float32(sum / weight), both in multiples of 2^-40; `base` is n bits(M) modulo 2^64."""
  moved_B, quotient_B = np.empty(BLOCK, np.uint64), np.empty(BLOCK)
  for start in range(0, sum_N.size, BLOCK):
    block = slice(start, min(start + BLOCK, sum_N.size))
    n = block.stop - start
    np.subtract(sum_N[block], base, out=moved_B[:n])
    np.copyto(quotient_B[:n], moved_B[:n].view(np.int64))
    np.divide(quotient_B[:n], weight_quanta, out=quotient_B[:n])
    np.copyto(mean_N[block], quotient_B[:n], casting='same_kind')
