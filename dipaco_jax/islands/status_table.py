"""The live table of an islands run: each role's task, how far it is, and when it was last heard."""

import statistics
from typing import Any

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import dense_control, owners, settings
from dipaco_jax.core import printable
from dipaco_jax.islands import members, suspensions
from dipaco_jax.islands.island import OWN_TEXT
from dipaco_jax.processes.display import columns, duration
from dipaco_jax.registry import registry as registry_lib
from dipaco_jax.registry.fact_rows import WITHDRAWN

OWNERS, EXCLUDED, SUSPENDED, SHOWN = 'owners: ', 'excluded: ', 'suspended: ', 5
RECENT = 64  # tasks by which time is estimated
KINDS = (
  'prepare',
  OWN_TEXT,
  'train',
  'piece',
  'ship',
  'judge',
  'outer',
  'evaluate',
  'reroute',
  'audit',
  'confirm',
  'finish',
)


def lines(registry: registry_lib.Registry) -> list[str]:
  """Makes a line for the run, one for each role, and those for what went wrong."""
  counts, roles = registry.counts(), registry.roles()
  done = [f'{kind} {n.get("done", 0)} of {sum(n.values())}' for kind in KINDS if (n := counts.get(kind))]
  rows: list[tuple[str, ...]] = [('', 'task', 'step', 'tokens/s', 'tasks done', 'last heard')]
  names = [role['name'] for role in roles]
  rows += [tuple(map(printable.name, row(role, names.count(role['name']) > 1))) for role in roles]
  stuck = [printable.text(f'stuck: {why}') for role in roles if is_alive(role) and (why := role['about'].get('stuck'))]
  so_far = 'tasks so far: ' + (', '.join(done) or 'none')
  legend = [registry_lib.TASK_NAMES] if any(role['about'].get('task') for role in roles) else []
  return [so_far, *owners_so_far(registry), *columns(rows), *legend, *stuck, *map(printable.text, failures(registry))]


def owners_so_far(registry: registry_lib.Registry) -> list[str]:
  """Returns a line on how far each owner is whose text stays with it, or none."""
  configs = registry.facts('config') if registry.facts('prepared') else []
  begun = [settings.of_run(config.meta['config']) for config in configs]
  if not begun or not begun[0].data.own_text:
    return []
  known = members.read(registry)
  grid = Grid(owners.join(begun[0], known.joined).grid)
  texts, newest = {fact.key for fact in registry.facts(OWN_TEXT)}, registry.newest('checkpoint')
  states = []
  for owner in owners.names(grid):
    done = min(newest.get(str(path), -1) + 1 for path in owners.paths_of(grid, owner))
    state = f'phase {done} of {begun[0].train.phases}' if owner in texts else 'has not read its text'
    states.append(f'{owner} {"has left" if owner in known.left else state}')
  return [printable.text(OWNERS + ', '.join(states))]


def is_alive(role: dict[str, Any]) -> bool:
  """Returns whether a role was heard a short while ago, and has not said that it ends."""
  return role['silent_s'] < registry_lib.SILENT_S and not role['about'].get(registry_lib.STOPPED)


def describe_stop(registry: registry_lib.Registry) -> list[str]:
  """Returns a line about a run on which no process works, or none."""
  roles = registry.roles()
  if any(map(is_alive, roles)):
    return []
  heard = f' (last heard {duration(min(role["silent_s"] for role in roles))} ago)' if roles else ''
  return [f'no process works on this run{heard}: start its roles, or `python -m dipaco_jax.local`, to continue it']


def time_left(registry: registry_lib.Registry, s: settings.Settings) -> list[str]:
  """Returns a line that estimates the remaining training time from the newest tasks and running workers, or none."""
  counts, seconds = registry.counts().get('train', {}), registry.durations('train', RECENT)
  workers = sum(task['lease_left_s'] >= 0 for task in registry.tasks('running', 'train'))
  left = dense_control.count_path_phases(s) - counts.get('done', 0)
  if not seconds or not workers or left <= 0:
    return []
  to_go = duration(left * statistics.fmean(seconds) / workers)
  return [f'about {to_go} of training to go ({left:,} phases of paths, {workers:,} at a time)']


def failures(registry: registry_lib.Registry) -> list[str]:
  """Says which paths took no part in outer steps, who is suspended, what was withdrawn, and why the run diverged."""
  messages = [
    f'{EXCLUDED}phase {f.number + 1}, step {f.meta["step"]}: path {f.key}, trained by {f.meta["worker"]}, '
    f'took no part: {f.meta["why"]}'
    for f in registry.facts('excluded')[-SHOWN:]
  ]
  suspended = suspensions.current(registry)
  messages += [f'{SUSPENDED}{name}, by {fact.meta["by"]}: {fact.meta["why"]}' for name, fact in suspended.items()]
  messages += [
    f'{WITHDRAWN} {fact.key.rpartition(" ")[0]} {fact.number}, by {fact.meta["by"]}: {fact.meta["why"]}'
    for fact in registry.facts(WITHDRAWN)[-SHOWN:]
  ]
  ended, resumed = registry.facts('diverged', ['']), registry.facts('diverged', [registry_lib.RESUMED])
  return messages + [fact.meta['why'] for fact in ended[len(resumed) :]]


def row(role: dict[str, Any], names_role: bool) -> tuple[str, ...]:
  """Makes a role's cells; with `names_role`, the first tells it from another role of the same name."""
  about = role['about']
  name = role['name'] + (f' ({role["role"]})' if names_role else '')
  done, heard = str(about.get('tasks_done', '')), f'{duration(role["silent_s"])} ago'
  if not is_alive(role):
    return name, describe_end(about), '', '', done, heard
  step = f'{about["step"]}/{about["of"]}' if 'step' in about else ''
  rate = f'{about["tokens_per_s"]:,.0f}' if about.get('tokens_per_s') else ''
  task = about.get('task') or 'idle'
  if 'replay' in about:
    phase, first, last = about['replay']
    task += f' (first phase {phase} again, of {first} to {last})'
  if 'stage' in about:
    left = f', {duration(about["left_s"])} left' if 'left_s' in about else ''
    task += f' ({about["stage"]}{left})'
  return name, task, step, rate, done, heard


def describe_end(about: dict[str, Any]) -> str:
  """Says that a role has ended, or is killed, frozen or disconnected, and names its last task."""
  during = f' during {about["task"]}' if about.get('task') else ''
  return 'stopped' if about.get(registry_lib.STOPPED) else f'gone{during}'
