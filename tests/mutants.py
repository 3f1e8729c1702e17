"""Breaks the program on purpose, one line at a time, and shows whether the quick tests notice.

    python tests/mutants.py --list                                  the mutants and the tests that should fail
    python tests/mutants.py                                         runs all and lists those that survive
    python tests/mutants.py --only=registry/ --only=outer/rescale   runs those whose names begin with these
    python tests/mutants.py --results=mutants.json                  keeps results; started again, runs those not killed

mutants.toml beside this file holds the mutants: a file of the package, text that occurs there once, its replacement,
and tests of which at least one should fail. Each mutant is applied to a copy of the tree, where its tests run as in CI,
without --slow. First all these tests run on the unchanged copy, where they have to pass (--no_baseline skips that).
The exit status is 1 if a mutant survives or has no result. Add a mutant with each test of something that must not
break; tests/README.md says which ones guard the invariants.

Processes are forked after JAX has been imported, because the import takes longer than most tests.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent
COPIED = 'dipaco_jax', 'configs', 'tests', 'pyproject.toml', 'setup.cfg'
KILLED, SURVIVED, UNKNOWN = 'killed', 'survived', 'no result'
FAILED = re.compile(r'^(?:FAILED|ERROR) (\S+::.*)$', re.MULTILINE)  # the test, and the error that it ended with


class Mutant(NamedTuple):
  """A change to one file of the package, and the tests that should notice."""

  name: str
  file: str  # below dipaco_jax/
  old: str  # occurs there once
  new: str
  tests: tuple[str, ...]  # below tests/, as pytest names them

  def digest(self) -> str:
    """Identifies the change and its tests, so that a kept result counts for these alone."""
    return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def read_mutants() -> list[Mutant]:
  """Reads mutants.toml."""
  tables = tomllib.loads((TESTS / 'mutants.toml').read_text())
  return [Mutant(name, t['file'], t['old'], t['new'], tuple(t['tests'])) for name, t in tables.items()]


def import_libraries():
  """Imports libraries of the tests, without pytest's plugins, in the environment that conftest.py sets."""
  sys.path.insert(0, str(TESTS / 'helpers'))
  import quick_xla

  os.environ |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.on(8), 'PYTHONDONTWRITEBYTECODE': '1'}
  sys.path.pop(0)
  sys.modules.pop('quick_xla')
  sys.dont_write_bytecode = True  # a mutant may have the size and the time of the file before
  for name in 'jax.numpy flax.linen optax sqlalchemy ml_collections safetensors.numpy pytest'.split():
    __import__(name)


def copy_tree(folder: pathlib.Path):
  """Copies what tests need; what XLA compiled earlier is shared with the tree's own tests."""
  for name in COPIED:
    if (ROOT / name).is_dir():
      shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      shutil.copy(ROOT / name, folder / name)
  (ROOT / '.pytest_cache').mkdir(exist_ok=True)
  (folder / '.pytest_cache').symlink_to(ROOT / '.pytest_cache')


@contextlib.contextmanager
def applied(mutant: Mutant, folder: pathlib.Path) -> Iterator[None]:
  """Applies a mutant to the copy during the block. Raises ValueError where its text does not occur exactly once."""
  file = folder / 'dipaco_jax' / mutant.file
  source = file.read_text()
  if (count := source.count(mutant.old)) != 1:
    raise ValueError(f'{mutant.name}: {mutant.old!r} occurs {count} times in {mutant.file}; change mutants.toml')
  file.write_text(source.replace(mutant.old, mutant.new))
  try:
    yield
  finally:
    file.write_text(source)


def run_tests(folder: pathlib.Path, tests: Sequence[str], patience_s: float, stop_at_first: bool) -> tuple[int, str]:
  """Runs tests of the copy in a forked process. Returns pytest's exit status, -1 if they take too long, and output."""
  log = folder / 'output.txt'
  if not (process := os.fork()):
    run_in_child(folder, log, [f'tests/{test}' for test in tests] + ['-x'] * stop_at_first)
  end = time.monotonic() + patience_s
  while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
    if time.monotonic() > end:
      os.killpg(process, signal.SIGKILL)
      os.waitpid(process, 0)
      return -1, log.read_text()
    time.sleep(0.05)
  return os.waitstatus_to_exitcode(ended[1]), log.read_text()


def run_in_child(folder: pathlib.Path, log: pathlib.Path, arguments: list[str]):
  """Runs pytest in this process, which ends with its status."""
  status = 70
  try:
    os.setpgid(0, 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    os.environ['PYTHONPATH'] = str(folder)
    os.environ['COLUMNS'] = '240'  # else pytest cuts off the error of a test whose name is long
    sys.path.insert(0, str(folder))
    import pytest

    status = int(pytest.main(['-q', '-n0', '-rfE', '--durations=0', f'--basetemp={folder}/temporary', *arguments]))
    import dipaco_jax

    if not pathlib.Path(dipaco_jax.__file__).is_relative_to(folder):
      raise ImportError(f'{dipaco_jax.__file__} was tested instead of the copy')
  except BaseException:
    status = 70
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def judge(mutant: Mutant, folder: pathlib.Path, patience_s: float) -> tuple[str, str]:
  """Returns what became of a mutant, and the test that killed it with its error, or why there is no result."""
  with applied(mutant, folder):
    status, output = run_tests(folder, mutant.tests, patience_s, stop_at_first=True)
  failed = FAILED.findall(output)
  if status == 1 and failed:
    return KILLED, failed[0]
  if status == 0 and ' passed' in output:
    return SURVIVED, ', '.join(mutant.tests)
  return UNKNOWN, f'status {status}: {(output.strip().splitlines() or ["no output"])[-1]}'


def check_baseline(mutants: Sequence[Mutant], folder: pathlib.Path, patience_s: float):
  """Ends the program where a test fails on the unchanged copy: it could kill nothing."""
  tests = sorted({test for mutant in mutants for test in mutant.tests})
  status, output = run_tests(folder, tests, patience_s * len(tests), stop_at_first=False)
  if status:
    sys.exit(f'{output}\nthese tests have to pass on the unchanged tree (status {status})')
  print(f'{len(tests)} tests pass on the unchanged tree', flush=True)


def run_all(mutants: Sequence[Mutant], flags: argparse.Namespace) -> dict[str, list[str]]:
  """Runs the mutants that are not known to be killed. Returns {name: [digest, what became of it, by what]}."""
  results = {}
  if flags.results and flags.results.exists():
    results = json.loads(flags.results.read_text())
  todo = [mutant for mutant in mutants if results.get(mutant.name, [])[:2] != [mutant.digest(), KILLED]]
  if not todo:
    return results
  import_libraries()
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch).resolve()
    copy_tree(folder)
    if flags.baseline:
      check_baseline(todo, folder, flags.patience_s)
    for mutant in todo:
      began = time.monotonic()
      outcome, words = judge(mutant, folder, flags.patience_s)
      print(f'{outcome:9} {mutant.name}  {time.monotonic() - began:.1f} s  {words}', flush=True)
      if outcome != UNKNOWN:
        results[mutant.name] = [mutant.digest(), outcome, words]
      if flags.results:
        flags.results.write_text(json.dumps(results, indent=1) + '\n')
  return results


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--list', action='store_true', help='print the mutants and run nothing')
  parser.add_argument('--only', action='append', default=[], help='run mutants whose names begin with this')
  parser.add_argument('--results', type=pathlib.Path, help='JSON file of results; killed mutants are not run again')
  parser.add_argument('--no_baseline', dest='baseline', action='store_false', help='skip the unchanged tree')
  parser.add_argument('--patience_s', type=float, default=300, help='seconds that the tests of a mutant may take')
  flags = parser.parse_args()
  mutants = [m for m in read_mutants() if not flags.only or m.name.startswith(tuple(flags.only))]
  if not mutants:
    sys.exit(f'--only={",".join(flags.only)} matches no mutant: see --list')
  if flags.list:
    for mutant in mutants:
      print(f'{mutant.name}  ({mutant.file})', *mutant.tests, sep='\n  ')
    return
  results = run_all(mutants, flags)
  kept = [results[m.name][1] if results.get(m.name, [''])[0] == m.digest() else UNKNOWN for m in mutants]
  print(f'{kept.count(KILLED)} of {len(mutants)} mutants are killed')
  for mutant, outcome in zip(mutants, kept, strict=True):
    if outcome != KILLED:
      print(f'{outcome}: {mutant.name} in dipaco_jax/{mutant.file}: {mutant.new}')
  sys.exit(int(kept.count(KILLED) < len(mutants)))


if __name__ == '__main__':
  main()
