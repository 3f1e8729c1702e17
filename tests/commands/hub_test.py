"""The command `hub`: its address, its tokens, one line for what is wrong; and workers that only prepare."""

import argparse
import contextlib
import re
import socket
import sys

import one_process
import pytest
from repository import ROOT

from dipaco_jax import hub
from dipaco_jax.command_line import supervision
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.config.owners import Members
from dipaco_jax.core.errors import InputError
from dipaco_jax.gateway import tokens as tokens_lib
from dipaco_jax.islands import members, roles
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact

made = one_process.made
OPTIONS = argparse.Namespace(address='', port=8443, host='127.0.0.1', days=1.0, new_tokens=False, workers=0)
OWNERS = {'grid': {'owner': ('clinic', 'court'), 'topic': 2}, 'routing': {'method': 'owner'}}
TEXT = {'own_text': True, 'train': ('t.txt',), 'validation': ('v.txt',)}


def options(**changes) -> argparse.Namespace:
  return argparse.Namespace(**(vars(OPTIONS) | changes))


def settings(**sections) -> settings_lib.Settings:
  values = settings_lib.Settings().to_dict()
  for section, changes in sections.items():
    values[section] = changes if section == 'grid' else values[section] | changes
  values['levels'] = (('all', '.*', ()),)
  return settings_lib.from_dict(values)


OWN_TEXT = settings(data=TEXT, **OWNERS)


def make_hub(folder, run: settings_lib.Settings, **changes) -> hub.Hub:
  return hub.Hub(options(**changes), [], run, folder, f'sqlite:///{folder}/registry.db')


def listed(of: hub.Hub) -> dict[str, tokens_lib.Token]:
  tokens = tokens_lib.Tokens(of.url)
  try:
    return {token.name: token for token, _ in tokens.list()}
  finally:
    tokens.close()


def test_a_token_for_all_paths_is_made_once_and_again_if_asked_for(tmp_path):
  [(owner, token)] = hub.make_tokens(make_hub(tmp_path, settings()), Members(), again=False)
  assert owner == '' and token.encode() not in (tmp_path / 'registry.db').read_bytes()
  assert hub.make_tokens(make_hub(tmp_path, settings()), Members(), again=False) == []
  [(_, another)] = hub.make_tokens(make_hub(tmp_path, settings()), Members(), again=True)
  tokens = listed(make_hub(tmp_path, settings()))
  assert another != token and list(tokens) == ['joined', 'joined-2'] and tokens['joined'].paths is None


def test_each_owner_has_a_token_for_its_paths(tmp_path):
  of_owners = make_hub(tmp_path, settings(**OWNERS))
  assert [owner for owner, _ in hub.make_tokens(of_owners, Members(), again=False)] == ['clinic', 'court']
  assert {name: token.paths for name, token in listed(of_owners).items()} == {'clinic': (0, 1), 'court': (2, 3)}


def test_a_line_is_printed_for_each_token_and_says_whose_it_is(tmp_path, capsys):
  made_hub = make_hub(tmp_path, settings())
  hub.print_lines(made_hub, 'https://127.0.0.1:8443#sha256=ab', [('clinic', 'one'), ('court', 'two')])
  out, err = capsys.readouterr()
  line = "python -m dipaco_jax.join 'https://127.0.0.1:8443#sha256=ab' --token="
  assert out == f'{line}one\n{line}two\n' and "on court's machines" in err
  assert 'https://127.0.0.1:8443 leads to this machine alone: set --address' in err and 'two' not in err
  own = make_hub(tmp_path, OWN_TEXT)
  hub.print_lines(own, 'https://192.0.2.7:8443#sha256=ab', [('court', 'two')])
  assert capsys.readouterr().out.endswith("--token=two --data='TEXT/*.txt' --store=DIR\n")
  hub.print_lines(made_hub, 'https://192.0.2.7:8443#sha256=ab', [])
  out, err = capsys.readouterr()
  assert not out and '--new_tokens' in err and 'alone' not in err


def test_an_owner_that_joins_has_a_line_of_its_own_once_and_one_that_has_left_has_none(tmp_path, capsys):
  of_owners = make_hub(tmp_path, OWN_TEXT)
  with contextlib.closing(registry.Registry(of_owners.url)) as facts:
    newcomers = hub.Newcomers(of_owners, facts, 'https://192.0.2.7:8443#sha256=ab')
    hub.make_tokens(of_owners, Members(), again=False)
    assert not newcomers.greet()
    facts.put([Fact(members.JOINED, '', i, '', '', {'owner': name}) for i, name in enumerate(['press', 'bank'])])
    facts.put([Fact(members.LEFT, 'bank', 0, '', '', {'until': {'6': 0, '7': 0}})])
    assert newcomers.greet() and not newcomers.greet()
    out, err = capsys.readouterr()
    assert out.count('dipaco_jax.join') == 1 and "on press's machines" in err
    assert listed(of_owners)['press'].paths == (4, 5) and 'bank' not in listed(of_owners)
    assert hub.make_tokens(of_owners, members.read(facts), again=False) == [], 'a hub that is started again'


@pytest.mark.parametrize(
  'given, url',
  [
    ('192.168.1.5', 'https://192.168.1.5:8443'),
    ('home.example.com:443', 'https://home.example.com:443'),
    ('2001:db8::7', 'https://[2001:db8::7]:8443'),
    ('[2001:db8::7]:9', 'https://[2001:db8::7]:9'),
  ],
)
def test_an_address_may_have_a_port_of_its_own(given, url):
  assert hub.own_url(options(address=given)) == url


@pytest.mark.parametrize('given', ['https://home', 'a b/c', 'home:port', 'me@home'])
def test_what_is_no_address_is_an_error(given):
  with pytest.raises(InputError, match=f'--address={given}: give the name or the address of this machine'):
    hub.own_url(options(address=given))


def test_the_address_is_that_of_a_route_or_else_the_name(monkeypatch):
  assert hub.own_url(OPTIONS).endswith(':8443')

  def is_without_route(*args):
    raise OSError('Network is unreachable')

  monkeypatch.setattr(hub.socket, 'socket', is_without_route)
  assert hub.find_address() == socket.gethostname()


def test_a_port_in_use_is_an_error_before_any_work(tmp_path, monkeypatch, capsys):
  folder = tmp_path / 'run'
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    arguments = [f'--config={ROOT}/configs/tiny.py', f'--workdir={folder}', '--host=127.0.0.1', f'--port={port}']
    monkeypatch.setattr(sys, 'argv', ['hub.py', *arguments])
    monkeypatch.setattr(hub.command, 'quiet', lambda: None)
    assert hub.main() == 2
  error = capsys.readouterr().err
  assert error == (
    f'hub.py: --host=127.0.0.1 --port={port}: Address already in use; stop what listens there, or choose another '
    '--port\n'
  )
  assert not folder.exists()


@pytest.mark.parametrize(
  'run, words',
  [
    (settings(audit={'fraction': 0.5}), 'config.audit.fraction=0.5: machines that join audit nobody'),
    (settings(inner={'optimizer': 'own:adam'}), "config.inner.optimizer='own:adam': machines that join"),
  ],
)
def test_what_machines_that_join_cannot_do_is_an_error(run, words):
  with pytest.raises(InputError, match=words):
    hub.check_settings(run, 0)


def test_owners_audit_themselves_and_no_worker_of_the_hub_trains_on_their_text():
  run = settings(data=TEXT, audit={'fraction': 0.5}, **OWNERS)
  hub.check_settings(run, 0)
  with pytest.raises(InputError, match='--workers=1: the text of this run stays with its owners'):
    hub.check_settings(run, 1)


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['--port=0'], '--port=0: give a number from 1'),
    (['--workers=-1'], '--workers=-1: give 0 or more'),
    (['--days=0'], '--days=0.0: give a number above 0'),
    (['--registry=postgresql://me:secret@host/x'], '--registry=.*: there is no such option'),
  ],
)
def test_wrong_options_are_errors(arguments, words, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['hub.py', '--config=tiny', '--workdir=x', *arguments])
  with pytest.raises(SystemExit) as e:
    hub.parse_options()
  error = capsys.readouterr().err
  assert e.value.code == 2 and re.search(words, error) and 'secret' not in error


def test_a_process_that_gives_no_signs_of_life_is_not_killed_for_that(tmp_path):
  sleep = [sys.executable, '-c', 'import time; time.sleep(60)']
  running = [supervision.Role(f'role-{is_heard}', sleep, tmp_path, is_heard=is_heard) for is_heard in (False, True)]
  try:
    assert [bool(role.kill_stalled(float('inf'), 0.0)) for role in running] == [False, True]
  finally:
    supervision.stop(running)


def test_a_worker_that_only_prepares_claims_no_training(made, monkeypatch, tmp_path):
  claimed = []
  monkeypatch.setattr(roles, 'work', lambda process, claims, perform: claimed.extend(claims.kinds))
  process = roles.Process('worker', str(tmp_path), 30, only_prepares=True)
  roles.serve(made, process, Hosts(), tmp_path)
  assert claimed == ['prepare', 'reroute']
