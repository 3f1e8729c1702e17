"""What is being done is said where nothing else is: at once or after a second, and no oftener than is of use."""

import io
import os
import re
import subprocess
import sys
import time

import pytest
import repository

from dipaco_jax.training import display


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
  assert lines[:3] == ['compiling ...', 'compiling 4 s', 'compiling 7 s'] and lines[-1] == 'compiling: 50:00'
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
from dipaco_jax.training import display, performance

display.TICK_S, display.QUICK_S, display.TOLD_S = 0.001, 0.0, 0.0
performance.tell_compilations()

@jax.jit
def outer(x):
  for _ in range(100):
    x = jnp.sin(x @ x)
  return x

with display.doing('training', at_once=True):
  outer(jnp.ones((8, 8)))
"""


def test_compiling_is_said():
  env = os.environ | {'PYTHONPATH': str(repository.ROOT), 'JAX_PLATFORMS': 'cpu'}
  env.pop('JAX_COMPILATION_CACHE_DIR', None)
  done = subprocess.run([sys.executable, '-c', COMPILES], env=env, capture_output=True, text=True, check=True)
  lines = done.stderr.splitlines()
  assert lines[0] == 'training ...' and re.fullmatch(r'training: \d+ s', lines[-1])
  assert 'compiling the outer step ...' in lines
  assert any(re.fullmatch(r'compiling the outer step: \d+ s', line) for line in lines)
