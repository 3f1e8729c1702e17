"""All roles in one process, one task after another, as `main --replay` computes a run again [3].

Outer steps are computed on the CPU, as an outer executor computes them, and everything else on the devices of this
process. What a monitor does is done by a thread.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from dipaco_jax.islands import evaluator, monitor, outer_executor
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.role_loop import Perform, Publish
from dipaco_jax.registry.registry import Fact, Task

KINDS = (*outer_executor.KINDS, *evaluator.KINDS)  # of tasks, beside those of a worker


def perform(own_worker: Perform, executor: Perform) -> Perform:
  """Returns a function that performs tasks of any role."""

  def perform_any(island: Island, task: Task, lease: Lease) -> Publish | None:
    if task.kind not in outer_executor.KINDS:
      return (evaluator.perform if task.kind in evaluator.KINDS else own_worker)(island, task, lease)
    with on_cpu():
      publish = executor(island, task, lease)

    def publish_on_cpu() -> Sequence[Fact]:  # in another thread, which has a default device of its own
      with on_cpu():
        return publish() if publish else ()

    return publish_on_cpu if publish else None

  return perform_any


def on_cpu() -> contextlib.AbstractContextManager:
  """Computes on the CPU, unless JAX_PLATFORMS rules that out."""
  try:
    return jax.default_device(jax.local_devices(backend='cpu')[0])
  except RuntimeError:
    return contextlib.nullcontext()


@contextlib.contextmanager
def watched(island: Island) -> Iterator[Callable[[], None]]:
  """Watches in another thread, which has ended after the block unless that has failed.

  Yields a function that raises the error with which the other thread has ended, as the end of the block does.
  """
  named, errors = dataclasses.replace(island, name=f'{island.name}-monitor'), list[Exception]()

  def watch():
    try:
      monitor.watch(named, is_alone=True)
    except Exception as e:
      errors.append(e)

  def check():
    if errors:
      raise errors[0]

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  yield check
  thread.join()
  check()


def checked(perform: Perform, check: Callable[[], None]) -> Perform:
  """Returns a function that performs a task after `check`."""

  def perform_checked(island: Island, task: Task, lease: Lease) -> Publish | None:
    check()
    return perform(island, task, lease)

  return perform_checked
