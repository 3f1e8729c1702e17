"""In gcloud's place: records every call; slices are folders, and ssh runs its line of shell in a home for each host.

In the folder $FAKE_CLOUD:
    calls             a JSON list for each call
    coming            states that a new request goes through, one at each look; the last one stays
    request           those that are left to it; no file: there is no request
    preempted         the slices are
    hosts/NODE-W/     home of host W of a slice
    host_bin/         programs that only hosts have
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

HOSTS = int(os.environ.get('FAKE_HOSTS', '2'))  # of a slice


def main(args: list[str]) -> int:
  folder = pathlib.Path(os.environ['FAKE_CLOUD'])
  with open(folder / 'calls', 'a') as f:
    f.write(json.dumps(args) + '\n')
  if args[:2] == ['config', 'get-value']:
    print('configured')
    return 0
  flags = dict(arg[2:].partition('=')[::2] for arg in args if arg.startswith('--'))
  what, verb, *words = [arg for arg in args if not arg.startswith('--')][2:]
  request = folder / 'request'
  if verb == 'create':
    return create(folder, words[0], flags)
  if not request.exists():
    print('ERROR: NOT_FOUND: Resource was not found', file=sys.stderr)
    return 1
  if verb == 'describe':
    print(describe(folder, what))
  elif verb == 'delete':
    request.unlink()
    (folder / 'preempted').unlink(missing_ok=True)
    shutil.rmtree(folder / 'hosts')
  elif (folder / 'preempted').exists():
    print('ERROR: TPU is in state "PREEMPTED"', file=sys.stderr)
    return 1
  elif verb == 'scp':
    for home in homes(folder):
      shutil.copy(words[0], home)
  else:
    return ssh(folder, flags['command'])
  return 0


def create(folder: pathlib.Path, name: str, flags: dict[str, str]) -> int:
  if (folder / 'request').exists():
    print('ERROR: ALREADY_EXISTS', file=sys.stderr)
    return 1
  shutil.copy(folder / 'coming', folder / 'request')
  slices = int(flags.get('node-count', 0))
  for node in [f'{name}-{i}' for i in range(slices)] or [name]:
    for worker in range(HOSTS):
      (folder / 'hosts' / f'{node}-{worker}').mkdir(parents=True)
  return 0


def describe(folder: pathlib.Path, what: str) -> str:
  """A request that is preempted may be called active for a while, when its nodes are gone."""
  if what == 'tpu-vm':
    return 'PREEMPTED' if (folder / 'preempted').exists() else 'READY'
  state, *rest = (folder / 'request').read_text().split()
  if rest:
    (folder / 'request').write_text(' '.join(rest))
  return state


def homes(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted((folder / 'hosts').iterdir())


def ssh(folder: pathlib.Path, command: str) -> int:
  """As gcloud: the status of the first host that fails."""
  path = f'{folder}/host_bin:{os.environ["PATH"]}'
  running = [
    subprocess.Popen(['bash', '-c', command], cwd=home, env=os.environ | {'HOME': str(home), 'PATH': path})
    for home in homes(folder)
  ]
  return next(filter(None, [process.wait() for process in running]), 0)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
