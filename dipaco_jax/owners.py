"""Adds owners to an islands run while it trains and removes them; suspends workers; lists both; compares for an owner.

    python -m dipaco_jax.owners --workdir=DIR add OWNER                    OWNER may join from now on
    python -m dipaco_jax.owners --workdir=DIR remove OWNER                 OWNER takes part in nothing from now on
    python -m dipaco_jax.owners --workdir=DIR suspend NAME --why=REASON    nothing of NAME counts any longer
    python -m dipaco_jax.owners --workdir=DIR resume NAME                  NAME may work again
    python -m dipaco_jax.owners --workdir=DIR list                         owners; suspended workers

Owners join and leave runs whose text stays with its owners (docs/owners.md); all processes of the run notice it.
NAME is that of a worker's process, as the status of the run shows it. A suspended worker ends with exit status 2 at its
next claim or heartbeat, also after a restart under the same name. Its contributions that are not part of a version of
a module yet are left out; versions that contain its contributions stay. DIR is the workdir of the run, a folder, s3://
or gs://. `compare` is for an owner, after the end of the run: it trains a model on the owner's text alone and reads
the owner's STORE only; the same command continues one that was stopped. Exit status: 0 done; 2 wrong input; 65 training
diverged; 75 the database does not answer; 130 after Ctrl-C.
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
from dipaco_jax.core.errors import Diverged, InputError
from dipaco_jax.processes import display, stopping
from dipaco_jax.registry.__main__ import find_url
from dipaco_jax.storage import user_modules

ACTIONS = 'add', 'remove', 'suspend', 'resume', 'list', 'compare'
ALONE = 'list', 'compare'  # without a name
OF_KEEPER = 'workdir', 'registry', 'why', 'unknown'  # options of all other actions than `compare`
OF_OWNER = 'store', 'trust_modules'  # options of `compare`
PATIENCE_S = 5.0


def add(facts: Any, owner: str) -> list[str]:
  """Adds an owner. Raises InputError if that is not possible."""
  from dipaco_jax.islands import members

  if not owner.isidentifier():
    raise InputError(f'{owner!r} is no name of an owner: use letters, digits and _, and no digit first')
  members.add(open_island(facts), owner)
  return [
    f'{owner} may join: a hub prints its line now; without one, its worker starts with --owner={owner} --data=GLOB '
    '--store=PLACE, or with a token of a gateway (docs/owners.md)'
  ]


def remove(facts: Any, owner: str) -> list[str]:
  """Removes an owner. Raises InputError if that is not possible."""
  from dipaco_jax.islands import members

  island = open_island(facts)
  members.remove(island, owner)
  return [
    members.describe(members.grow(island), owner),
    f'modules that only {owner} has are removed from the workdir; shared modules keep what they have learned',
  ]


def open_island(facts: Any) -> Any:
  """Returns a process of the run of a registry. Raises InputError if no run has begun in it."""
  import jax

  from dipaco_jax.config import settings
  from dipaco_jax.islands import members
  from dipaco_jax.pipeline import run
  from dipaco_jax.storage import object_store

  jax.config.update('jax_platforms', 'cpu')  # accelerators are for the roles
  for config in facts.facts('config'):
    own_run = run.unattended(pathlib.Path(os.devnull), settings.of_run(config.meta['config']))
    return members.make_island(own_run, facts, object_store.open_storage(os.devnull), 'owners')
  raise InputError('no run has begun in this registry: name that of a run')


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
  """Returns lines on owners, audits, suspended workers, and what these contributed since their last good audits."""
  from dipaco_jax.islands import audit_history, members, owner_facts
  from dipaco_jax.reports import audit_lines

  if not facts.facts('config'):
    return ['no worker is suspended']
  here = open_island(facts)
  audits = audit_lines.in_words(audit_history.figures(here))
  lines = [*(members.describe(here, owner) for owner in owner_facts.names(here)), *audits]
  return lines if any(line.startswith('suspended') for line in audits) else [*lines, 'no worker is suspended']


def compare(store: str) -> list[str]:
  """Compares an owner's paths with models of its text alone; returns lines. Raises InputError or Diverged."""
  command.quiet()
  display.STDERR.only_terminal = False  # it takes as long as the run has taken
  with display.doing('loading JAX', tells=False):
    from dipaco_jax.islands import owner_comparison
    from dipaco_jax.reports import worth_page
    from dipaco_jax.training import compilation_cache
  user_modules.trust(flags.FLAGS.trust_modules)
  command.check_devices()
  compilation_cache.keep()
  with stopping.listening() as signals:
    try:
      report = owner_comparison.compare(store, signals)
    except KeyboardInterrupt:
      stopping.say('stopped; run the same command to continue')
      signals.leave()
    except Diverged as e:
      command.fail(f'{e}; alone there is no model to compare with', command.DIVERGED)
  return [*worth_page.in_words(report), f'{store.rstrip("/")}/{owner_comparison.PAGE}']


def check_words(words: list[str]) -> tuple[str, str]:
  """Returns the action and the name that the command line gives. Raises InputError."""
  action, *names = words or ['']
  if action not in ACTIONS:
    raise InputError(f'say what to do: one of {", ".join(ACTIONS)}, as --workdir={flags.FLAGS.workdir} list')
  if len(names) != (action not in ALONE):
    raise InputError(f'`{action}` takes no name' if action in ALONE else _name_missing(action))
  check_options(action)
  return action, names[0] if names else ''


def check_options(action: str):
  """Raises InputError if an option is missing, or is for other actions."""
  f, is_compare = flags.FLAGS, action == 'compare'
  if is_compare and not f.store:
    raise InputError("name the owner's store, as its worker has it: --store=DIR compare")
  if not is_compare and not f.workdir:
    raise InputError('name a run with --workdir=DIR')
  others = OF_KEEPER if is_compare else OF_OWNER
  if given := [name for name in others if f[name].present]:
    raise InputError(f'--{given[0]} is not for `{action}`: leave it out')


def _name_missing(action: str) -> str:
  return (
    f'name one owner, as `{action} court`'
    if action in ('add', 'remove')
    else f'name one worker, as `{action} worker-0`'
  )


def main(words: list[str]):
  action, name = check_words(words)
  lines = compare(flags.FLAGS.store) if action == 'compare' else act(action, name)
  print('\n'.join(map(printable.text, lines)))


def act(action: str, name: str) -> list[str]:
  """Does what the keeper asks for; returns lines. Raises InputError."""
  from dipaco_jax.registry import database, registry

  url = find_url(flags.FLAGS.workdir.rstrip('/') or '/', flags.FLAGS.registry)
  file = database.sqlite_file(url)
  if file and not file.exists():
    raise InputError(f'there is no registry {file}: name the --workdir or the --registry of an islands run')
  with contextlib.closing(registry.Registry(url, patience_s=PATIENCE_S, reads_only=action == 'list')) as facts:
    actions = {'add': add, 'remove': remove, 'suspend': suspend, 'resume': resume}
    return actions[action](facts, name) if name else describe(facts)


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
  flags.DEFINE_string('store', None, 'With compare: store of an owner, a folder, s3://BUCKET/... or gs://BUCKET/...')
  command.define_trust()
  given = [word for word in sys.argv[1:] if not word.startswith('-')]
  sys.argv[1:] = [word for word in sys.argv[1:] if word.startswith('-')]
  command.run(functools.partial(main, given))
