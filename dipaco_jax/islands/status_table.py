"""The live table of an islands run: each role's task, how far it is, and when it was last heard."""

import statistics
from typing import Any

from dipaco_jax.core import dense_control, printable, settings
from dipaco_jax.islands import registry as registry_lib
from dipaco_jax.training.display import columns, duration

EXCLUDED, SHOWN = 'excluded: ', 5
RECENT = 64  # tasks by which time is estimated
KINDS = ('prepare', 'train', 'piece', 'ship', 'outer', 'evaluate', 'reroute', 'finish')


def lines(registry: registry_lib.Registry) -> list[str]:
  """Makes a line for the run, one for each role, and those for what went wrong."""
  counts, roles = registry.counts(), registry.roles()
  done = [f'{kind} {n.get("done", 0)} of {sum(n.values())}' for kind in KINDS if (n := counts.get(kind))]
  rows: list[tuple[str, ...]] = [('', 'task', 'step', 'tokens/s', 'tasks done', 'last heard')]
  names = [role['name'] for role in roles]
  rows += [tuple(map(printable.name, row(role, names.count(role['name']) > 1))) for role in roles]
  stuck = [printable.text(f'stuck: {why}') for role in roles if (why := role['about'].get('stuck'))]
  so_far = 'tasks so far: ' + (', '.join(done) or 'none')
  return [so_far, *columns(rows), *stuck, *map(printable.text, failures(registry))]


def time_left(registry: registry_lib.Registry, s: settings.Settings) -> list[str]:
  """Returns a line on the time that training still takes, by the newest tasks and the workers at work; or none."""
  counts, seconds = registry.counts().get('train', {}), registry.durations('train', RECENT)
  left, workers = dense_control.count_path_phases(s) - counts.get('done', 0), counts.get('running', 0)
  if not seconds or not workers or left <= 0:
    return []
  to_go = duration(left * statistics.fmean(seconds) / workers)
  return [f'about {to_go} of training to go ({left:,} phases of paths, {workers:,} at a time)']


def failures(registry: registry_lib.Registry) -> list[str]:
  """Says which paths took no part in outer steps, the last of them, and why the run has diverged."""
  found = [
    f'{EXCLUDED}phase {f.number + 1}, step {f.meta["step"]}: path {f.key}, trained by {f.meta["worker"]}, '
    f'took no part: {f.meta["why"]}'
    for f in registry.facts('excluded')[-SHOWN:]
  ]
  ended, resumed = registry.facts('diverged', ['']), registry.facts('diverged', [registry_lib.RESUMED])
  return found + [fact.meta['why'] for fact in ended[len(resumed) :]]


def row(role: dict[str, Any], names_role: bool) -> tuple[str, ...]:
  """Makes a role's cells; with `names_role`, the first tells it from another role of the same name."""
  about = role['about']
  name = role['name'] + (f' ({role["role"]})' if names_role else '')
  step = f'{about["step"]}/{about["of"]}' if 'step' in about else ''
  rate = f'{about["tokens_per_s"]:,.0f}' if 'tokens_per_s' in about else ''
  done, heard = str(about.get('tasks_done', '')), f'{duration(role["silent_s"])} ago'
  task = about.get('task') or 'idle'
  if 'replay' in about:
    phase, first, last = about['replay']
    task += f' (first phase {phase} again, of {first} to {last})'
  return name, task, step, rate, done, heard
