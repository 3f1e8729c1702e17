"""The command owners: it suspends workers of islands, ends suspensions, and lists them."""

import json
import re
import shutil
import signal
import subprocess
import sys

import one_process
import owner_stores
import pytest
import repository
from absl import flags

from dipaco_jax import hub, owners
from dipaco_jax.command_line import config_file
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import suspensions

made = one_process.made


def run(place, *words: str) -> tuple[int, str]:
  command = [sys.executable, '-m', 'dipaco_jax.owners', f'--workdir={place}', *words]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=repository.ROOT)
  return done.returncode, (done.stdout or done.stderr).strip()


@pytest.mark.slow
def test_a_worker_is_suspended_listed_and_resumed(made, tmp_path):
  made.registry.beat('worker-0', 'worker', {})
  assert run(tmp_path, 'list') == (0, 'no worker is suspended')
  assert run(tmp_path, 'suspend', 'worker-0', '--why=its memory is faulty') == (
    0,
    'worker-0 is suspended: its memory is faulty',
  )
  assert run(tmp_path, 'list') == (0, 'suspended: worker-0, by a person: its memory is faulty')
  assert [*suspensions.current(made.registry)] == ['worker-0']
  assert run(tmp_path, 'suspend', 'worker-0', '--why=again')[0] == 2
  assert run(tmp_path, 'resume', 'worker-0') == (0, 'worker-0 may work again: start its process')
  assert not suspensions.current(made.registry)
  status, message = run(tmp_path, 'resume', 'worker-0')
  assert status == 2 and "'worker-0' is not suspended; suspended: nobody" in message
  assert run(tmp_path, 'suspend', 'worker-7', '--why=it lies')[0] == 2
  assert run(tmp_path, 'suspend', 'worker-7', '--why=it lies', '--unknown')[0] == 0
  assert run(tmp_path / 'nowhere', 'list')[0] == 2 and not (tmp_path / 'nowhere').exists()


@pytest.mark.parametrize(
  'words', [[], ['pause', 'worker-0'], ['suspend'], ['resume', 'a', 'b'], ['list', 'worker-0'], ['add']]
)
def test_other_words_are_errors_that_name_the_fix(words, monkeypatch):
  monkeypatch.setattr(owners.flags, 'FLAGS', type('Flags', (), {'workdir': 'runs/islands'}))
  with pytest.raises(
    InputError, match=r'say what to do: one of add, remove, suspend|name one worker|name one owner|takes no name'
  ):
    owners.check_words(words)


def test_what_is_no_identifier_is_no_owner():
  with pytest.raises(InputError, match=r"'the press' is no name of an owner: use letters, digits and _"):
    owners.add(None, 'the press')


OPTIONS = [
  ('compare', [], "name the owner's store, as its worker has it: --store=DIR compare"),
  ('compare', ['--store=s', '--workdir=w'], '--workdir is not for `compare`: leave it out'),
  ('compare', ['--store=s', '--why=so'], '--why is not for `compare`'),
  ('list', ['--store=s', '--workdir=w'], '--store is not for `list`'),
  ('list', [], 'name a run with --workdir=DIR'),
]


@pytest.fixture
def given(monkeypatch):
  """Sets the options of the command."""

  def give(arguments: list[str]):
    values = flags.FlagValues()
    for name in (*owners.OF_KEEPER, *owners.OF_OWNER):
      flags.DEFINE_string(name, None, '', flag_values=values)
    values(['owners', *arguments])
    monkeypatch.setattr(owners.flags, 'FLAGS', values)

  return give


@pytest.mark.parametrize(('action', 'arguments', 'message'), OPTIONS)
def test_options_that_do_not_fit_are_errors(action, arguments, message, given):
  given(arguments)
  with pytest.raises(InputError, match=re.escape(message)):
    owners.check_words([action])


def test_options_that_fit_are_none(given):
  given(['--store=s'])
  assert owners.check_words(['compare']) == ('compare', '')
  given(['--workdir=w', '--why=so'])
  assert owners.check_words(['suspend', 'worker-0']) == ('suspend', 'worker-0')


@pytest.mark.slow
def test_a_comparison_stops_at_ctrl_c_and_continues(tmp_path):
  with one_process.one_device():
    sections = {'train': dict(steps_per_phase=500, early_stopping=True), 'checkpoint': dict(every_steps=50)}
    owner_stores.make(tmp_path / 'court', owner_stores.keep(tmp_path / 'owners', **sections))
  shutil.rmtree(tmp_path / 'owners')
  command = [sys.executable, '-m', 'dipaco_jax.owners', f'--store={tmp_path / "court"}', 'compare']
  options = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True, 'cwd': repository.ROOT}
  process = subprocess.Popen(command, **options)
  for line in process.stderr:
    if line.startswith('alone-court') and ' ETA ' in line:
      process.send_signal(signal.SIGINT)
      break
  output, errors = process.communicate(timeout=120)
  assert process.returncode == 130 and not output and 'stopped; run the same command to continue' in errors
  assert not (tmp_path / 'court' / 'alone' / 'compare.json').exists()
  done = subprocess.run(command, **options, timeout=300)
  assert done.returncode == 0, done.stderr
  head, of_path, verdict, page = done.stdout.splitlines()
  assert 'held-back documents of court' in head and of_path.startswith('court: base ')
  assert 'the federation' in verdict and page == f'{tmp_path / "court"}/alone/compare.html'
  rows = [json.loads(line) for line in (tmp_path / 'court' / 'alone' / 'metrics.jsonl').read_text().splitlines()]
  steps = [row['step'] for row in rows if row['kind'] == 'step']
  assert steps == [*range(2, 1001, 2)], 'each step once'


@pytest.mark.slow
def test_a_comparison_that_diverges_ends_with_its_status(tmp_path):
  with one_process.one_device():
    sections = {'inner': dict(learning_rate=1e30, max_skipped=1), 'train': dict(steps_per_phase=16)}
    owner_stores.make(tmp_path / 'court', owner_stores.keep(tmp_path / 'owners', **sections))
  command = [sys.executable, '-m', 'dipaco_jax.owners', f'--store={tmp_path / "court"}', 'compare']
  done = subprocess.run(command, capture_output=True, text=True, cwd=repository.ROOT, timeout=300)
  assert done.returncode == 65 and 'alone-court diverged by step' in done.stderr and 'Traceback' not in done.stderr
  assert not (tmp_path / 'court' / 'alone' / 'compare.json').exists()


@pytest.mark.slow
def test_a_run_without_owners_gets_none(made, tmp_path):
  status, message = run(tmp_path, 'add', 'press')
  assert status == 2 and 'here, all text is in one place' in message


def test_the_config_on_the_page_of_owners_is_one_with_which_a_hub_can_begin(tmp_path):
  page = (repository.ROOT / 'docs' / 'owners.md').read_text()
  file = tmp_path / 'config.py'
  file.write_text(page.partition('```python\n')[2].partition('```')[0])
  run = settings.from_dict(config_file.read(str(file), [], str(tmp_path)))
  hub.check_settings(run, workers=0)
  assert run.data.own_text and run.model.num_layers == 6 and run.num_paths == 3
