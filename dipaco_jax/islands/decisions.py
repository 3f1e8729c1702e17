"""What was decided while a run was computed, from its facts, and a run that is computed again by these decisions [3].

Chance and speed choose how many steps a path takes in a timed phase, and which contributions an outer step leaves out
because they were late, lost, or made by a machine that computed wrongly. Everything else follows from the config and
the text. The end of a run writes its decisions to facts.json:

    config      of the run
    modules     [key, version, sha256, {path: why it was left out}] for each version of each module
    excluded    [path, phase, why] for each path that its own worker has excluded, or that was late
    late        [path, phase] for each of those that were late (quorum.py)
    steps       [path, phase, first, taken] for each timed phase of a path (path_steps.py)

A run with `--replay=facts.json`, or with the registry of the finished run, follows them, with any number of workers on
machines that compute alike, or in one process, and compares the digests of all versions of all modules at its end.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from dipaco_jax.algorithm.grid import largest_divisor
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import local_config, path_steps, pieces
from dipaco_jax.islands.path_steps import PathSteps
from dipaco_jax.registry import database, registry_url
from dipaco_jax.registry.registry import Conflict, Fact, Registry
from dipaco_jax.reports import audit_lines

FILE = 'facts.json'
PATIENCE_S = 5.0  # with the registry of another run
REPLAY = 'replay'  # kind of the fact that names the decisions that a run follows
DIFFERING = 'differing'  # versions of modules, in what a replay notes
WHERE_TEXT_IS = 'source', 'train', 'validation', 'name', 'data_dir', 'module'  # of config.data


class Decisions(NamedTuple):
  """The decisions of a run."""

  modules: dict[tuple[str, int], str]  # sha256 of each version
  left_out: dict[tuple[str, int], dict[str, str]]  # by version of a module: why, by path
  excluded: dict[tuple[int, int], str]  # by path and phase: why its worker has excluded it, or it was late
  late: set[tuple[int, int]]  # paths and phases
  steps: dict[tuple[int, int], PathSteps]  # by path and phase

  def why_excluded(self, path: int, phase: int, modules: Iterable[str]) -> str:
    """Returns why a path's worker excluded what it sent to these modules after a piece of a phase, or ''.

    With streaming, a worker may exclude a path after some modules have its contribution.
    """
    versions = [(module, phase + 1) for module in modules if (module, phase + 1) in self.modules]
    took_part = any(str(path) not in self.left_out.get(version, {}) for version in versions)
    return '' if took_part else self.excluded.get((path, phase), '')


def of_facts(registry: Registry) -> Decisions:
  """Returns the decisions that a run's facts tell."""
  modules = registry.facts('module')
  exclusions = [fact for fact in registry.facts('excluded') if 'executor' not in fact.meta]
  timed = [fact for fact in registry.facts(pieces.CHECKPOINT) if path_steps.STEPS in fact.meta]
  return Decisions(
    modules={(fact.key, fact.number): fact.sha256 for fact in modules},
    left_out={(fact.key, fact.number): fact.meta['left_out'] for fact in modules if fact.meta.get('left_out')},
    excluded={(int(fact.key), fact.number): fact.meta['why'] for fact in exclusions},
    late={(int(fact.key), fact.number) for fact in exclusions if pieces.LATE in fact.meta},
    steps={(int(fact.key), fact.number): PathSteps(*fact.meta[path_steps.STEPS]) for fact in timed},
  )


def to_json(registry: Registry) -> dict[str, Any]:
  """Returns the content of the facts.json of a run."""
  decisions, [config] = of_facts(registry), registry.facts('config')
  modules = sorted(decisions.modules.items())
  return {
    'config': config.meta['config'],
    'modules': [[*at, sha256, decisions.left_out.get(at, {})] for at, sha256 in modules],
    'excluded': [[*at, why] for at, why in sorted(decisions.excluded.items())],
    'late': sorted(decisions.late),
    'steps': [[*at, *steps] for at, steps in sorted(decisions.steps.items())],
  }


def load(source: str) -> Any:
  """Returns the content of a file facts.json, or of the facts of a registry with this URL, or file:PATH with its URL.

  Raises OSError, ValueError, and InputError if the registry cannot be used or its run is not finished.
  """
  if '://' not in source and not source.startswith(registry_url.FILE):
    return json.loads(pathlib.Path(source).read_bytes())
  if printable.redacted(source) != source:  # each role would show it
    raise InputError('it has a password, which all users of the machine can read: write it into a file, as file:PATH')
  url = registry_url.given(source, '--replay')
  file = database.sqlite_file(url)
  if file and not file.is_file():
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
  with contextlib.closing(Registry(url, patience_s=PATIENCE_S, reads_only=True)) as registry:
    if not registry.facts('finished'):
      raise InputError('its run is not finished')
    return json.loads(json.dumps(to_json(registry)))


def read(source: str, settings: settings_lib.Settings) -> Decisions:
  """Reads decisions. Raises InputError unless they are of a finished run with this config, but for where text is."""
  return read_with_digest(source, settings)[0]


def read_with_digest(source: str, settings: settings_lib.Settings) -> tuple[Decisions, str]:
  """Returns what `read` does, and the sha256 of the content."""
  file = printable.redacted(source)
  try:
    about = load(source)
    modules = [(str(key), int(version), str(sha256), dict(why)) for key, version, sha256, why in about['modules']]
    decisions = Decisions(
      {(key, version): sha256 for key, version, sha256, _ in modules},
      {(key, version): why for key, version, _, why in modules if why},
      {(int(path), int(phase)): str(why) for path, phase, why in about['excluded']},
      {(int(path), int(phase)) for path, phase in about['late']},
      {(int(path), int(phase)): PathSteps(int(first), int(n)) for path, phase, first, n in about['steps']},
    )
    recorded = settings_lib.of_run(about['config'])
    check_complete(decisions, recorded)
  except OSError as e:
    raise InputError(f'--replay={file} cannot be read: {e.strerror}') from e
  except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, InputError) as e:
    raise InputError(f'--replay={file} is not the {FILE} of a finished run, or damaged: {e}') from e
  of_text = {name: getattr(settings.data, name) for name in WHERE_TEXT_IS}
  here = dataclasses.replace(recorded, data=dataclasses.replace(recorded.data, **of_text))
  if differences := local_config.changes(here, settings):
    raise InputError(f'--replay={file} is of a run with another config ({differences}): give the same --config')
  if settings.data.own_text:
    raise InputError(f'--replay={file}: config.data.own_text=True keeps text apart, so nobody can compute all of it')
  return decisions, hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def check_complete(decisions: Decisions, settings: settings_lib.Settings):
  """Raises ValueError if a worker would look for a decision that is not there, or cannot follow it."""
  if missing := sorted(decisions.late - decisions.excluded.keys()):
    raise ValueError(f'path {missing[0][0]} is late in phase {missing[0][1] + 1}, and it does not say why')
  if not settings.train.phase_s:
    return
  tau = settings.train.steps_per_phase
  dispatch = largest_divisor(tau, settings.train.steps_per_dispatch)
  for at in itertools.product(range(settings.num_paths), range(settings.train.phases)):
    steps = decisions.steps.get(at)
    if steps is None or not (at in decisions.late or (1 <= steps.taken <= tau and steps.taken % dispatch == 0)):
      raise ValueError(f'it does not say how many of {tau} steps path {at[0]} took in phase {at[1] + 1}')


def follow(registry: Registry, source: str, settings: settings_lib.Settings) -> Decisions | None:
  """Returns the decisions that a run follows; None for --replay=''. Raises InputError if it was begun with others."""
  file = printable.redacted(source)
  decisions, sha256 = read_with_digest(source, settings) if file else (None, '')
  if file and not registry.facts('module'):
    with contextlib.suppress(Conflict):  # see below
      registry.put([Fact(REPLAY, '', 0, '', sha256, {'file': file})])
  facts = registry.facts(REPLAY)
  registry.mark_scheduled(facts)
  if [fact.sha256 for fact in facts] != [sha256] * bool(file):
    begun = f'with --replay={facts[0].meta["file"]}' if facts else 'without it'
    raise InputError(f'--replay={file}: this run was begun {begun}: give that, or another --workdir')
  return decisions


def compare(decisions: Decisions, registry: Registry) -> dict[str, Any]:
  """Compares all versions of all modules with those of the decisions; logs and returns the result for the report."""
  computed = {(fact.key, fact.number): fact.sha256 for fact in registry.facts('module')}
  versions = decisions.modules.keys() | computed.keys()
  differing = [at for at in versions if computed.get(at) != decisions.modules.get(at)]
  differing.sort(key=lambda at: (at[1], at[0]))
  result = {'modules': len(versions), 'differing': [list(at) for at in differing]}
  logging.warning('%s', audit_lines.describe_replay(result))
  return result
