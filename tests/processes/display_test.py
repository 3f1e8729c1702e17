"""What is being done is said where nothing else is: at once or after a second, and no oftener than is of use."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import numpy as np
import pytest
import repository

from dipaco_jax.processes import display


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  return now


def waited(clock, stream, until: float, shown=(), tells=True) -> str:
  """What is written while something takes so long, and `shown` says at these seconds how far it is."""
  shows = display.Display(stream)
  activity, began = display.Activity('compiling', tells), clock[0]
  for tenths in range(int(10 * until) + 1):
    clock[0] = began + tenths / 10
    if tenths / 10 in shown:
      shows.show(f'at {tenths / 10:g}', stands=True)
    activity.tick(shows)
  activity.end(shows)
  return stream.getvalue()


def test_what_is_quick_gets_no_word(clock):
  assert waited(clock, io.StringIO(), 0.9) == '' and waited(clock, Terminal(), 0.9) == ''


def test_few_lines_where_work_is_long(clock):
  lines = waited(clock, io.StringIO(), 3000).splitlines()
  assert lines[:3] == ['compiling ...', 'compiling 4 s', 'compiling 7 s'] and lines[-1] == 'compiling: 50 min'
  assert len(lines) < 150
  assert waited(clock, io.StringIO(), 2) == 'compiling ...\n'  # which is over soon


def test_a_terminal_has_one_line(clock, monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  written = waited(clock, Terminal(), 4)
  shown = ['compiling ...', 'compiling 2 s', 'compiling 3 s', 'compiling 4 s', 'compiling: 4 s']
  assert written == ''.join(f'\r{line}\x1b[K' for line in shown) + '\n'
  assert waited(clock, Terminal(), 2).endswith('compiling 2 s\x1b[K\r\x1b[K')


def test_a_line_that_says_how_far_it_is_comes_before_what_it_is(clock, monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  assert 'compiling' not in waited(clock, Terminal(), 60, shown=[0], tells=False)
  lines = waited(clock, io.StringIO(), 40, shown=range(0, 40, 2), tells=False).splitlines()
  assert lines == [f'at {s}' for s in range(0, 40, 2)]
  lines = waited(clock, io.StringIO(), 40, shown=range(0, 40, 4), tells=False).splitlines()
  assert lines[::2] == [f'at {s}' for s in range(0, 40, 4)] and all('compiling' in line for line in lines[1::2])
  assert waited(clock, io.StringIO(), 6, shown=[0], tells=False) == 'at 0\ncompiling ...\ncompiling 6 s\n'


@pytest.mark.parametrize('broken', ['closed', 'pipe'])
def test_it_never_raises(broken):
  reading, writing = os.pipe()
  with os.fdopen(writing, 'w') as stream:
    os.close(reading)
    if broken == 'closed':
      stream.close()
    shows = display.Display(stream)
    shows.show('x')
    shows.leave()
    shows.clear()
    if broken == 'pipe':
      os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # for what it still holds


COMPILES = """
import jax
import jax.numpy as jnp
from dipaco_jax.processes import display
from dipaco_jax.telemetry import performance

display.TICK_S, display.QUICK_S, display.TOLD_S = 0.001, 0.0, 0.0

@jax.jit
def outer(x):
  for _ in range(100):
    x = jnp.sin(x @ x)
  return x

with performance.watch_compilations(), display.doing('training', at_once=True):
  outer(jnp.ones((8, 8)))
"""


@pytest.mark.slow
def test_compiling_is_said():
  env = os.environ | {'PYTHONPATH': str(repository.ROOT), 'JAX_PLATFORMS': 'cpu'}
  env.pop('JAX_COMPILATION_CACHE_DIR', None)
  done = subprocess.run([sys.executable, '-c', COMPILES], env=env, capture_output=True, text=True, check=True)
  lines = done.stderr.splitlines()
  assert lines[0] == 'training ...' and re.fullmatch(r'training: \d+ s', lines[-1])
  assert 'compiling the outer step ...' in lines
  assert any(re.fullmatch(r'compiling the outer step: \d+ s', line) for line in lines)


@pytest.mark.parametrize(
  ('paths', 'num_paths', 'words'),
  [([0], 1, 'loss 2.500'), ([3], 4, 'path 3 loss 2.500'), ([0, 1], 4, 'mean loss of 2 paths 2.500')],
)
def test_the_progress_line_says_whose_loss_it_is(paths, num_paths, words):
  progress = display.Progress('train', 0, 'updates', stream := io.StringIO())
  progress.update(8, **{display.whose_loss(paths, num_paths): 2.5})
  assert stream.getvalue() == f'train 8 updates  {words}\n'


def on_terminal(columns, updates):
  """Everything that a progress line writes to a terminal; updates are (seconds, done, shown)."""
  leader, follower = pty.openpty()
  fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
  now, written = [0.0], []

  def read():
    with contextlib.suppress(OSError):  # how a terminal tells that nobody will write any more
      while data := os.read(leader, 4096):
        written.append(data)

  reader = threading.Thread(target=read)
  reader.start()
  with open(follower, 'w') as stream:
    progress = display.Progress('train', 1000, 'steps', stream, clock=lambda: now[0])
    for now[0], done, shown in updates:
      progress.update(done, **shown)
    progress.close()
    progress.close()  # which says nothing twice
  reader.join()
  os.close(leader)
  return b''.join(written).decode()


def test_progress_on_a_terminal(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  written = on_terminal(200, [(t / 10, 500 + t, {'loss': 3.25, 'tokens_per_s': 8012.3}) for t in range(101)])
  *lines, last = written.split('\r')[1:]
  assert 25 < len(lines) < 52, 'at most five a second, for ten seconds'
  assert all(line.endswith('\x1b[K') for line in lines)
  # 100 steps took 10 s; the 500 before the resume took none and don't count.
  assert lines[-1] == 'train 600/1,000 steps 60%  loss 3.250  8,012 tokens/s  ETA 40 s\x1b[K'
  assert last == '\n'


def test_progress_never_wraps(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  written = on_terminal(20, [(1.0, 1, {'loss': 3.25, 'tokens_per_s': 8012.3})])
  assert written.split('\r')[1] == 'train 1/1,000 steps\x1b[K'


def test_the_eta_of_the_run_counts_later_stages():
  now, stream = [0.0], io.StringIO()
  progress = display.Progress('pretrain', 100, 'updates', stream, clock=lambda: now[0], later=300.0)
  for done in range(11):
    now[0] = 3.0 * done
    progress.update(done, loss=3.25)
  last = stream.getvalue().splitlines()[-1]
  assert last == 'pretrain 10/100 updates 10%  loss 3.250  ETA 4 min 30 s  run ETA ~19 min 30 s'


def test_on_a_narrow_terminal_the_etas_and_the_loss_come_first(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  updates = [(float(t), t, {'loss': 3.25, 'phase': 3, 'tokens_per_s': 8012.3}) for t in range(20)]
  assert on_terminal(60, updates).split('\r')[-2] == 'train 19/1,000 steps 1%  loss 3.250  ETA 16 min 21 s\x1b[K'
  assert 'phase 3  8,012 tokens/s  ETA' in on_terminal(90, updates)


def test_a_note_stays_whole(monkeypatch):
  stream = Terminal()
  monkeypatch.setenv('TERM', 'xterm')
  shown = display.Display(stream)
  shown.show('working ...')
  shown.note('a' * 500)
  assert stream.getvalue().endswith(f'\r\x1b[K{"a" * 500}\n')
  shown.only_terminal, shown.silent = True, True
  shown.note('b')
  assert 'b' not in stream.getvalue()


def test_eta_is_of_the_recent_rate(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  slow_first = [(0.0, 0, {}), (100.0, 1, {}), *((100.0 + t, 1 + t, {}) for t in range(1, 60))]
  assert 'ETA 15 min 40 s' in on_terminal(80, slow_first)  # 940 steps at one a second


def test_progress_off_a_terminal_is_rare():
  now, stream = [0.0], io.StringIO()
  progress = display.Progress('pretrain', 0, 'documents', stream, clock=lambda: now[0])
  for now[0] in np.arange(0, 1800, 0.5):
    progress.update(int(now[0]))
  progress.close()
  lines = stream.getvalue().splitlines()
  seconds = [int(line.split()[1].replace(',', '')) for line in lines]
  assert lines[0] == 'pretrain 0 documents' and seconds[-1] == 1799
  assert seconds[:24] == [int(2.5 * i) for i in range(24)]  # the first minute
  assert seconds[24:79] == [*range(60, 610, 10)] and seconds[79:-1] == [*range(630, 1800, 30)]


@pytest.mark.parametrize('step_s', [0.1, 0.9, 1.2, 1.6, 2.4])
def test_progress_off_a_terminal_is_not_silent_for_long(step_s):
  now, stream = [0.0], io.StringIO()
  progress = display.Progress('train', 0, 'ms', stream, clock=lambda: now[0])
  for now[0] in np.arange(0, 58, step_s):
    progress.update(round(1000 * now[0]))
  seconds = [int(line.split()[1].replace(',', '')) / 1000 for line in stream.getvalue().splitlines()]
  assert min(np.diff(seconds)) >= 1.5 and max(np.diff(seconds)) <= 3


def test_the_last_update_is_shown_once():
  stream = io.StringIO()
  progress = display.Progress('route', 2, 'shards', stream)
  progress.update(2)
  progress.close()
  assert stream.getvalue() == 'route 2/2 shards 100%\n'


@pytest.mark.parametrize(
  ('seconds', 'words'),
  [
    (0.4, '0 s'),
    (59.4, '59 s'),
    (61, '1 min 1 s'),
    (119.7, '2 min'),
    (3661, '1 h 1 min'),
    (3600, '1 h'),
    (90_061, '1 d 1 h'),
  ],
)
def test_duration(seconds, words):
  assert display.duration(seconds) == words
