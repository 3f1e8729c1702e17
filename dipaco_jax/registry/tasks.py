"""Tasks of islands [3], and the claims of the processes that perform them.

    waiting --wake--> ready --claim--> running --complete--> done
                        ^---- release, or the lease ran out

A task may name a holder: the process that has the state from which the task continues. Other processes may claim the
task after it has been ready for `lease_s`. A claim expires `lease_s` after the last heartbeat, by the database's clock.
A lease that ends more than ten times `lease_s` from now was taken while that clock was ahead, and counts as expired.
Every claim increases the task's fence, and only the owner of the newest fence can complete the task, so a process that
was suspended for longer than its lease is rejected when it resumes.
"""

from typing import NamedTuple

from dipaco_jax.core.errors import Lost as Lost

# Explains `Island.words`.
TASK_NAMES = (
  'tasks: train PATH PHASE, outer MODULE VERSION, evaluate PATH VERSION; paths, phases and versions count from 0'
)


class NewTask(NamedTuple):
  """A task to be inserted."""

  kind: str
  key: str
  number: int
  state: str = 'ready'  # or 'waiting' until it is woken
  holder: str = ''  # process that has the state to continue from, and may claim the task first; '' means none


class Task(NamedTuple):
  """A task that was claimed, and the claim's fence."""

  id: int
  kind: str
  key: str
  number: int
  fence: int
  owner: str
  wakes: int  # how often the task had been woken when it was claimed

  @property
  def is_first(self) -> bool:
    """Whether no process can have performed the task before."""
    return self.fence == 1


class Claim(NamedTuple):
  """A claim that a worker says it has, which holds if the task's owner is of this name."""

  task: int  # its id
  fenced: int  # by this fence
  name: str  # of the worker's token: the owner is this name, or this name, '/' and that of a process
