"""The facts with which a worker may complete a task: exactly those of the task, made again here from what it sent.

Of a fact's metadata, only entries that this table knows are kept, and those that readers need have to be there, with
their types: a fact that a reader cannot parse would stop the executor, the evaluator or the report. What names the
worker is set here. Whether the numbers are true is not known to anybody but the worker.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dipaco_jax.gateway import requests
from dipaco_jax.gateway.refusals import malformed
from dipaco_jax.gateway.requests import is_count, is_number_or_none, is_size, is_text
from dipaco_jax.islands import module_weights, own_levels, path_steps, pieces, schedule, screening_facts
from dipaco_jax.islands.island import OBJECTS, Island
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact, Task

Checks = Mapping[str, Callable[[Any], bool]]
MOST_FACTS = 10_000
COSTS = ('bytes_in', 'bytes_out', 'reading_s', 'writing_s')
SPENT = (*COSTS, 'seconds', 'until')


def is_rows(value: Any) -> bool:
  """Returns whether a value is rows of metrics: steps, loss, norm, learning rate, finite steps, skipped steps."""
  return isinstance(value, list) and len(value) <= 100_000 and all(map(is_row, value))


def is_row(value: Any) -> bool:
  return isinstance(value, list) and len(value) == 6 and is_count(value[0]) and all(map(is_number_or_none, value))


def is_moved(value: Any) -> bool:
  """Returns whether a value is lengths of outer gradients, by level."""
  return isinstance(value, dict) and all(is_text(x) for x in value) and all(map(is_number_or_none, value.values()))


def is_seconds(value: Any) -> bool:
  """Returns whether a value is seconds by cause."""
  return isinstance(value, dict) and {*value} <= {*time_use.CAUSES} and all(map(is_size, value.values()))


def is_replay(value: Any) -> bool:
  """Returns whether a value is what a replay notes."""
  if not isinstance(value, dict) or value.keys() != {'phases', 'seconds', 'differing'}:
    return False
  return requests.is_counts(value['phases']) and requests.is_counts(value['differing']) and is_size(value['seconds'])


NEEDED: Checks = {
  'rows': is_rows, 'timed_steps': is_count, 'timed_s': is_size, 'started': is_size, 'ended': is_size,
  'busy_s': is_size, 'from_step': is_count, 'holdout_loss': is_number_or_none, 'holder': requests.is_holder,
  'moved': is_moved,
}  # fmt: skip
OPTIONAL: Checks = {
  'excluded': lambda x: is_text(x) and bool(x), 'replay': is_replay, 'until': is_size, 'seconds': is_seconds,
  **dict.fromkeys(COSTS, is_size),
}  # fmt: skip
OF_MODULE: Checks = {
  'started': is_size, 'ended': is_size, 'usual': is_size, 'norm': is_size, 'paths': is_count,
  'square_of_sum': is_size, 'sum_of_squares': is_size,
  'left_out': lambda x: isinstance(x, dict) and len(x) == 1 and all(map(is_text, [*x, *x.values()])),
}  # fmt: skip

NEEDED_OF_MODULE = frozenset(['started', 'ended'])


def parse(given: Any) -> list[Fact]:
  """Returns facts from JSON. Raises Refused if they are not shaped as facts."""

  def is_fact(x: Any) -> bool:
    return (
      isinstance(x, list) and len(x) == 6 and is_text(x[0], 64) and is_text(x[1], 256) and is_count(x[2])
      and is_text(x[3], 500) and isinstance(x[4], str) and len(x[4]) <= 64 and isinstance(x[5], dict)
    )  # fmt: skip

  if not isinstance(given, list) or len(given) > MOST_FACTS or not all(map(is_fact, given)):
    raise malformed('facts should be a list of [kind, key, number, uri, sha256, metadata]')
  return [Fact(*fact) for fact in given]


def of_task(island: Island, task: Task, given: Sequence[Fact], worker: str) -> list[Fact]:
  """Returns the facts that complete a task, made from those that were sent. Raises Refused."""
  if task.kind == 'ship':
    if given:
      raise malformed('the task ship has no facts')
    return []
  path, part = int(task.key), pieces.part_of(island, task)
  sent = _by_kind(given, task, pieces.fact_name(island, part)[0], part.phase)
  [checkpoint] = sent['training']
  own_modules = [_own_module(island, fact, part.phase, worker) for fact in sent['module']]
  _check_own_modules(island, path, part, own_modules)
  about = metadata(checkpoint.meta, worker)
  if any(row[0] > island.timetable.tau for row in about['rows']):
    raise malformed('the rows of a fact have steps after the end of the phase')
  about |= _steps(island, path, part, checkpoint)
  objects = _objects(island, path, part, checkpoint)
  made = schedule.checkpoint_fact(path, task.number, objects, about, checkpoint.kind, own_modules)
  return [
    made,
    *_excluded(island, made, sent['excluded']),
    *own_modules,
    *_evaluations(island, part, sent),
  ]


def _steps(island: Island, path: int, part: pieces.Part, checkpoint: Fact) -> dict[str, Any]:
  """Returns what a checkpoint says about its steps, where phases are timed. Raises Refused unless they are possible."""
  if not path_steps.are_timed(island):
    return {}
  steps: Any = checkpoint.meta.get(path_steps.STEPS)
  is_pair = isinstance(steps, list) and len(steps) == 2 and all(map(is_count, steps))
  if not is_pair or not 1 <= steps[1] <= island.timetable.tau or steps[0] != path_steps.first(island, path, part.phase):
    raise malformed('a fact says other steps than its path can have taken')
  return {path_steps.STEPS: steps}


def _by_kind(given: Iterable[Fact], task: Task, kind: str, phase: int) -> dict[str, list[Fact]]:
  """Sorts the facts of a task of training. Raises Refused if one is of another task."""
  sent: dict[str, list[Fact]] = {'training': [], 'excluded': [], 'module': [], 'evaluation': []}
  for fact in given:
    if fact.kind == 'module' and fact.number == phase + 1:
      sent['module'].append(fact)
    elif fact[:3] == (kind, task.key, task.number):
      sent['training'].append(fact)
    elif fact.kind in ('excluded', 'evaluation') and fact[1:3] == (task.key, phase):
      sent[fact.kind].append(fact)
    else:
      raise malformed('a fact belongs to another task')
  if len(sent['training']) != 1 or len(sent['excluded']) > 1 or len(sent['evaluation']) > 1:
    raise malformed('a task of training is completed by one fact of each kind')
  return sent


def metadata(given: Mapping[str, Any], worker: str) -> dict[str, Any]:
  """Returns the metadata of a checkpoint or piece: what this table knows. Raises Refused."""
  for name, check in NEEDED.items():
    if name not in given or not check(given[name]):
      raise malformed(f'the entry {name!r} of a fact is missing or malformed')
  for name, check in OPTIONAL.items():
    if name in given and not check(given[name]):
      raise malformed(f'the entry {name!r} of a fact is malformed')
  about = {name: given[name] for name in (*NEEDED, *OPTIONAL) if name in given and name not in SPENT}
  return about | costs(given) | {'worker': worker}


def costs(given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a worker's process has spent, of metadata; {} unless all of it is there. Raises Refused."""
  for name in SPENT:
    if name in given and not OPTIONAL[name](given[name]):
      raise malformed(f'the entry {name!r} of a fact is malformed')
  is_noted = all(name in given for name in SPENT)
  return {name: given[name] for name in SPENT} | {'role': 'worker'} if is_noted else {}


def _objects(island: Island, path: int, part: pieces.Part, checkpoint: Fact) -> dict[str, list[str]]:
  """Returns the objects that a checkpoint or piece names. Raises Refused unless they are those of its task."""
  named = checkpoint.meta.get('objects')
  levels = {*pieces.piece(island, part).sent} - island.own_levels
  expected = set[str]() if 'excluded' in checkpoint.meta else levels
  if not isinstance(named, dict) or {*named} != expected:
    raise malformed('a fact should name one object of each level that is sent')
  suffix = f'.{checkpoint.number}' if checkpoint.kind == pieces.PIECE else ''
  for level, each in named.items():
    if not isinstance(each, list) or len(each) != 2 or not requests.is_sha256(each[1]):
      raise malformed('a fact names objects as [name, sha256]')
    if each[0] != f'{OBJECTS}/paths/{part.phase}/{path}{suffix}-{level}-{each[1][:16]}.safetensors':
      raise malformed('a fact names the object of another task')
  return {level: list(named[level]) for level in sorted(named)}


def _excluded(island: Island, checkpoint: Fact, sent: Sequence[Fact]) -> list[Fact]:
  """Returns the fact that a path takes no part, if its checkpoint says so."""
  if not sent and 'excluded' not in checkpoint.meta:
    return []
  if not sent or 'excluded' not in checkpoint.meta:
    raise malformed('a path that takes no part has a checkpoint and an exclusion that say so')
  return [screening_facts.exclusion(island, checkpoint, checkpoint.meta['excluded'])]


def _own_module(island: Island, fact: Fact, phase: int, worker: str) -> Fact:
  """Returns the fact of a module that stays with its path. Raises Refused."""
  about = {name: fact.meta[name] for name, check in OF_MODULE.items() if name in fact.meta and check(fact.meta[name])}
  if NEEDED_OF_MODULE - about.keys() or not requests.is_sha256(fact.sha256):
    raise malformed('the fact of a module is malformed')
  try:
    module_weights.check_name(fact, fact.uri)
  except OSError as e:
    raise malformed('the fact of a module names an object of another') from e
  if not fact.uri.endswith(f'-{fact.sha256[:16]}.safetensors'):
    raise malformed('the fact of a module has another sha256 than its object')
  is_new = fact.uri.startswith(f'{OBJECTS}/modules/{phase + 1}/')
  before = [] if is_new else island.registry.facts('module', [fact.key], phase)
  if not is_new and not any(each[3:5] == fact[3:5] for each in before):
    raise malformed('the fact of a module names neither a new object nor that of the version before')
  return fact._replace(meta=about | {'executor': worker})


def _check_own_modules(island: Island, path: int, part: pieces.Part, own_modules: Sequence[Fact]):
  """Raises Refused unless the facts are those of all modules that stay with a path, after the end of a phase."""
  expected = sorted(island.own_modules(path)) if pieces.is_last(island, part) else []
  if sorted(fact.key for fact in own_modules) != expected:
    raise malformed('a task is completed by the modules that stay with its path, and by no others')


def _evaluations(island: Island, part: pieces.Part, sent: Mapping[str, Sequence[Fact]]) -> list[Fact]:
  """Returns the evaluation of a path by its own modules. Raises Refused where none is due."""
  made = []
  for fact in sent['evaluation']:
    if not own_levels.evaluates(island, part):
      raise malformed('an evaluation is not due')
    made.append(evaluation(fact))
  return made


def evaluation(fact: Fact) -> Fact:
  """Returns the evaluation of a path, made again. Raises Refused."""
  loss: Any = fact.meta.get('loss')
  targets: Any = fact.meta.get('targets')
  if not is_size(targets) or not (is_number_or_none(loss) or loss == 'inf'):
    raise malformed('an evaluation is malformed')
  return own_levels.evaluation_fact(int(fact.key), fact.number, math.inf if loss == 'inf' else loss, targets)


def of_state(island: Island, fact: Fact, worker: str) -> Fact:
  """Returns the fact of a path's state, made again. Raises Refused unless its objects are those of its name."""
  objects: Any = fact.meta.get('objects')
  is_named = isinstance(objects, list) and 0 < len(objects) <= 100_000
  if not is_named or not requests.is_sha256(fact.meta.get('checkpoint')) or not requests.is_sha256(fact.sha256):
    raise malformed('the fact of a state is malformed')
  for i, each in enumerate(objects):
    if not isinstance(each, list) or len(each) != 2 or not requests.is_sha256(each[1]):
      raise malformed('the fact of a state names objects as [name, sha256]')
    if each[0] != f'{OBJECTS}/states/{fact.key}/{fact.number}-{i}-{each[1][:16]}.safetensors':
      raise malformed('the fact of a state names the object of another')
  about = {'worker': worker, 'checkpoint': fact.meta['checkpoint'], 'objects': objects}
  return fact._replace(uri='', meta=about)
