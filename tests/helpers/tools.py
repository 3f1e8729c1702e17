"""Programs of other projects, each installed into an environment of its own."""

import pathlib
import subprocess
import sys

import pytest


def install(package: str, folder: pathlib.Path) -> pathlib.Path:
  """Installs a package; returns the folder of its programs. Skips the test where the package cannot be had."""
  place = folder / f'venv-{package}'
  subprocess.run([sys.executable, '-m', 'venv', place], check=True)
  pip = [place / 'bin' / 'python', '-m', 'pip', 'install', '-q', package]
  done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
  if done.returncode:
    pytest.skip(f'{package} cannot be installed: {done.stderr[-300:]}')
  return place / 'bin'
