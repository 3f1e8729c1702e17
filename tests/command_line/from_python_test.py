"""A program that calls `dipaco_jax.train`: it gets what the command makes, and stays as it was."""

import json
import os
import re
import subprocess
import sys

import own_modules
import pytest
import quick_xla
import repository
import tiny_run

import dipaco_jax
from dipaco_jax.command_line import config_file, from_python
from dipaco_jax.config import extension
from dipaco_jax.models import block

CHANGES = {'checkpoint.every_steps': 24}  # as `undisturbed` has it
PROGRAM = """
import io, json, logging, os, pathlib, signal, sys, threading, time
import dipaco_jax
from absl import flags, logging as absl_logging

config, folder, changes = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])

class Stops(io.StringIO):  # the program, once it is seen to train
  number = 0

  def write(self, words):
    if self.number and words.startswith('train '):
      threading.Thread(target=os.kill, args=(os.getpid(), self.number)).start()
      self.number = 0
    sys.__stderr__.write(words)
    return super().write(words)

def state():
  import jax
  deadline = time.monotonic() + 5
  while len(threads := {t.name for t in threading.enumerate()}) > 1 and time.monotonic() < deadline:
    time.sleep(0.05)
  return {
    'threads': sorted(threads),
    'handlers': [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    'logs': [logging.root.handlers[:], logging.getLogger('jax').level, absl_logging.get_verbosity()],
    'cache': [jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs],
    'flags': flags.FLAGS.is_parsed(),
  }

def mine(number, frame):
  raise AssertionError('not now')

signal.signal(signal.SIGINT, mine)
before, ended, saved = state(), [], []
sys.stderr = Stops()
for sys.stderr.number in (signal.SIGINT, signal.SIGTERM):
  try:
    dipaco_jax.train(config, folder / 'run', changes)
  except (KeyboardInterrupt, SystemExit) as e:
    ended.append(repr(e))
  saved.append(max(int(p.name) for p in (folder / 'run/checkpoints/train').glob('[0-9]*')))
assert state() == before, (state(), before)
report = dipaco_jax.train(config, folder / 'run', changes)
rows = (folder / 'run/metrics.jsonl').read_bytes()
assert dipaco_jax.train(config, folder / 'run', changes) == report
assert (folder / 'run/metrics.jsonl').read_bytes() == rows
said = sys.stderr.getvalue()

sys.stderr, others = Stops(), []
options, place = dict(reuse=folder / 'run', scratch=folder / 'scratch', progress=False), (folder / 'beside').as_uri()
thread = threading.Thread(target=lambda: others.append(dipaco_jax.train(config, place, changes, **options)))
thread.start()
thread.join()
assert state() == before, (state(), before)
digests = [r['modules_sha256'] for r in (report, *others)]
print(json.dumps({'ended': ended, 'saved': saved, 'digests': digests, 'said': said, 'quiet': sys.stderr.getvalue()}))
"""


@pytest.mark.slow
def test_it_stops_and_continues_and_leaves_the_program_as_it_was(undisturbed, tmp_path):
  path = os.pathsep.join([str(repository.ROOT), os.environ.get('PYTHONPATH', '')])
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.on(1), 'PYTHONPATH': path}
  env['JAX_COMPILATION_CACHE_DIR'] = str(tiny_run.cache_of(undisturbed))
  config = str(undisturbed.parent / 'config.py')
  command = [sys.executable, '-c', PROGRAM, config, str(tmp_path), json.dumps(CHANGES)]
  done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['ended'] == ["KeyboardInterrupt('stopped; make the same call to resume')", 'SystemExit(143)']
  assert 0 < found['saved'][0] < found['saved'][1] < 96
  assert found['digests'] == 2 * [tiny_run.modules_sha256(undisturbed)]
  assert 'stopping: saving the training so far' in found['said'] and '\r' not in found['said']
  assert 'train 96/96 updates' in found['said'] and 'train ' not in found['quiet']
  call = f"dipaco_jax.train({config!r}, '{tmp_path}/run', {CHANGES})\n"
  assert (tmp_path / 'run' / 'command.txt').read_text() == call


@pytest.mark.parametrize(
  'overrides, words',
  [
    ({'train.phaes': 3}, 'config.train.phaes: there is no such field; the nearest is --config.train.phases'),
    ({'train': {'phases': 3}}, 'config.train is a section: name a field of it'),
    ({'train.phases': 'some'}, 'config.train.phases=some should be a whole number'),
    ({'train.phases': 1.5}, 'config.train.phases=1.5 should be a whole number'),
    ({3: 4}, 'config.3: there is no such field'),
    (
      {'grid.c': 3},
      "the axes of this config are a, b; to have others, give all, as --config.grid=\"{'a': 2, 'b': 2, 'c",
    ),
    ({'data.source': 'files', 'data.train': 'no/*.txt'}, "'no/*.txt' matches no file"),
  ],
)
def test_a_wrong_field_is_rejected_before_anything_is_written(overrides, words, tmp_path):
  with pytest.raises(dipaco_jax.InputError, match=re.escape(words)):
    dipaco_jax.train('tiny', tmp_path / 'run', overrides, progress=False)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'config, workdir, words',
  [
    ('nowhere.py', 'run', 'nowhere.py: there is no such file'),
    ('tiny:dens', 'run', "variant 'dens'"),
    (3, 'run', 'config is of type int: give'),
    ({'trian': {}}, 'run', 'config.trian: there is no such field'),
    (dipaco_jax.Settings(grid=(('a', 0),)), 'run', 'config.grid.a=0 should be above 0'),
    ({'train.phases': 3}, 'run', 'config.train.phases: there is no such field'),
    ({'train': 3}, 'run', 'config.train=3 should be a dict of fields'),
    ('tiny', 'ftp://bucket/run', 'cannot store objects'),
    ('tiny', 'a\nb', 'a name without control characters'),
  ],
)
def test_a_wrong_config_or_place(config, workdir, words, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(dipaco_jax.InputError, match=re.escape(words)):
    dipaco_jax.train(config, workdir)
  assert not list(tmp_path.iterdir())


def test_one_run_trains_in_a_process(tmp_path):
  with from_python._one, pytest.raises(dipaco_jax.InputError, match='another run trains in this process'):
    dipaco_jax.train('tiny', tmp_path / 'run')


def test_every_form_of_a_config_says_the_same(tmp_path):
  changes = {'train.phases': '8', 'grid': {'a': 3, 'b': 2}, 'data.source': 'files', 'data.train': 'a.txt,b/*.jsonl'}
  c = config_file.load(*config_file.find('tiny'))
  forms = ['tiny', repository.ROOT / 'configs' / 'tiny.py', c, c.to_dict(), dipaco_jax.settings.from_dict(c.to_dict())]
  before = c.to_json_best_effort()
  first, *others = [from_python._settings(form, '', changes) for form in forms]
  assert all(other == first for other in others)
  assert (first.train.phases, first.grid, first.data.train) == (8, (('a', 3), ('b', 2)), ('a.txt', 'b/*.jsonl'))
  assert c.to_json_best_effort() == before  # the caller's own is as it was
  assert from_python._settings({'train': {'phases': 3}}, '', {}).train == dipaco_jax.settings.Train(phases=3)


def test_a_config_that_asks_for_the_workdir_gets_it(tmp_path):
  """As upcycle does, which goes on where its model is gone."""
  lines = ['from dipaco_jax import settings', 'from ml_collections import ConfigDict', 'def get_config(workdir):']
  lines += ['  c = ConfigDict(settings.Settings().to_dict())', '  c.metrics.run = workdir', '  return c']
  (tmp_path / 'named.py').write_text('\n'.join(lines))
  assert from_python._settings(tmp_path / 'named.py', 'runs/mine', {}).metrics.run == 'runs/mine'


def test_a_part_whose_file_has_changed_is_imported_again(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)

  def made(source: str):
    (tmp_path / 'part_of_a_notebook.py').write_text(f'def make(config):\n  return {source}\n')
    settings = from_python._settings('tiny', '', {'outer.optimizer': 'part_of_a_notebook:make'})
    from_python._import_again(settings)
    return extension.make('outer.optimizer', settings.outer.optimizer, settings.outer), dict(settings.extensions)

  (first, before), (second, after) = made('1'), made('2')
  assert (first, second) == (1, 2) and before != after
  del sys.modules['part_of_a_notebook']


def test_a_block_whose_file_has_changed_is_made_again(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)
  own, kinds = own_modules.examples()['my_block.py'], []
  for name in ('Block', 'Other'):
    (tmp_path / 'block_of_a_notebook.py').write_text(own.replace('Block', name))
    settings = from_python._settings('tiny', '', {'model.block': 'block_of_a_notebook:make'})
    from_python._import_again(settings)
    kinds.append([type(one).__name__ for one in block.blocks(settings.model)])
  assert [*map(set, kinds)] == [{'Block'}, {'Other'}]
  del sys.modules['block_of_a_notebook']


def test_the_names_are_there():
  assert dir(dipaco_jax) == sorted(dipaco_jax.__all__)
  assert all(getattr(dipaco_jax, name) for name in dipaco_jax.__all__)
