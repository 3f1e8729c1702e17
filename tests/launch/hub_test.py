"""A hub and machines that join it, as trees of processes: a run to its end, restarts, a slow line."""

import contextlib
import importlib.util
import pathlib
import signal
import subprocess
import sys
import time

import hubs
import pytest
import repository
import tiny_run

from dipaco_jax.registry import registry as registry_lib

SPEC = importlib.util.spec_from_file_location('bandwidth', repository.ROOT / 'benchmarks' / 'bandwidth.py')
bandwidth = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bandwidth)

RELAY = str(repository.ROOT / 'benchmarks' / 'relay.py')
PHASES = '--config.train.phases=2'
pytestmark = pytest.mark.slow  # the fewest processes of a run take half a minute of a core


def modules(workdir: pathlib.Path) -> str:
  """Digests of the last modules of a run."""
  return (workdir / 'modules' / '2' / 'SHA256SUMS').read_text()


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  return tiny_run.write_config(tmp_path_factory.mktemp('hub'), 120)


@pytest.fixture(scope='module')
def undisturbed(config, tmp_path_factory) -> str:
  """The modules of a run of which all processes have the registry and the workdir."""
  workdir = tmp_path_factory.mktemp('local') / 'run'
  command = [sys.executable, '-m', 'dipaco_jax.local', f'--config={config}', f'--workdir={workdir}', PHASES]
  done = subprocess.run([*command, '--workers=1'], env=hubs.environment(), capture_output=True, text=True, timeout=hubs.PATIENCE_S)
  assert done.returncode == 0, done.stderr
  return modules(workdir)


def wait_for_a_checkpoint(workdir: pathlib.Path):
  """Waits until a path has trained a phase."""
  registry = registry_lib.Registry(f'sqlite:///{workdir}/registry.db')
  with contextlib.closing(registry):
    until = time.monotonic() + hubs.PATIENCE_S
    while not registry.facts('checkpoint'):
      assert time.monotonic() < until
      time.sleep(0.1)


def test_a_machine_that_joins_ends_with_the_same_modules(config, undisturbed, tmp_path):
  hub = hubs.Hub(config, tmp_path / 'run', PHASES)
  address, token = hub.start()
  joined = hubs.join(address, token)
  out, err = joined.communicate(timeout=hubs.PATIENCE_S)
  assert joined.returncode == 0 and out.startswith('perplexity '), err
  assert out.splitlines()[0] in hub.finish()
  assert modules(tmp_path / 'run') == undisturbed
  assert 'token=' not in err and token not in (tmp_path / 'hub.log').read_text()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_a_hub_that_is_restarted_has_the_same_address_and_tokens(number, config, undisturbed, tmp_path):
  hub = hubs.Hub(config, tmp_path / 'run', PHASES)
  address, token = hub.start()
  joined = hubs.join(address, token)
  wait_for_a_checkpoint(tmp_path / 'run')
  hub.process.send_signal(number)
  hub.finish(-number if number == signal.SIGKILL else 128 + number)
  time.sleep(3)
  hub.restart()
  out, err = joined.communicate(timeout=hubs.PATIENCE_S)
  assert joined.returncode == 0 and out.startswith('perplexity '), err
  assert 'does not answer' in err
  hub.finish()
  assert modules(tmp_path / 'run') == undisturbed
  assert 'with the tokens that they have' in (tmp_path / 'hub.log').read_text()


def test_tasks_of_a_machine_that_leaves_go_to_another(config, undisturbed, tmp_path):
  hub = hubs.Hub(config, tmp_path / 'run', PHASES)
  address, token = hub.start()
  first = hubs.join(address, token)
  wait_for_a_checkpoint(tmp_path / 'run')
  first.send_signal(signal.SIGINT)
  _, err = first.communicate(timeout=60)
  assert first.returncode == 130 and err.endswith('run the same command to join again\n')
  second = hubs.join(address, token)
  out, err = second.communicate(timeout=hubs.PATIENCE_S)
  assert second.returncode == 0 and out.startswith('perplexity '), err
  hub.finish()
  assert modules(tmp_path / 'run') == undisturbed


def test_a_machine_joins_over_a_slow_line(config, undisturbed, tmp_path):
  if words := bandwidth.missing():
    pytest.skip(words)
  with bandwidth.Lines(1) as lines, contextlib.ExitStack() as stack:
    lines.limit(20)
    near, far = (['ip', 'netns', 'exec', name] for name in (lines.hub, lines.names[0]))
    hub = hubs.Hub(config, tmp_path / 'run', PHASES, address='10.77.0.1', inside=near)
    address, token = hub.start()
    relay = [sys.executable, RELAY, str(hub.port), f'10.77.0.1:{hub.port}', '50']
    stack.callback(subprocess.Popen([*far, *relay]).kill)
    joined = hubs.join(address.replace('10.77.0.1', '127.0.0.1'), token, inside=far)
    out, err = joined.communicate(timeout=hubs.PATIENCE_S)
    assert joined.returncode == 0 and out.startswith('perplexity '), err
    hub.finish()
  assert modules(tmp_path / 'run') == undisturbed
