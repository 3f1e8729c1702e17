"""The page of a run while it trains: `report.html` is written again after evaluations, by a process of its own.

Drawing takes seconds, and may fail: a child of low priority does it, which training neither waits for nor depends on.
"""

import logging
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import dipaco_jax

PAGE = 'report.html'
EVERY_S = 30.0  # at most: there are runs whose phases take a second
SHARE = 0.05  # of a processor's time, that drawing may take
PROGRAM = 'import sys; from dipaco_jax.reports import live_report; live_report.write_page(*sys.argv[1:])'


class LiveReport:
  """Writes a run's page from time to time, until it is closed. Nothing here raises, and only `close` waits."""

  def __init__(self, workdir: pathlib.Path, every_s: float = EVERY_S):
    self._workdir, self._every_s = workdir, every_s
    self._child: subprocess.Popen | None = None
    self._began, self._failed = time.time(), False

  def write_if_due(self):
    """Starts writing the page, unless it is being written or was written less than `every_s` ago."""
    if self._child and self._child.poll() is None:
      return
    self._settle()
    if time.time() - self._began < self._every_s:
      return
    self._began = time.time()
    try:
      self._child = start_child(self._workdir)
    except OSError as e:
      self._warn(str(e))

  def _settle(self):
    """Reads how the last child ended; pages that take long to draw are updated less often."""
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
        'the report of the run so far was not written (%s); training continues, and `python -m dipaco_jax.report '
        '--workdir=%s` says why',
        why,
        self._workdir,
      )
    self._failed = True

  def close(self):
    if self._child:
      self._child.kill()
      self._child.wait()
    self._child = None


def start_child(workdir: pathlib.Path) -> subprocess.Popen:
  """Starts a process that writes the page, without the devices; Ctrl-C does not reach it."""
  root = str(pathlib.Path(dipaco_jax.__file__).parent.parent)  # the folder that the package is in
  path = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
  env = os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
  silent: Any = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)
  command = [sys.executable, '-c', PROGRAM, str(workdir), str(os.getpid())]
  return subprocess.Popen(command, env=env, start_new_session=True, **silent)


def write_page(workdir: str, parent: str):
  """Writes the page at low priority, unless the training process has ended; this is the child's program."""
  os.nice(19)
  from dipaco_jax.reports import run_report
  from dipaco_jax.storage import files

  place = pathlib.Path(workdir)
  page = run_report.page_so_far(place)
  if os.getppid() == int(parent):  # else it was killed: its workdir may be removed already, or be another process's
    files.write_file(place / PAGE, page)
