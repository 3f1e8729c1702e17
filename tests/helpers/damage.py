"""Damages each file that a finished run has left, in several ways, and looks at what the commands say and do then.

    python tests/helpers/damage.py [--only=PART] [--damages=flip,remove] [--every=N]

Each case is a copy of the run with one file damaged: all commands are given one after the other, in this process, as a
user would; then what they say is to be removed is removed, and the run goes on for a phase more. Wrong is a traceback;
more than a line, or one that does not name the file; another result than that of the undamaged run, in silence; advice
that does not lead to its modules.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import quick_xla
import tiny_run

from dipaco_jax import main
from dipaco_jax.command_line import command
from dipaco_jax.processes import stopping
from dipaco_jax.storage import seals

Path = pathlib.Path
PROMPT, PHASES, DECAY = 'aeiou oua', 5, '--config.inner.decay_steps=42'
MAY_GO = 'command.txt', 'report.json', 'stages/'  # what reads them does without; a stage without a record is to be done
NOT_READ = ('events', 'plots', 'lock', 'report.html')  # by any command of ours; checkpoints: their own tests


def halve(file: Path):
  replace(file, file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path):
  replace(file, b'')


def flip(file: Path):
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  replace(file, bytes(data))


def randomize(file: Path):
  replace(file, random.Random(0).randbytes(file.stat().st_size))


def remove(file: Path):
  file.unlink()


def other_json(text: str) -> Callable[[Path], None]:
  def other(file: Path):
    replace(file, text.encode())

  other.__name__ = f'json {text}'
  return other


DAMAGES = (halve, empty, flip, randomize, remove)
OTHER_JSON = tuple(map(other_json, ('[]', 'null', '{}')))


def replace(file: Path, data: bytes):
  """Another file of the name: the old one is linked to from elsewhere."""
  file.unlink()
  file.write_bytes(data)


def copy(workdir: Path, to: Path):
  """What may be written to in place is copied, the rest linked."""

  def one(source, target):
    (shutil.copy2 if Path(source).name in ('metrics.jsonl', 'lock', 'files') else os.link)(source, target)

  shutil.copytree(workdir, to, copy_function=one, ignore=shutil.ignore_patterns('events', 'plots'))


def files(workdir: Path) -> list[str]:
  """What is damaged, by names: of parts, paths, modules and versions that are alike, one; of versions the last too."""
  names = [str(file.relative_to(workdir)) for file in sorted(workdir.rglob('*')) if file.is_file()]
  names = [name for name in names if name.split('/')[0] not in (*NOT_READ, 'checkpoints')]
  last = max(int(p.name) for p in (workdir / 'modules').iterdir())
  alike = re.compile(rf'(sequences|shards/\w+)/[1-9]|modules/(?!({last}|1/ends)/)|modules/{last}/(low|high/1)')
  return [name for name in names if not alike.match(name) and not name.startswith('control/')]


# -- commands


class Said(NamedTuple):
  status: int
  err: str
  out: str


def main_again(config: Path, workdir: Path, *options: str) -> Said:
  """`main`, in this process."""
  argv = ['main', f'--config={config}', f'--workdir={workdir}', tiny_run.RARELY, DECAY, *options]
  before = sys.argv
  sys.argv = argv  # where ml_collections looks for overrides
  sys.modules.pop('config_config', None)
  for name in list(main.FLAGS):
    if name.startswith('config.'):
      delattr(main.FLAGS, name)
  try:
    with stopping.listening() as signals:
      return caught(lambda: main.guarded(argv, signals))
  finally:
    sys.argv = before
    main.FLAGS.unparse_flags()
    main.FLAGS['config'].unparse()


def caught(action: Callable[[], object]) -> Said:
  """What a command says and ends with; 1 and a traceback where it fails."""
  out, err, status = io.StringIO(), io.StringIO(), 0
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    command.quiet()
    seals._checked.clear()  # as in a process of its own
    try:
      print(action())
    except SystemExit as e:
      status = int(e.code or 0)
    except Exception as e:
      if isinstance(e, ValueError) or (isinstance(e, OSError) and e.errno is None):  # as command.run does
        status = 2
        print(f'dipaco_jax: {e}', file=sys.stderr)
      else:
        status = 1
        traceback.print_exc()
  return Said(status, err.getvalue(), out.getvalue())


def status(workdir: Path) -> str:
  from dipaco_jax import status as status_lib

  return status_lib.status(workdir).partition(': ')[2].replace(str(workdir), 'DIR')


def report(workdir: Path) -> str:
  from dipaco_jax.reports import run_report

  found = run_report.write(workdir)
  page = (workdir / 'report.html').read_text()
  return json.dumps([found, len(re.findall('<svg', page)), len(page) // 2000])


def generate(workdir: Path) -> list[int]:
  from dipaco_jax.inference import trained_run
  from dipaco_jax.inference.engine import Engine
  from dipaco_jax.inference.request import Request

  run = trained_run.TrainedRun(str(workdir))
  engine = Engine(run)
  tokens = tuple(int(t) for t in run.tokenizer.encode(PROMPT, eos=False))
  texts = [engine.start(Request(tokens, 4, path, until_eos=False)) for path in (None, 3)]
  while not all(text.finished for text in texts):
    engine.step()
  return [token for text in texts for token in text.tokens]


def exported(workdir: Path) -> list[str]:
  from dipaco_jax import export
  from dipaco_jax.inference import trained_run

  run, out = trained_run.TrainedRun(str(workdir)), workdir.parent / f'{workdir.name}-out'
  export.export(run, 0, run.best_versions[0], out, 'float32')
  return [tiny_run.sha256(file) for file in sorted(out.iterdir()) if file.name != 'README.md'] + [
    (out / 'README.md').read_text().replace(str(workdir), 'DIR')
  ]


def inspected(workdir: Path) -> str:
  from dipaco_jax.inference import excerpts, trained_run

  return json.dumps(excerpts.of_text(trained_run.TrainedRun(str(workdir)), PROMPT * 8, 8, None, None).to_dict())


READERS: dict[str, Callable[[Path], object]] = {
  'status': status,
  'generate': generate,
  'export': exported,
  'inspect': inspected,
  'report': report,
}


# -- a case


class Case(NamedTuple):
  name: str
  damage: Callable[[Path], None]

  def __str__(self):
    return f'{self.name}: {self.damage.__name__}'


def cases(workdir: Path) -> Iterator[Case]:
  for name in files(workdir):
    for damage in (*DAMAGES, *(OTHER_JSON if name.endswith('.json') else ())):
      if damage is not remove or not name.startswith(MAY_GO):
        yield Case(name, damage)


def wrong(said: Said, expected: Said | None, workdir: Path, name: str) -> str:
  """What is wrong with an answer, if anything is."""
  if said.status == 0:
    warned = [line for line in said.err.splitlines() if line.startswith('dipaco_jax: ')]
    is_told = any(name.split('/')[0] in line for line in warned)
    return '' if expected is None or said.out == expected.out or is_told else f'another result, in silence {warned}'
  lines = [line for line in said.err.replace('\r', '\n').splitlines() if line.startswith('dipaco_jax: ')]
  last = lines[-1] if lines else ''
  if said.status != 2 or 'Traceback' in said.err:
    return f'status {said.status}, traceback {said.err.strip().splitlines()[-1:]}'
  if not last or last != said.err.strip().splitlines()[-1] or len(last.replace(str(workdir), 'DIR')) > 400:
    return f'no line: {said.err[-300:]!r}'
  if name.split('/')[0].removesuffix('.sha256') not in last:
    return f'does not name the file: {last}'
  return ''


def follow(said: Said, workdir: Path) -> list[str]:
  """Removes what an answer says is to be removed; what that was."""
  words = re.search(r'remove (.*?), and the command', said.err)
  names = re.split(', | and ', words[1]) if words else []
  if names == ['it']:
    names = [str(workdir / 'config.json')]
  for name in names:
    assert Path(name).is_relative_to(workdir), name
    shutil.rmtree(name) if Path(name).is_dir() else os.unlink(name)
  return names


def modules(workdir: Path) -> str:
  return tiny_run.modules_sha256(workdir)


def run_case(case: Case, workdir: Path, config: Path, expected: dict[str, Said], sha256: str, place: Path) -> list[str]:
  """What is wrong; the notes of what was said go to stdout."""
  faults = []
  copy(workdir, place)
  case.damage(place / case.name)
  for name, reader in READERS.items():
    said = caught(lambda: reader(place))  # noqa: B023
    if words := wrong(said, expected.get(name), place, case.name):
      faults.append(f'{name}: {words}')
    if said.status:
      print(f'    {name}: {said.err.strip().replace(str(place), "DIR")}')
  for _ in range(4 if sha256 else 0):
    said = main_again(config, place, f'--config.train.phases={PHASES}')
    if words := wrong(said, None, place, case.name):
      faults.append(f'main: {words}')
    warned = {line for line in said.err.replace('\r', '\n').splitlines() if line.startswith('dipaco_jax: ')}
    for line in sorted(warned):
      print(f'    main: {line.replace(str(place), "DIR")}')
    if not said.status:
      break
    if not follow(said, place):
      faults.append('main: no advice')
      break
  else:
    if sha256:
      faults.append('main: the advice goes on and on')
  if sha256 and not said.status and modules(place) != sha256:
    faults.append('main: other modules')
  shutil.rmtree(place)
  shutil.rmtree(place.with_name(f'{place.name}-out'), ignore_errors=True)
  return faults


def run_all(workdir: Path, config: Path, chosen: list[Case], readers_only: bool = False) -> int:
  """How many cases went wrong."""
  counts: collections.Counter[str] = collections.Counter()
  with tempfile.TemporaryDirectory() as folder:
    place = Path(folder) / 'run'
    copy(workdir, place)
    expected = {name: caught(lambda: reader(place)) for name, reader in READERS.items()}  # noqa: B023
    assert all(not said.status for said in expected.values()), expected
    sha256 = ''
    if not readers_only:
      said = main_again(config, place, f'--config.train.phases={PHASES}')
      assert not said.status, said
      sha256 = modules(place)
    shutil.rmtree(place)
    shutil.rmtree(place.with_name('run-out'))
    for i, case in enumerate(chosen, 1):
      print(f'{i}/{len(chosen)} {case}', flush=True)
      started = time.monotonic()
      faults = run_case(case, workdir, config, expected, sha256, Path(folder) / 'run')
      counts['right' if not faults else 'wrong'] += 1
      for words in faults:
        print(f'  WRONG {words}')
      print(f'  {time.monotonic() - started:.1f} s', flush=True)
  print(json.dumps(counts))
  return counts['wrong']


if __name__ == '__main__':
  parser = argparse.ArgumentParser()
  parser.add_argument('--workdir', type=Path, help='of a finished run of tiny_run, with DECAY; by default one is made')
  parser.add_argument('--config', type=Path, help='of that run')
  parser.add_argument('--only', default='', help='of cases, a part of what is printed of them')
  parser.add_argument('--damages', default='', help='as flip,remove; by default all')
  parser.add_argument('--readers_only', action='store_true', help='not main, nor what it makes again')
  parser.add_argument('--every', type=int, default=1, help='one of so many cases')
  args = parser.parse_args()
  if not args.workdir:
    made = Path(tempfile.mkdtemp())
    args.config, args.workdir = tiny_run.write_config(made), made / 'run'
    tiny_run.run(args.config, args.workdir, DECAY, own_cache=True)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = quick_xla.on(1)
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(tiny_run.cache_of(args.workdir)))
  found = [case for case in cases(args.workdir) if args.only in str(case)]
  wanted = args.damages.split(',') if args.damages else [case.damage.__name__ for case in found]
  found = [case for case in found if case.damage.__name__ in wanted][:: args.every]
  sys.exit(min(1, run_all(args.workdir, args.config, found, args.readers_only)))
