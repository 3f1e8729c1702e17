"""A signal inside `graceful` is heard, if not by the loop in it then at its end."""

import subprocess
import sys

import pytest

CODE = """
import os, signal
from dipaco_jax import main
signals = main.Signals()
try:
  with signals.graceful():
    if {sent}:
      os.kill(os.getpid(), signal.SIGTERM)
    print('to the end', signals.requested())
  print('on')
except KeyboardInterrupt:
  print('stopped')
"""


@pytest.mark.parametrize('sent, said', [(False, 'to the end False\non\n'), (True, 'to the end True\nstopped\n')])
def test_a_signal_behind_the_last_dispatch(sent, said):
  code = CODE.format(sent=sent)
  assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout == said
