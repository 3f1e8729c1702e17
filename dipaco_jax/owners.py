"""Suspends workers of an islands run, ends suspensions, and lists them.

    python -m dipaco_jax.owners --workdir=DIR suspend NAME --why=REASON    nothing of NAME counts any longer
    python -m dipaco_jax.owners --workdir=DIR resume NAME                  NAME may work again
    python -m dipaco_jax.owners --workdir=DIR list                         suspended workers, and what they contributed

NAME is that of a worker's process, as the status of the run shows it. A suspended worker ends with exit status 2 at its
next claim or heartbeat, also after a restart under the same name. Its contributions that are not part of a version of
a module yet are left out; versions that contain its contributions stay. DIR is the workdir of the run, a folder, s3://
or gs://. Exit status: 0 done; 2 wrong input; 75 the database does not answer.
"""

import contextlib
import functools
import os
import pathlib
import sys
from typing import Any

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.registry.__main__ import find_url

ACTIONS = 'suspend', 'resume', 'list'
PATIENCE_S = 5.0


def suspend(facts: Any, name: str) -> list[str]:
  """Suspends a worker. Raises InputError if it is unknown or suspended already."""
  from dipaco_jax.islands import suspensions

  why = flags.FLAGS.why
  if not why:
    raise InputError(f'say why {name} is suspended: --why=REASON; logs and the report of the run show it')
  known = sorted({role['name'] for role in facts.roles() if role['role'] == 'worker'})
  if name not in known and not flags.FLAGS.unknown:
    advice = f'the workers are {", ".join(known) or "none so far"}; --unknown suspends a name in advance'
    raise InputError(f'{name!r} is no worker of this run: {advice}')
  if not suspensions.suspend(facts, name, printable.text(why), suspensions.BY_HAND):
    raise InputError(f'{name!r} is suspended already: `list` shows why')
  return [f'{name} is suspended: {printable.text(why)}']


def resume(facts: Any, name: str) -> list[str]:
  """Ends the suspension of a worker. Raises InputError if it is not suspended."""
  from dipaco_jax.islands import suspensions

  if not suspensions.resume(facts, name):
    suspended = ', '.join(suspensions.current(facts)) or 'nobody'
    raise InputError(f'{name!r} is not suspended; suspended: {suspended}')
  return [f'{name} may work again: start its process']


def describe(facts: Any) -> list[str]:
  """Returns lines on audits, suspended workers, and what these have contributed since their last good audits."""
  import jax

  from dipaco_jax.config import settings
  from dipaco_jax.islands import audit_history, island
  from dipaco_jax.pipeline import run
  from dipaco_jax.reports import audit_lines
  from dipaco_jax.storage import object_store

  jax.config.update('jax_platforms', 'cpu')  # accelerators are for the roles
  lines: list[str] = []
  for config in facts.facts('config'):
    own_run = run.unattended(pathlib.Path(os.devnull), settings.of_run(config.meta['config']))
    here = island.Island(own_run, facts, object_store.open_storage(os.devnull), 'owners')
    lines += audit_lines.in_words(audit_history.figures(here))
  return lines if any(line.startswith('suspended') for line in lines) else [*lines, 'no worker is suspended']


def check_words(words: list[str]) -> tuple[str, str]:
  """Returns the action and the name that the command line gives. Raises InputError."""
  action, *names = words or ['']
  if action not in ACTIONS:
    raise InputError(f'say what to do: one of {", ".join(ACTIONS)}, as --workdir={flags.FLAGS.workdir} list')
  if len(names) != (action != 'list'):
    raise InputError('`list` takes no name' if action == 'list' else f'name one worker, as `{action} worker-0`')
  return action, names[0] if names else ''


def main(words: list[str]):
  from dipaco_jax.registry import database, registry

  if not flags.FLAGS.workdir:
    raise InputError('name a run with --workdir=DIR')
  action, name = check_words(words)
  url = find_url(flags.FLAGS.workdir.rstrip('/') or '/', flags.FLAGS.registry)
  file = database.sqlite_file(url)
  if file and not file.exists():
    raise InputError(f'there is no registry {file}: name the --workdir or the --registry of an islands run')
  with contextlib.closing(registry.Registry(url, patience_s=PATIENCE_S, reads_only=action == 'list')) as facts:
    lines = {'suspend': suspend, 'resume': resume}[action](facts, name) if name else describe(facts)
  print('\n'.join(map(printable.text, lines)))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_string(
    'registry',
    None,
    'Registry: postgresql://..., sqlite:////FILE or file:PATH. By default, DIPACO_REGISTRY or else '
    'registry.db in the workdir.',
  )
  flags.DEFINE_string('why', '', 'Reason of a suspension, for logs and the report.')
  flags.DEFINE_bool('unknown', False, 'Whether to suspend a name that no worker of the run has had so far.')
  given = [word for word in sys.argv[1:] if not word.startswith('-')]
  sys.argv[1:] = [word for word in sys.argv[1:] if word.startswith('-')]
  command.run(functools.partial(main, given))
