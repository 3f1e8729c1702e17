"""Tasks of islands [3]: what there is to do, and the claims of the processes that do it.

    waiting --wake--> ready --claim--> running --complete--> done
                        ^---- release, or the lease ran out

A task may name a holder, who has what it goes on from: others may claim it when it has been ready for `lease_s`. A
claim lasts until `lease_s` after the last heartbeat, by the database's clock; a lease that ends more than ten times
`lease_s` from now was taken while that clock was ahead, and counts as run out. Every claim raises the task's fence,
and only the owner of the newest fence can complete it: a process that was stopped past its lease is refused when it
wakes.
"""

from typing import NamedTuple

# Of `Task.words`, for people.
TASK_NAMES = (
  'tasks: train PATH PHASE, outer MODULE VERSION, evaluate PATH VERSION; paths, phases and versions count from 0'
)


class NewTask(NamedTuple):
  """A task to be inserted."""

  kind: str
  key: str
  number: int
  state: str = 'ready'  # or 'waiting', for a wake
  holder: str = ''  # who has what the task goes on from, and takes it before others; '': nobody


class Task(NamedTuple):
  """A task that was claimed, and the claim's fence."""

  id: int
  kind: str
  key: str
  number: int
  fence: int
  owner: str
  wakes: int  # how often it had been woken when it was claimed

  @property
  def words(self) -> str:
    return f'{self.kind} {self.key} {self.number}'.replace('  ', ' ')

  @property
  def is_first(self) -> bool:
    """Whether nobody can have done it before."""
    return self.fence == 1


class Lost(Exception):
  """The task went to another owner; this claim is void."""
