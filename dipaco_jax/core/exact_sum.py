"""Sums of outer gradients that do not depend on the order or the grouping of the paths, to the bit [2.7]. Pure.

A contribution is c = w (old - new), made in float32 as in SPMD, and then rounded to a multiple of 2^-40. Rounding and
conversion to an integer are one addition: with M = 1.5 * 2^12 and |c| <= 2^11, the float64 M + c is in [2^12, 2^13],
where neighbours are 2^-40 apart and their bits, read as integers, 1 apart. So it rounds to the nearest multiple, and

    bits(M + c) = bits(M) + 2^40 round(c),    sum_i bits(M + c_i) = n bits(M) + 2^40 sum_i round(c_i)   (mod 2^64).

Integers modulo 2^64 add in any order. The sum is recovered if 2^40 |sum_i round(c_i)| < 2^63: what is refused, |c| of
`LIMIT` = 2^7 or more and more than `MOST` = 2^15 contributions, keeps it to 2^62. Neither refusal depends on the order.
"""

import concurrent.futures
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
QUANTUM = 2.0**-40
LIMIT = 2.0**7
MOST = 2**15
LARGEST_WEIGHT = 2.0**20
M = 1.5 * 2.0**12
BITS_OF_M = int(np.float64(M).view(np.uint64))
ROW = 2**13  # below the length at which BLAS starts threads of its own
BLOCK = 16 * ROW  # smaller blocks are slower: memory is then read in short runs
STRIP = 16 * BLOCK  # what a thread takes at one time


class ExactSum:
  """sum_i w_i (old - new_i) and sum_i w_i of float32 arrays by name; 8 bytes a parameter. One thread at a time.

  The first contribution decides names and shapes.
  """

  def __init__(self):
    self.sums: dict[str, np.ndarray] = {}  # uint64: the sums of bits, as above
    self.contributions = 0
    self.weight_quanta = 0  # sum_i w_i / 2^-40

  @property
  def weight(self) -> float:
    """sum_i w_i, rounded once."""
    return self.weight_quanta * QUANTUM

  def add(self, weight: float, old: Arrays, new: Arrays) -> float:
    """Adds weight * (old - new), on all cores; returns the square of its norm, which is not exact.

    `weight` is rounded to float32, and to a multiple of 2^-40. Raises FloatingPointError for what is not finite and
    ValueError for what is out of range or of another shape, by the parameter's name; the sum is then as before.
    """
    w, quanta = quantized(weight)
    self._room_for(1)
    sums = self.sums or zeros(old, np.uint64)
    for arrays in (old, new):
      check_names(sums, arrays, np.float32)
    strips = strips_with(sums, old, new)
    done = on_all_cores(lambda strip: add_strip(w, np.add, *strip), strips)
    for (name, _), strip, (_, added) in zip(strips_of(sums), strips, done, strict=True):
      if added < strip[0].size:
        self._subtract(w, strips, [n for _, n in done])
        raise refusal(name, w, *(x[added : added + BLOCK] for x in strip[1:]))
    self.sums, self.contributions, self.weight_quanta = sums, self.contributions + 1, self.weight_quanta + quanta
    return math.fsum(square for square, _ in done)

  def take_back(self, weight: float, old: Arrays, new: Arrays):
    """Undoes an `add` of the same: the sum is as if it had never been made, to the bit."""
    w, quanta = quantized(weight)
    strips = strips_with(self.sums, old, new)
    self._subtract(w, strips, [strip[0].size for strip in strips])
    self.contributions, self.weight_quanta = self.contributions - 1, self.weight_quanta - quanta

  def _subtract(self, w: np.float32, strips: list, counts: list[int]):
    """The first so many elements of each strip: integers, of which nothing is left."""
    for strip, n in zip(strips, counts, strict=True):
      add_strip(w, np.subtract, *(x[:n] for x in strip))

  def merge(self, other: 'ExactSum'):
    """Adds the contributions of another sum; raises ValueError as `add`."""
    self._room_for(other.contributions)
    if other.contributions:
      sums = self.sums or zeros(other.sums, np.uint64)
      check_names(sums, other.sums, np.uint64)
      for name, x in sums.items():
        np.add(x, other.sums[name], out=x)
      self.sums = sums
    self.contributions += other.contributions
    self.weight_quanta += other.weight_quanta

  def mean(self) -> dict[str, np.ndarray]:
    """sum_i w_i (old - new_i) / sum_i w_i, float32; raises ValueError where nothing has been added."""
    if not self.contributions:
      raise ValueError('a mean of no contributions')
    means = zeros(self.sums, np.float32)
    base = np.uint64(self.contributions * BITS_OF_M % 2**64)
    strips = [tuple(x.reshape(-1)[part] for x in (self.sums[name], means[name])) for name, part in strips_of(means)]
    on_all_cores(lambda strip: divide_strip(base, float(self.weight_quanta), *strip), strips)
    return means

  def state(self) -> dict[str, np.ndarray]:
    """All there is, by the parameters' names and two more; views of the sums, that change with them."""
    counts = {'#contributions': self.contributions, '#weight_quanta': self.weight_quanta}
    return self.sums | {name: np.array(count, np.int64) for name, count in counts.items()}

  @classmethod
  def from_state(cls, state: Arrays) -> 'ExactSum':
    """The sum that goes on from a `state`, whose arrays it takes over where they can be written to."""
    made, sums = cls(), dict(state)
    made.contributions, made.weight_quanta = int(sums.pop('#contributions')), int(sums.pop('#weight_quanta'))
    made.sums = {name: np.require(x, np.uint64, ['C', 'W']) for name, x in sums.items()}
    return made

  def _room_for(self, contributions: int):
    if self.contributions + contributions > MOST:
      raise ValueError(f'more than {MOST} contributions to one sum')


def quantized(weight: float) -> tuple[np.float32, int]:
  """A weight as a float32 multiple of 2^-40, and as how many of them; raises ValueError."""
  quanta = round(float(np.float32(weight)) / QUANTUM) if math.isfinite(weight) else 0
  if not 0 < quanta < LARGEST_WEIGHT / QUANTUM:
    raise ValueError(f'weight {weight} is not between 2^-40 and {LARGEST_WEIGHT:.0f}')
  return np.float32(quanta * QUANTUM), quanta


def check_names(sums: Arrays, arrays: Arrays, dtype: type):
  """Raises ValueError that names what is not there in both, or of another shape or dtype."""
  for name in sorted({*sums, *arrays}):
    one, other = sums.get(name), arrays.get(name)
    if one is None or other is None or one.shape != other.shape or other.dtype != dtype:
      raise ValueError(f'{name}: {shape_of(other)} does not belong into a sum of {shape_of(one)}')


def shape_of(x: np.ndarray | None) -> str:
  return 'nothing' if x is None else f'{x.dtype}{list(x.shape)}'


def zeros(like: Arrays, dtype: type) -> dict[str, np.ndarray]:
  """Arrays in one piece of memory, which goes back to the system with the last of them; that of many may not."""
  flat: np.ndarray = np.zeros(sum(x.size for x in like.values()), dtype)
  made, stop = {}, 0
  for name, x in like.items():
    start, stop = stop, stop + x.size
    made[name] = flat[start:stop].reshape(x.shape)
  return made


def strips_of(arrays: Arrays) -> Iterator[tuple[str, slice]]:
  """Parts of the flat arrays, in the order of their names; the last part of each is shorter."""
  for name in sorted(arrays):
    for start in range(0, arrays[name].size, STRIP):
      yield name, slice(start, min(start + STRIP, arrays[name].size))


def strips_with(sums: Arrays, old: Arrays, new: Arrays) -> list[tuple[np.ndarray, ...]]:
  """The same strips of all three."""
  return [tuple(x.reshape(-1)[part] for x in (sums[name], old[name], new[name])) for name, part in strips_of(sums)]


def on_all_cores(work: Callable, strips: list) -> list:
  """NumPy lets go of the interpreter while it computes; more threads than cores wait for it in turns."""
  with concurrent.futures.ThreadPoolExecutor(multiprocessing.cpu_count()) as pool:
    return list(pool.map(work, strips))


def add_strip(w: np.float32, accumulate: np.ufunc, sum_N, old_N, new_N) -> tuple[float, int]:
  """Adds (or takes away) flat arrays block by block; stops before the first block that is to be refused.

  Returns:
    The sum of the squares, and the number of elements that were added.
  """
  c_B, moved_B = np.zeros(BLOCK, np.float32), np.empty(BLOCK)
  square = 0.0
  with np.errstate(over='ignore', invalid='ignore'):
    for start in range(0, sum_N.size, BLOCK):
      block = slice(start, min(start + BLOCK, sum_N.size))
      n = block.stop - start
      c_B[n:] = 0  # of the block before
      c_n, moved_n, sum_n = c_B[:n], moved_B[:n], sum_N[block]
      np.subtract(old_N[block], new_N[block], out=c_n)
      if w != 1:
        np.multiply(c_n, w, out=c_n)
      c_RR = c_B.reshape(-1, ROW)
      block_square = float(np.sum(np.vecdot(c_RR, c_RR), dtype=np.float64))
      # Most often the norm of all shows that none is too large; not where it is large itself, infinite or NaN.
      if not block_square < (LIMIT / 2) ** 2 and not np.abs(c_n).max() < LIMIT:
        return square, start
      square += block_square
      np.copyto(moved_n, c_n)
      np.add(moved_n, M, out=moved_n)
      accumulate(sum_n, moved_n.view(np.uint64), out=sum_n)
  return square, sum_N.size


def divide_strip(base: np.uint64, weight_quanta: float, sum_N, mean_N):
  """float32(sum / weight), both in multiples of 2^-40; `base` is the sum of the bits of M."""
  moved_B, quotient_B = np.empty(BLOCK, np.uint64), np.empty(BLOCK)
  for start in range(0, sum_N.size, BLOCK):
    block = slice(start, min(start + BLOCK, sum_N.size))
    n = block.stop - start
    np.subtract(sum_N[block], base, out=moved_B[:n])
    np.copyto(quotient_B[:n], moved_B[:n].view(np.int64))
    np.divide(quotient_B[:n], weight_quanta, out=quotient_B[:n])
    np.copyto(mean_N[block], quotient_B[:n], casting='same_kind')


def refusal(name: str, w: np.float32, old_n, new_n) -> ValueError | FloatingPointError:
  """What to raise for a block that `add_strip` stopped at."""
  with np.errstate(over='ignore', invalid='ignore'):
    largest = np.abs((old_n - new_n) * w).max()
  if np.isfinite(largest):
    return ValueError(f'{name}: weight * (old - new) is {largest:g}, {LIMIT:.0f} and more is out of range')
  return FloatingPointError(f'{name}: weight * (old - new) is {largest}')
