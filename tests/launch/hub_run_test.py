"""A hub and machines that join it, as trees of processes: a run to its end, restarts, a slow line."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import hubs
import pytest
import repository
import tiny_run
from bandwidth_module import bandwidth

from dipaco_jax.registry import registry as registry_lib

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
  done = subprocess.run(
    [*command, '--workers=1'], env=hubs.environment(), capture_output=True, text=True, timeout=hubs.PATIENCE_S
  )
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


def check_end(process: subprocess.Popen) -> tuple[str, str]:
  """Waits for a machine that has joined to hear of the end of the run; returns what it printed."""
  out, err = process.communicate(timeout=hubs.PATIENCE_S)
  assert process.returncode == 0 and out.startswith('perplexity '), err
  return out, err


def test_a_machine_that_joins_ends_with_the_same_modules(config, undisturbed, tmp_path):
  with hubs.Hub(config, tmp_path / 'run', PHASES) as hub:
    address, token = hub.start()
    with hubs.joined(address, token) as process:
      out, err = check_end(process)
    assert out.splitlines()[0] in hub.finish()
  assert modules(tmp_path / 'run') == undisturbed
  assert token not in err and token not in (tmp_path / 'hub.log').read_text()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_a_hub_that_is_restarted_has_the_same_address_and_tokens(number, config, undisturbed, tmp_path):
  with hubs.Hub(config, tmp_path / 'run', PHASES) as hub, hubs.joined(*hub.start()) as process:
    wait_for_a_checkpoint(tmp_path / 'run')
    hub.process.send_signal(number)
    hub.finish(-number if number == signal.SIGKILL else 128 + number)
    time.sleep(5)
    hub.restart()
    _, err = check_end(process)
    hub.finish()
  assert 'does not answer' in err
  assert modules(tmp_path / 'run') == undisturbed
  assert 'with the tokens that they have' in (tmp_path / 'hub.log').read_text()


def test_tasks_of_a_machine_that_leaves_go_to_another(config, undisturbed, tmp_path):
  with hubs.Hub(config, tmp_path / 'run', PHASES) as hub:
    line = hub.start()
    with hubs.joined(*line) as process:
      wait_for_a_checkpoint(tmp_path / 'run')
      process.send_signal(signal.SIGINT)
      _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith('run the same command to join again\n')
    with hubs.joined(*line) as process:
      check_end(process)
    hub.finish()
  assert modules(tmp_path / 'run') == undisturbed


def test_a_machine_joins_over_a_slow_line(config, undisturbed, tmp_path):
  if words := bandwidth.missing():
    pytest.skip(words)
  with bandwidth.Lines(1) as lines, contextlib.ExitStack() as stack:
    lines.limit(20)
    near, far = (['ip', 'netns', 'exec', name] for name in (lines.hub, lines.names[0]))
    hub = stack.enter_context(hubs.Hub(config, tmp_path / 'run', PHASES, address='10.77.0.1', inside=near))
    address, token = hub.start()
    relay = subprocess.Popen([*far, sys.executable, RELAY, str(hub.port), f'10.77.0.1:{hub.port}', '50'])
    stack.callback(hubs.end, relay)
    here = address.replace('10.77.0.1', '127.0.0.1')  # of the relay, which adds the time of a round trip
    check_end(stack.enter_context(hubs.joined(here, token, inside=far)))
    hub.finish()
  assert modules(tmp_path / 'run') == undisturbed
