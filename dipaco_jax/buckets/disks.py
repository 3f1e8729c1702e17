"""The disks of the processes of a run: one shared disk or, with a bucket, one disk per process.

Processes make stages together: each makes parts, the first process combines and publishes them, and all read the
result. On a shared disk, a barrier is sufficient. On separate disks, `gather` transfers the parts to the first process,
and `follow` transfers its publications to the others, both through the bucket. While training, each disk has a part of
the checkpoints and modules; the bucket has all parts.
"""

from collections.abc import Callable

import jax

from dipaco_jax.buckets import disks_apart, mirror as mirror_lib, other_disk
from dipaco_jax.processes import processes


class Disk:
  """The disk of a workdir, and the bucket that the run is in, if any."""

  def __init__(
    self,
    mirror: mirror_lib.Mirror | other_disk.Other | None = None,
    exchange: disks_apart.First | other_disk.Other | None = None,
  ):
    """`mirror` is of a workdir in a bucket; `exchange` keeps disks apart alike, None: all processes share one."""
    self.mirror, self._exchange = mirror, exchange

  @property
  def is_apart(self) -> bool:
    """Whether each process of the job has a disk of its own."""
    return self._exchange is not None

  @property
  def is_ours(self) -> bool:
    """Whether this process writes run files: the first process only, or every process if disks are separate."""
    return self.is_apart or processes.is_first()

  def publish(self):
    """Publishes the files of a stage, between stages; see `Mirror.publish_all`."""
    if self.mirror:
      self.mirror.publish_all()

  def gather(self, occasion: str, *patterns: str):
    """Waits for all processes, and until the first has all files that match globs, whichever process made them."""
    if self._exchange:
      self._exchange.gather(occasion, patterns)
    processes.barrier(occasion)

  def follow(self, occasion: str, with_checkpoints: bool = False):
    """Waits for all processes, and until they have the lasting files of the first; with checkpoints if asked."""
    if self._exchange:
      self._exchange.follow(occasion, with_checkpoints)
    processes.barrier(occasion)

  def only_first(self, function: Callable[[], None], occasion: str):
    """Calls `function` on the first process while the others wait; then they fetch what it has published."""
    if processes.is_first():
      function()
    self.follow(occasion)


SHARED = Disk()


def peers() -> disks_apart.Peers:
  """Returns how this process of a job tells the others, by the coordinator."""
  names = jax.process_index(), jax.process_count()
  return disks_apart.Peers(*names, processes.say, processes.hear, processes.unsay)
