"""How fast a run is, against what its devices can do: compilations, FLOPs, model FLOPs utilization, memory."""

import collections
import contextlib
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dipaco_jax.config import settings
from dipaco_jax.models import layers, product_flops
from dipaco_jax.processes import display, time_use

WORDS = {  # what each program computes, for the display
  'init': 'the first parameters',
  'start': 'the first modules',
  'gather_path': 'the paths',
  'fresh_state': 'the AdamW state',
  'fresh_residuals': 'the residuals',
  'steps': 'the inner step',
  'mix': 'the new modules for the paths',
  'leave': 'what leaves the paths',
  'accumulate': 'the outer gradient',
  'outer': 'the outer step',
  'zero_sums': 'the zeros of the sums',
  'evaluate': 'the evaluation',
  'unshard': 'the modules to publish',
  'path_parameters': 'the parameters of a path',
  'continue_texts': 'the samples',
  '<lambda>': 'a program',
}

GIB = 2**30


class Chip(NamedTuple):
  """Peaks of a chip, as Google Cloud's TPU pages state them."""

  flops: float  # bfloat16, a second
  hbm_bytes: int
  hbm_bytes_per_s: float
  ici_bytes_per_s: float  # of all links together, in both directions


CHIPS = {
  'v4': Chip(275e12, 32 * GIB, 1.228e12, 300e9),
  'v5e': Chip(197e12, 16 * GIB, 819e9, 200e9),
  'v5p': Chip(459e12, 95 * GIB, 2.765e12, 600e9),
  'v6e': Chip(918e12, 32 * GIB, 1.64e12, 448e9),
}
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


LOWERED, COMPILED = '/jax/core/compile/jaxpr_to_mlir_module_duration', '/jax/core/compile/backend_compile_duration'
TRACED = '/jax/core/compile/jaxpr_trace_duration'


def listen(heard: Callable[[str, str], None]) -> Callable:
  """Calls `heard(event, function's name)` whenever JAX has LOWERED or COMPILED a function; returns JAX's listener.

  The seconds count as compilation for the thread that they were spent in.
  """
  from jax import monitoring

  def listener(event: str, duration_secs: float, **about: str | int):
    if event in (TRACED, LOWERED, COMPILED) and (clock := time_use.present()):
      clock.has_compiled(duration_secs)
    if event in (LOWERED, COMPILED):
      heard(event, str(about.get('fun_name')).removeprefix('jit(').removesuffix(')'))

  monitoring.register_event_duration_secs_listener(listener)
  return listener


def count_compilations() -> collections.Counter[str]:
  """Counts how often XLA compiles each function, or takes it from its cache, from now on, by the function's name."""
  counts: collections.Counter[str] = collections.Counter()
  listen(lambda event, name: counts.update([name] if event == COMPILED else []))
  return counts


@contextlib.contextmanager
def watch_compilations() -> Iterator[collections.Counter[str]]:
  """Shows what XLA compiles while the block runs, and counts it as `count_compilations` does."""
  from jax import monitoring

  counts: collections.Counter[str] = collections.Counter()
  compiling: dict[int, display.Activity] = {}  # by thread

  def heard(event: str, name: str):
    if activity := compiling.pop(threading.get_ident(), None):  # it is compiled now, or was lowered only
      display.end(activity)
    if event == LOWERED:
      compiling[threading.get_ident()] = display.begin(f'compiling {WORDS.get(name, name)}')
    else:
      counts.update([name])

  listener = listen(heard)
  try:
    yield counts
  finally:
    monitoring.unregister_event_duration_listener(listener)
    for activity in compiling.values():  # an error has ended the compilation
      display.end(activity)


def flops_per_token(model: settings.Model, vocab_size: int, seq_len: int) -> int:
  """Returns the forward and backward FLOPs of one path's matrix products, per trained token, as PaLM counts them.

      6 (N (2 D H K + 2 D G K + 3 D F) + D V) + 12 N L H K        (arXiv 2204.02311, appendix B)

  A mixture of experts has 3 D (k F + S) + D E in place of 3 D F, for the k experts of a token, a shared one of width S,
  and the router of E experts.
  The head counts, tied or not; the embedding's look-up and rematerialization don't; attention counts as if it were
  neither causal nor cut into segments, but a block with a window w counts min(w, L) instead of L. Of blocks of the
  user's own it is three times the products of the forward pass, as traced with plain attention.
  """
  if model.block:
    return 6 * model.width * vocab_size + 3 * product_flops.of_blocks(model, seq_len) // seq_len
  m = model
  queries = model.num_heads * model.head_dim
  keys = (model.num_kv_heads or model.num_heads) * model.head_dim
  mlp = 3 * m.width * m.mlp_dim
  if m.num_experts:
    mlp = mlp * m.experts_per_token + 3 * m.width * m.shared_expert_dim + m.width * m.num_experts
  products = m.num_layers * (2 * m.width * (queries + keys) + mlp) + m.width * vocab_size
  windows = (layers.layer(m, n).window or seq_len for n in range(m.num_layers))
  return 6 * products + 12 * queries * sum(min(window, seq_len) for window in windows)


def mfu(flops_per_s: float, device_kind: str, dtype: str, num_devices: int) -> float | None:
  """Returns model FLOPs utilization: FLOP/s of the whole run over the devices' peak, or None if that isn't known.

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
  """Returns the largest resident size of this process so far, bytes."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == 'darwin' else peak * 1024


def device_peak_bytes(devices: Iterable) -> int | None:
  """Returns the most bytes in use so far on any of this process's devices among these; None if unknown (a CPU)."""
  stats = [device.memory_stats() or {} for device in devices if device in device.client.local_devices()]
  return max((s['peak_bytes_in_use'] for s in stats if 'peak_bytes_in_use' in s), default=None)
