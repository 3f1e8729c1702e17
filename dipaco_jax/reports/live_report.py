"""The page of a run while it trains: `report.html` is written anew after evaluations, by a process of its own.

Drawing takes seconds, and may fail: a child of low priority does it, which training neither waits for nor depends on.
"""

import logging
import os
import pathlib
import subprocess
import sys
import time

PAGE = 'report.html'
EVERY_S = 30.0  # at most: there are runs whose phases take a second
SHARE = 0.05  # of a processor's time, that drawing may take
PROGRAM = 'import sys; from dipaco_jax.reports import live_report; live_report.write(sys.argv[1])'


class LiveReport:
  """Of the run in a workdir, for one process of a job. Nothing here raises, and nothing waits but `close`."""

  def __init__(self, workdir: pathlib.Path, every_s: float = EVERY_S):
    self._workdir, self._every_s = workdir, every_s
    self._child: subprocess.Popen | None = None
    self._began, self._failed = time.time(), False

  def due(self):
    """There is something new to be seen: begins to write, unless that is being done, or was just now."""
    if self._child and self._child.poll() is None:
      return
    self._settle()
    if time.time() - self._began < self._every_s:
      return
    self._began = time.time()
    try:
      self._child = start(self._workdir)
    except OSError as e:
      self._warn(str(e))

  def _settle(self):
    """Looks how the last child did; what takes long is done less often."""
    if not self._child:
      return
    if self._child.returncode:
      self._warn(f'status {self._child.returncode}')
    elif (page := self._workdir / PAGE).exists():
      self._failed, took_s = False, page.stat().st_mtime - self._began
      self._every_s = max(self._every_s, took_s / SHARE)
    self._child = None

  def _warn(self, why: str):
    if not self._failed:  # once, as it may be so for weeks
      logging.warning(
        'the report of the run so far was not written (%s); training goes on, and `python -m dipaco_jax.report '
        '--workdir=%s` says why',
        why,
        self._workdir,
      )
    self._failed = True

  def close(self):
    """No child writes any more."""
    if self._child:
      self._child.kill()
      self._child.wait()
    self._child = None

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()


def start(workdir: pathlib.Path) -> subprocess.Popen:
  """A process that writes the page. Ctrl-C is not for it, nor are the devices."""
  package = str(pathlib.Path(__file__).parent.parent)
  path = os.pathsep.join(filter(None, [package, os.environ.get('PYTHONPATH')]))
  return subprocess.Popen(
    [sys.executable, '-c', PROGRAM, str(workdir)],
    env=os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  )


def write(workdir: str):
  """Writes the page; what that process runs."""
  os.nice(19)
  from dipaco_jax.reports import run_report
  from dipaco_jax.storage import files

  place = pathlib.Path(workdir)
  files.write_file(place / PAGE, run_report.page_so_far(place))
