"""All roles of an islands run on this machine, supervised: killed ones are started again.

    python launch/local.py --config=configs/tiny.py --workdir=runs/islands --workers=4

Ctrl-C stops all of them, with everything kept; the same command goes on. Flags that are not listed here, such as
--config.train.phases=8, are handed on to the roles.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time

from dipaco_jax import registry, roles, status_of_islands

PAUSE_S = 1.0
CLEANING_S = 30  # that the monitor has, after the end
FAILURES = 5  # within a minute, of one role: something is wrong that starting it again will not mend


class Role:
  """One supervised process."""

  def __init__(self, role: str, number: int, count: int, command: list[str], logs: pathlib.Path):
    self.name = f'{role}-{number}'
    self.command = [*command, f'--role={role}', f'--name={self.name}']
    self.command += [f'--share={number}/{count}'] if role == 'outer' else []
    self.log = logs / f'{self.name}.log'
    self.starts: list[float] = []
    self.process = self.start()

  def start(self) -> subprocess.Popen:
    self.starts = [t for t in self.starts if time.monotonic() - t < 60] + [time.monotonic()]
    with open(self.log, 'ab') as log:
      return subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

  def mend(self) -> str:
    """Starts it again where it died; says why it cannot."""
    status = self.process.poll()
    if status is None or status == 0:
      return ''
    if status == 2 or len(self.starts) > FAILURES:
      return f'{self.name} ended with status {status}: {last_line(self.log)} (all of it is in {self.log})'
    self.process = self.start()
    return ''


def last_line(file: pathlib.Path) -> str:
  lines = file.read_text(errors='replace').strip().splitlines()
  return lines[-1] if lines else ''


def parse() -> tuple[argparse.Namespace, list[str]]:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', required=True, help='as for dipaco_jax.main')
  parser.add_argument('--workdir', required=True, help='a folder, s3://BUCKET/... or gs://BUCKET/...')
  parser.add_argument('--registry', help='postgresql://... or sqlite:////FILE; by default a file in the workdir')
  parser.add_argument('--workers', type=int, default=2, help='processes that train (2)')
  parser.add_argument('--outers', type=int, default=1, help='processes that make outer steps (1)')
  parser.add_argument('--evaluators', type=int, default=1, help='processes that evaluate (1)')
  options, rest = parser.parse_known_args()
  for name in ('workers', 'outers', 'evaluators'):
    if getattr(options, name) < 1:
      parser.error(f'--{name}={getattr(options, name)}: give 1 or more')
  if unknown := [flag for flag in rest if not flag.startswith(('--config.', '--lease_s'))]:
    parser.error(f'{unknown[0]}: there is no such option')
  return options, rest


def main() -> int:
  options, rest = parse()
  local = roles.local_place(options.workdir)
  logs = local / 'logs'
  logs.mkdir(parents=True, exist_ok=True)
  url = options.registry or roles.registry_url(local)
  command = [sys.executable, '-m', 'dipaco_jax.main', f'--config={options.config}', f'--workdir={options.workdir}']
  command += [f'--registry={url}', *rest]
  stopping = []
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, frame: stopping.append(n))
  counts = {'monitor': 1, 'outer': options.outers, 'evaluator': options.evaluators, 'worker': options.workers}
  running = [Role(role, i, count, command, logs) for role, count in counts.items() for i in range(count)]
  try:
    return supervise(running, registry.Registry(url), stopping)
  finally:
    stop(running)


def supervise(running: list[Role], facts: registry.Registry, stopping: list[int]) -> int:
  """Until the run is finished, or somebody stops it."""
  screen = status_of_islands.Screen(sys.stderr)
  while not stopping:
    if trouble := next(filter(None, (role.mend() for role in running)), ''):
      print(f'local.py: {trouble}', file=sys.stderr)
      return 1
    screen.show(status_of_islands.lines(facts))
    if found := facts.facts('finished'):
      screen.close()
      perplexity = found[0].meta['perplexity']
      print('training diverged' if perplexity is None else f'perplexity {perplexity:.2f}', flush=True)
      wait([role for role in running if role.name.startswith('monitor')], CLEANING_S)  # what nobody needs goes
      return 2 if perplexity is None else 0  # as main
    time.sleep(PAUSE_S)
  screen.close()
  print('local.py: stopped; the same command goes on from here', file=sys.stderr)
  return 128 + stopping[0]


def stop(running: list[Role]):
  """SIGTERM to all: each hands back its task. SIGKILL to those that do not go."""
  for role in running:
    if role.process.poll() is None:
      os.killpg(role.process.pid, signal.SIGTERM)
  for role in wait(running, 10):
    os.killpg(role.process.pid, signal.SIGKILL)


def wait(running: list[Role], seconds: float) -> list[Role]:
  """Until these have ended; returns those that have not."""
  deadline, left = time.monotonic() + seconds, []
  for role in running:
    try:
      role.process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      left.append(role)
  return left


if __name__ == '__main__':
  sys.exit(main())
