"""The registry's password: from where no list of processes shows it, and in nothing that is said, however misspelt."""

import logging
import pathlib
import signal
import sys
import time

import pytest

from dipaco_jax import local
from dipaco_jax.command_line import command, supervision
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import roles
from dipaco_jax.registry import database, registry, registry_url

URL = 'postgresql://dipaco:secret@first/dipaco'
MISSPELT = [
  'postgresql:/dipaco:secret@first/d', 'postgresql:///dipaco:secret@first/d', 'dipaco:secret@h', 'postgres://u:secret@h',
  'postgresql://u:a@secret@h/d', 'postgresql://u:a@b#secret@h:port/d', 'postgresql://u:secret/d',
  'mysql://u:secret@h/d', 'postgresql://u:secret@h:port/d', 'postgresql://h:port/d?password=secret',
]  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
  monkeypatch.delenv(registry_url.VARIABLE, raising=False)


@pytest.mark.parametrize('name', ['a?b', 'a%41'])
def test_a_folder_whose_name_changes_in_a_url_is_rejected(name, tmp_path):
  with pytest.raises(InputError, match='no registry can be in a folder whose path contains'):
    registry_url.in_folder(tmp_path / name)
  assert registry_url.in_folder(tmp_path / 'a b#c@d').endswith('/a b#c@d/registry.db')


def test_an_option_goes_before_the_environment_and_either_may_be_a_file(monkeypatch, tmp_path, caplog):
  (tmp_path / 'url').write_text(f'{URL}\n')
  assert registry_url.given(None) == ''
  assert registry_url.given(f'file:{tmp_path}/url') == URL
  monkeypatch.setenv(registry_url.VARIABLE, f'file:{tmp_path}/url')
  assert registry_url.given(None) == URL and registry_url.given('sqlite:////x.db') == 'sqlite:////x.db'
  assert not caplog.text
  assert registry_url.given(URL) == URL
  assert 'can read the password in --registry' in caplog.text and 'secret' not in caplog.text


@pytest.mark.parametrize(
  'content, words', [(None, 'No such file'), (b'', 'one line'), (b'a\nb', 'one line'), (b'\xff', 'UTF-8')]
)
def test_a_file_without_a_url_is_rejected(tmp_path, content, words):
  if content is not None:
    (tmp_path / 'url').write_bytes(content)
  with pytest.raises(ValueError, match=words):
    registry_url.given(f'file:{tmp_path}/url')


@pytest.mark.parametrize('url', MISSPELT)
def test_no_message_has_the_password(url, monkeypatch, capsys):
  monkeypatch.setattr(logging.root, 'handlers', [])
  monkeypatch.setattr(logging.root, 'level', logging.WARNING)
  command.quiet()
  logging.warning('%s cannot be reached', url)
  for words in (f'{url!r} is not an option', f'--registri={url}'):
    with pytest.raises(SystemExit):
      command.fail(words)
  said = capsys.readouterr().err
  assert said.count('***') >= 3 and 'secret' not in said
  with pytest.raises(ValueError, match=r'the registry .*cannot be used') as refused:
    database.connect(url)
  assert 'secret' not in str(refused.value)


@pytest.mark.parametrize(
  'words',
  ['at 12:30 by me@x', 'http://127.0.0.1:80/v1', 'http://[::1]:80/v1', 's3://b/a@b', 'x://USER:PASSWORD@HOST/y'],
)
def test_what_is_no_password_stays_in_messages(words):
  assert printable.redacted(words) == words


def test_redacting_takes_linear_time():
  assert printable.redacted('a:' * 50_000) == 'a:' * 50_000


def test_local_tells_its_roles_by_the_environment(monkeypatch, tmp_path, capsys):
  told = []

  def supervise(running, facts, resumed):
    for role in running:
      process = pathlib.Path(f'/proc/{role.process.pid}')
      wait_for(lambda process=process: b'--role=' in (process / 'cmdline').read_bytes())
      told.append([(process / name).read_bytes().decode() for name in ('cmdline', 'environ')])
    return 0

  monkeypatch.setattr(supervision, 'supervise', supervise)
  monkeypatch.setattr(local, 'check', lambda options, rest: registry_url.given(options.registry))  # nor such a config
  monkeypatch.setattr(registry, 'Registry', lambda *args: None)  # there is no such database
  monkeypatch.setattr(roles, 'resume', lambda *args: 0)
  monkeypatch.setenv(registry_url.VARIABLE, URL)
  monkeypatch.setattr(sys, 'argv', ['local.py', '--config=no.py', f'--workdir={tmp_path}'])
  before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  assert local.main() == 0
  for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
    signal.signal(number, handler)
  assert len(told) == 5
  for line, environment in told:
    assert 'secret' not in line and f'{registry_url.VARIABLE}={URL}' in environment.split('\0')
  monkeypatch.setattr(sys, 'argv', ['local.py', '--config=no.py', f'--workdir={tmp_path}', f'--registri={URL}'])
  with pytest.raises(SystemExit):
    local.main()
  assert 'secret' not in capsys.readouterr().err


def wait_for(what):
  until = time.monotonic() + 60
  while not what():
    assert time.monotonic() < until
    time.sleep(0.01)
