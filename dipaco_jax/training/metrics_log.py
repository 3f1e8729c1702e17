"""What a run says of itself: metrics.jsonl, TensorBoard events, and figures from sums [4].

A row of metrics.jsonl is one JSON object with kind, stage, updates (made so far within the stage), time (unix seconds)
and values. `rewind` takes back what a resumed run is about to do again, so that every update has its row once.
"""

import collections
import json
import logging
import math
import os
import pathlib
import re
import resource
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.training import display, tensorboard
from dipaco_jax.training.performance import CHIPS

SEALED = re.compile(rb'(.*), "seal": "([0-9a-f]{8})"}\n?', re.DOTALL)
WORDS = {  # of programs
  'init': 'the first parameters', 'start': 'the first modules', 'begin': 'the paths', 'fresh_state': 'the AdamW state',
  'steps': 'the inner step', 'finish': 'the outer gradient', 'outer': 'the outer step', 'evaluate': 'the evaluation',
  '<lambda>': 'a program',
}  # fmt: skip


class Metrics:
  """Appends rows to metrics.jsonl in the workdir and mirrors their numbers to events/<stage>/ for TensorBoard."""

  def __init__(self, workdir: str | os.PathLike, writes: bool = True, evaluated: Callable[[], None] = lambda: None):
    """`writes` is for one process of a job; the others' rows go nowhere. `evaluated` hears of evaluations."""
    self._workdir, self._writes, self._evaluated = pathlib.Path(workdir), writes, evaluated
    self._file = _open_whole(self._workdir / 'metrics.jsonl') if writes else open(os.devnull, 'wb')  # noqa: SIM115
    self._events: dict[str, tensorboard.Events] = {}  # by stage

  def write(self, kind: str, stage: str, updates: int, **values):
    """Appends a row, in one write; NaN and infinities become null.

    Raises:
      OSError: the disk is full. What was written of the row is dropped when the file is next opened.
    """
    if not self._writes:
      return
    row = {'kind': kind, 'stage': stage, 'updates': int(updates), 'time': round(time.time(), 3)}
    row |= {name: plain(value) for name, value in values.items()}
    line = to_line(row)
    if self._file.write(line) != len(line):
      raise OSError(f'no space for a row of {len(line)} bytes in {self._file.name}')
    if stage not in self._events:
      self._events[stage] = tensorboard.Events(self._workdir / 'events' / stage)
    self._events[stage].write(row)
    if kind == 'evaluation':
      self._evaluated()

  def sync(self):
    """Makes the rows so far survive a power cut, before a checkpoint after them does."""
    if self._writes:
      os.fsync(self._file.fileno())

  def rewind(self, stage: str, updates: int):
    """Drops the stage's rows of more than so many updates, here and in TensorBoard; call it when a stage resumes."""
    if not self._writes:
      return
    path = self._workdir / 'metrics.jsonl'
    aside = path.with_name('metrics.jsonl.partial')
    ended, since = -1, list[dict[str, Any]]()  # the global step at the last phase's end, and rows of steps after it
    with open(aside, 'wb') as f:
      for row in read_rows(self._workdir):
        if row['stage'] == stage and row['updates'] > updates:
          continue
        f.write(to_line(row))
        if row['stage'] == stage and row['kind'] == 'phase':
          ended, since = tensorboard.position(row), []
        elif row['stage'] == stage and tensorboard.position(row) > ended:
          since.append(row)
      f.flush()
      os.fsync(f.fileno())
    self._file.close()
    os.replace(aside, path)
    self._file = _open_whole(path)
    if stage in self._events:
      self._events.pop(stage).close()
    # What is shown of the phase goes, and comes again as far as it is kept: where paths take turns, the one that is
    # ahead in updates is behind in steps.
    self._events[stage] = tensorboard.Events(self._workdir / 'events' / stage, purge_step=ended + 1)
    for row in since:
      self._events[stage].write(row)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

  def close(self):
    self._file.close()
    while self._events:
      self._events.popitem()[1].close()


def read_rows(workdir: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """Rows of metrics.jsonl, oldest first; none where there is no file; a damaged or torn line is passed over."""
  path, damaged = pathlib.Path(workdir) / 'metrics.jsonl', 0
  if not path.exists():
    return
  with open(path, 'rb') as f:
    for line in f:
      if row := from_line(line):
        yield row
      elif line.endswith(b'\n'):  # else it is being written
        damaged += 1
  if damaged:
    logging.warning('%s: %d lines are not as they were written, and are passed over', path, damaged)


def rows_with(workdir: str | os.PathLike, *marks: bytes) -> Iterator[dict[str, Any]]:
  """Rows of metrics.jsonl whose lines have one of these in them; others are not parsed, since the file may be long."""
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  if not path.exists():
    return
  with open(path, 'rb') as f:
    for line in f:
      if any(mark in line for mark in marks) and (row := from_line(line)):  # else torn, or damaged
        yield row


def to_line(row: Mapping[str, Any]) -> bytes:
  """A line of metrics.jsonl; `seal` is the CRC-32 of the row without it."""
  text = json.dumps(row, allow_nan=False)
  return f'{text[:-1]}, "seal": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def from_line(line: bytes) -> dict[str, Any] | None:
  """The inverse; None where the line is not as it was written. One of an older run, without a seal, is as it is."""
  if sealed := SEALED.fullmatch(line):
    line = sealed[1] + b'}'
    if int(sealed[2], 16) != zlib.crc32(line):
      return None
  try:
    row = json.loads(line)
  except ValueError:
    return None
  return row if isinstance(row, dict) and {'kind', 'stage', 'updates', 'time'} <= row.keys() else None


def plain(value: Any) -> Any:
  """Arrays and numpy scalars to lists and numbers that JSON has; NaN and infinities to None."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if hasattr(value, 'tolist'):
    return plain(value.tolist())
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_whole(path: pathlib.Path):
  """Opens to append, without buffer; cuts off a last line that has no end."""
  path.parent.mkdir(parents=True, exist_ok=True)
  file = open(path, 'ab+', buffering=0)  # noqa: SIM115
  size, keep = file.seek(0, os.SEEK_END), 0
  while size:  # backwards, block by block, to the last line's end
    start = max(0, size - 65_536)
    file.seek(start)
    found = file.read(size - start).rfind(b'\n')
    if found >= 0:
      keep = start + found + 1
      break
    size = start
  file.truncate(keep)
  return file


def count_compilations() -> collections.Counter[str]:
  """How often XLA has compiled each function (or taken it from its cache) from now on, by the function's name."""
  from jax import monitoring

  counts: collections.Counter[str] = collections.Counter()

  def listen(event: str, duration_secs: float, **about: str | int):
    if event == '/jax/core/compile/backend_compile_duration':
      counts[str(about.get('fun_name')).removeprefix('jit(').removesuffix(')')] += 1

  monitoring.register_event_duration_secs_listener(listen)
  return counts


def tell_compilations():
  """Says on the display what XLA compiles, from now on."""
  from jax import monitoring

  compiling: dict[int, display.Activity] = {}  # by thread

  def listen(event: str, duration_secs: float, **about: str | int):
    thread = threading.get_ident()
    if event == '/jax/core/compile/jaxpr_to_mlir_module_duration':  # which comes before
      if thread in compiling:  # and was not compiled
        display.end(compiling.pop(thread))
      name = str(about.get('fun_name')).removeprefix('jit(').removesuffix(')')
      compiling[thread] = display.begin(f'compiling {WORDS.get(name, name)}')
    elif event == '/jax/core/compile/backend_compile_duration' and thread in compiling:
      display.end(compiling.pop(thread))

  monitoring.register_event_duration_secs_listener(listen)


def summarize(
  nll: np.ndarray,
  tokens: np.ndarray,
  num_bytes: np.ndarray,
  path: np.ndarray,
  domain: np.ndarray,
  num_paths: int,
  domain_names: Sequence[str],
) -> dict[str, Any]:
  """Perplexity exp(sum nll / sum tokens) of validation sequences, in float64.

  Args:
    nll: [N] nats, summed over the counted tokens of a sequence.
    tokens: [N] counted tokens (those after the prefix).
    num_bytes: [N] bytes of text that the counted tokens stand for.
    path: [N] index of the path that a sequence was routed to.
    domain: [N] index into domain_names.

  Returns:
    perplexity, perplexity_by_path and perplexity_by_domain (None where there is no token), bits_per_byte =
    sum nll / (ln 2 * sum bytes), validation_tokens.

  Raises:
    InputError: there is no token to count.
  """
  nll, tokens, num_bytes = (np.asarray(x, np.float64) for x in (nll, tokens, num_bytes))
  if not tokens.sum():
    raise InputError('no validation sequence is longer than the prefix: config.data.validation needs longer documents')
  domains = _perplexities(nll, tokens, np.asarray(domain), len(domain_names))
  return {
    'perplexity': _exp(nll.sum() / tokens.sum()),
    'perplexity_by_path': _perplexities(nll, tokens, np.asarray(path), num_paths),
    'perplexity_by_domain': dict(zip(domain_names, domains, strict=True)),
    'bits_per_byte': float(nll.sum() / math.log(2) / num_bytes.sum()) if num_bytes.sum() else None,
    'validation_tokens': int(tokens.sum()),
  }


def normalized_mutual_information(table_KL: np.ndarray) -> float:
  """I(K; L) / mean(H(K), H(L)) of two labels of the same things, from how often they meet; 0 where one is constant."""
  joint = np.asarray(table_KL, np.float64) / max(1, np.sum(table_KL))
  rows, columns = joint.sum(1), joint.sum(0)

  def entropy(p):
    return -float(np.sum(p * np.log(np.where(p > 0, p, 1))))

  mean = (entropy(rows) + entropy(columns)) / 2
  return (entropy(rows) + entropy(columns) - entropy(joint)) / mean if mean else 0.0


def _perplexities(nll: np.ndarray, tokens: np.ndarray, group: np.ndarray, size: int) -> list[float | None]:
  sums, counts = (np.bincount(group, weights=x, minlength=size)[:size] for x in (nll, tokens))
  return [_exp(n / t) if t else None for n, t in zip(sums, counts, strict=True)]


def _exp(x: float) -> float:
  return math.exp(x) if x < 700 else math.inf


def flops_per_token(model: settings.Model, vocab_size: int, seq_len: int) -> int:
  """Forward and backward FLOPs of one path's matrix products, per trained token, as PaLM counts them.

      6 (N (4 D H K + 3 D F) + D V) + 12 N L H K        (arXiv 2204.02311, appendix B)

  The head counts, tied or not; the embedding's look-up and rematerialization don't; attention counts as if it were
  neither causal nor cut into segments.
  """
  m = model
  block = 4 * m.width * m.num_heads * m.head_dim + 3 * m.width * m.mlp_dim
  products = m.num_layers * block + m.width * vocab_size
  return 6 * products + 12 * m.num_layers * seq_len * m.num_heads * m.head_dim


# Dense peak of one JAX device in bfloat16, FLOP/s, by what `device_kind` contains; the first match holds.
PEAK_BFLOAT16 = (
  ('tpu v6', CHIPS['v6e'].flops),
  ('tpu v5 lite', CHIPS['v5e'].flops),
  ('tpu v5e', CHIPS['v5e'].flops),
  ('tpu v5', CHIPS['v5p'].flops),
  ('tpu v4', CHIPS['v4'].flops),
  (' mig ', None),  # a slice of a GPU
  ('h200 nvl', 835e12),
  ('h200', 989e12),
  ('h100 pcie', 756e12),
  ('h100 nvl', 835e12),
  ('h100', 989e12),
  ('a100', 312e12),
)


def mfu(flops_per_s: float, device_kind: str, dtype: str, num_devices: int) -> float | None:
  """Model FLOPs utilization: flops_per_s of the whole run over the devices' peak; None where the peak isn't known.

  At JAX's default precision float32 products run as one bfloat16 pass on a TPU and as TF32, at half of bfloat16's
  peak, on these GPUs.
  """
  kind = device_kind.lower()
  peak = next((peak for name, peak in PEAK_BFLOAT16 if name in kind), None)
  if peak is None or dtype not in ('bfloat16', 'float32'):
    return None
  if dtype == 'float32' and 'tpu' not in kind:
    peak /= 2
  return flops_per_s / (peak * num_devices)


def process_peak_bytes() -> int:
  """Largest resident size of this process so far, bytes."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == 'darwin' else peak * 1024


def device_peak_bytes(devices: Iterable) -> int | None:
  """Largest use of memory on any of this process's JAX devices among these, bytes; None if they don't tell (a CPU)."""
  stats = [device.memory_stats() or {} for device in devices if device in device.client.local_devices()]
  return max((s['peak_bytes_in_use'] for s in stats if 'peak_bytes_in_use' in s), default=None)
