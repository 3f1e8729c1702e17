"""Where this repository is, and its parts that tests run or read."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
HELPERS = ROOT / 'tests' / 'helpers'


def environment(test_file: str) -> dict[str, str]:
  """Variables for a process that imports what tests do: the package, the helpers, and the test file itself."""
  folders = (ROOT, HELPERS, pathlib.Path(test_file).parent, HELPERS.parent)
  return os.environ | {'PYTHONPATH': os.pathsep.join(map(str, folders))}
