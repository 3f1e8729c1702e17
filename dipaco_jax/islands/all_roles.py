"""All roles in one process, one task after another, as `main --replay` computes a run again [3].

Outer steps are computed on the CPU, as an outer executor computes them, and everything else on the devices of this
process. What a monitor does is done by a thread.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import jax

from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import evaluator, monitor, outer_executor
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.role_loop import Perform, Publish
from dipaco_jax.registry.registry import Task

KINDS = (*outer_executor.KINDS, *evaluator.KINDS)  # of tasks, beside those of a worker


def perform(own_worker: Perform, executor: Perform) -> Perform:
  """Returns a function that performs tasks of any role."""

  def perform_any(island: Island, task: Task, lease: Lease) -> Publish | None:
    if task.kind in outer_executor.KINDS:
      with on_cpu():
        return executor(island, task, lease)
    return (evaluator.perform if task.kind in evaluator.KINDS else own_worker)(island, task, lease)

  return perform_any


def on_cpu() -> contextlib.AbstractContextManager:
  """Computes on the CPU, unless JAX_PLATFORMS rules that out."""
  try:
    return jax.default_device(jax.local_devices(backend='cpu')[0])
  except RuntimeError:
    return contextlib.nullcontext()


@contextlib.contextmanager
def watched(island: Island) -> Iterator[None]:
  """Watches in another thread, which has ended after the block unless that has failed."""
  named = dataclasses.replace(island, name=f'{island.name}-monitor')

  def watch():
    with contextlib.suppress(Diverged):  # which the loop of the tasks raises, too
      monitor.watch(named, is_alone=True)

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  yield
  thread.join()
