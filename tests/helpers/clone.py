"""The files of this repository that Git tracks."""

import pathlib
import shutil
import subprocess

import pytest
from repository import ROOT


def tracked_files() -> list[str]:
  """Returns the files that Git tracks, by their paths in the repository; skips the test outside of a clone."""
  if not (ROOT / '.git').exists():
    pytest.skip('not a clone: the sources of a release have no list of tracked files')
  listing = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout
  return listing.splitlines()


def copy_tracked_files(target: pathlib.Path) -> None:
  """Copies the tracked files as they are now, so that nothing else in the clone gets into what is built of them."""
  for name in tracked_files():
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
