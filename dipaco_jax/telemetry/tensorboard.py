"""Points of a stage's curves as events of TensorBoard."""

import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from dipaco_jax.telemetry import curves


class Events:
  """Writes a stage's events in the calling thread: tensorboardX's own thread fails on a full disk and blocks."""

  def __init__(self, folder: pathlib.Path, purge_step: int | None = None):
    """Opens the events of a stage. `purge_step` hides events of earlier files from that step on."""
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2

    folder.mkdir(parents=True, exist_ok=True)
    # The file names of tensorboardX have a resolution of only one second.
    suffix = f'.{os.getpid()}.{time.time_ns() % 10**9:09d}'
    self._writer = event_file_writer.EventsWriter(str(folder / 'events'), suffix)
    self._curves = curves.Curves()
    if purge_step is not None:
      log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=purge_step, session_log=log))
    self._writer.flush()

  def write(self, row: Mapping[str, Any]):
    for step, scalars in self._curves.points(row):
      self._write(row['time'], step, scalars)

  def _write(self, wall_time: float, step: int, scalars: Iterable[curves.Scalar]):
    from tensorboardX.proto import event_pb2, summary_pb2

    values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
    if values:
      summary = summary_pb2.Summary(value=values)
      self._writer.write_event(event_pb2.Event(wall_time=wall_time, step=step, summary=summary))
      self._writer.flush()

  def close(self):
    self._writer.close()
