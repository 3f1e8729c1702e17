"""The command owners: it suspends workers of islands, ends suspensions, and lists them."""

import subprocess
import sys

import one_process
import pytest
import repository

from dipaco_jax import owners
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


@pytest.mark.slow
def test_a_run_without_owners_gets_none(made, tmp_path):
  status, message = run(tmp_path, 'add', 'press')
  assert status == 2 and 'here, all text is in one place' in message
