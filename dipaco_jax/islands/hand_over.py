"""The hand-over of a path's state: its holder publishes it for a worker that would have to repeat many phases [3].

    ship (path, phase)    its holder, beside other tasks    state (path, phase), if it has that (state_facts.py)

Who finds that a replay would take long adds the task `ship`, which names the holder, and gives its own task back. The
holder, if it lives, answers within a lease. After that any worker may do the task, without a fact: there is nothing to
be had, and who comes next replays.
"""

import contextlib

from dipaco_jax.islands import lineage, owner_facts, state_facts
from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.islands.island import Island, Later
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.lineage import NewestState
from dipaco_jax.islands.state_facts import STATE
from dipaco_jax.registry.registry import Lost, NewTask, Task
from dipaco_jax.storage import retry

SHIP = 'ship'  # kind of the task
WORTHWHILE = 4.0  # leases: as asking takes up to two, a shorter replay is begun at once
LOOKS = 2  # key in a lease for requests to this holder


def ask(island: Island, task: Task, newest: NewestState):
  """Raises Later if a task has to wait for the state of its path, which is requested from the holder."""
  if len(newest.phases) == 1 or newest.parts[-1].nth or newest.within or task.owner != island.name:
    return  # there is little to repeat, or, within a phase, no state that a fact knows
  phase, path = newest.phases[-2], task.key
  checkpoints = island.registry.facts('checkpoint', [path], phase)  # none while its task is running, or done again
  holder = checkpoints[0].meta.get('holder') if checkpoints else None
  if not holder or (len(newest.phases) - 1) * lineage.phase_s(island) < WORTHWHILE * island.registry.lease_s:
    return
  if not island.registry.facts(STATE, [path], phase) and not island.registry.is_done(SHIP, path, phase):
    island.registry.add_tasks([NewTask(SHIP, path, phase, holder=holder)])
    raise Later(f'the state of path {path} is requested from its holder, {checkpoints[0].meta["worker"]}')


def answering(island: Island, held: HeldStates) -> contextlib.AbstractContextManager[None]:
  """Publishes states that are asked for, in a thread, until the end of the block."""

  what = 'a state that another worker may have asked for'
  return retry.every(island.registry.lease_s / LOOKS, what, lambda: answer(island, held))


def answer(island: Island, held: HeldStates):
  """Publishes a state that this holder, or since longer than a lease any other, is asked for, if there is one."""
  task = island.registry.claim(island.name, [SHIP], owner_facts.claim_keys(island), held.holder)
  if not task:
    return
  lease = Lease(island, 'worker', task)
  try:
    for checkpoint in island.registry.facts('checkpoint', [task.key], task.number):  # none where it was withdrawn
      if (state := held.get(int(task.key), task.number, checkpoint.sha256)) is not None:
        state_facts.publish(island, checkpoint, state)
    island.registry.complete(task, [])
  except Lost:
    pass
  finally:
    lease.close()
