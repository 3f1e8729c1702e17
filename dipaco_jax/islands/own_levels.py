"""Levels of a single path (path-specific): the worker that trains the path takes their outer steps [2.5, 2.7].

No other process reads their modules until the end of a round or of the run, so they are not sent: their weights, the
state of their outer optimizer, and the weights of the version that early stopping points to are part of the path's
state (lineage.py). Their facts are like those of an outer executor, inserted in one transaction with the path's
checkpoint. Their objects are written at the end of a round and of the run, with those of the version that early
stopping points to. For early stopping, the worker evaluates the path at the versions in between, when it has all
modules of a version.

If paths are sampled, an executor updates these levels like all others, because a resting path also has a next version.
"""

import hashlib
import itertools
import math
import time
from typing import Any

from dipaco_jax.islands import outer_executor, outer_weights, pieces, screening_facts, withdrawals
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.outer_executor import Partial
from dipaco_jax.islands.path_state import Arrays, Own, PathState
from dipaco_jax.islands.path_steps import PathSteps
from dipaco_jax.islands.pieces import Part
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import tensors
from dipaco_jax.training import evaluation


def begin(island: Island, path: int, state: PathState) -> PathState:
  """Returns a path's state with its own levels, which are those of the base model before the first outer step."""
  if state.own or not island.own_levels:
    return state
  base = island.registry.facts('module', island.own_modules(path), 0)
  noted = {fact.key: _noted(fact) for fact in base}
  return state._replace(own=Own(island.path_parameters(path, 0, island.own_levels), {}, noted, {}))


def weights(state: PathState) -> Arrays:
  """Returns the weights of a path's own modules, of the version at the beginning of the phase."""
  return state.own.weights if state.own else {}


def facts(phase: int, state: PathState) -> list[Fact]:
  """Returns the facts of a path's own modules before a phase, with the metadata that the outer step needs."""
  own_facts = state.own.facts if state.own else {}
  return [
    Fact('module', key, phase, uri, sha256, {} if usual is None else {'usual': usual})
    for key, (uri, sha256, usual) in own_facts.items()
  ]


def _noted(fact: Fact) -> list[Any]:
  return [fact.uri, fact.sha256, fact.meta.get('usual')]


# -- the outer step


@time_use.doing(time_use.OUTER)
def take_step(
  island: Island, path: int, phase: int, state: PathState, steps: PathSteps, why: str | None
) -> tuple[PathState, list[Fact]]:  # fmt: skip
  """Takes the outer steps of a path's own modules after a phase, unless the path is excluded, with the reason `why`.

  `steps` are the inner steps of the phase.

  Returns the state, and the facts of the modules' next version. Raises Diverged if the path has no other modules and is
  excluded too often.
  """
  if state.own is None:
    return state, []
  if why and len(island.own_levels) == len(island.layout.levels):  # else executors see to it
    everyone = outer_weights.path_weights(island, phase)
    screening_facts.check(island, island.own_modules(path)[0], phase, everyone, [str(path)])
  own, own_modules = state.own, list[Fact]()
  for before in facts(phase, state):
    own, fact = _step(island, path, before, state._replace(own=own), steps, why)
    own_modules.append(fact)
  own = own._replace(facts={fact.key: _noted(fact) for fact in own_modules})
  return state._replace(own=own), own_modules


def _step(
  island: Island, path: int, before: Fact, state: PathState, steps: PathSteps, why: str | None
) -> tuple[Own, Fact]:  # fmt: skip
  assert state.own
  module, own = before.key, state.own
  phase = before.number
  level = before.key.partition('/')[0]
  names = island.layout.names(island.parse_module(module)[0])
  old, new = ({name: x[name] for name in names} for x in (own.weights, state.params))
  bounds = screening_facts.bounds(island, [before])
  partial = Partial(None, old, own.outer.get(level, {}), bounds, 'none')
  if why is None:
    for name, weight in outer_weights.module_weights(island, module, phase).items():  # none if it has no text
      partial.add(name, weight, screening_facts.rates(island, level, phase, steps), new)
  about: dict[str, Any] = {'executor': island.name, 'started': partial.started}
  about |= screening_facts.next_usual(island, module, bounds.usual[level], partial.moved.values())
  if not partial.squares:
    left_out = partial.left_out if why is None else {str(path): why}
    about |= {'left_out': left_out} if left_out else {}
    fact = Fact('module', module, phase + 1, before.uri, before.sha256, about)
  else:
    stepped, outer, figures = outer_executor.outer_step(island, module, phase + 1, partial)
    own = own._replace(weights=own.weights | stepped, outer=own.outer | {level: outer})
    name, sha256 = island.object_name(f'modules/{phase + 1}/{module}', tensors.to_bytes(stepped))
    fact = Fact('module', module, phase + 1, name, sha256, about | figures)
  return own, fact._replace(meta=fact.meta | {'ended': time.time()})


def differing(island: Island, own_modules: list[Fact]) -> list[str]:
  """Returns the levels of own modules that differ from what their facts tell."""
  published = (
    island.registry.facts('module', [fact.key for fact in own_modules], own_modules[0].number) if own_modules else []
  )
  digests = {fact.key: fact.sha256 for fact in published}
  return [fact.key.partition('/')[0] for fact in own_modules if digests.get(fact.key, fact.sha256) != fact.sha256]


def publish(island: Island, own_modules: list[Fact], state: PathState):
  """Writes the objects of a path's own modules, given the facts of their new version, where others will read them."""
  own = state.own
  if own is None or not own_modules or not island.has_own_objects(own_modules[0].number):
    return
  best = (
    island.registry.facts('module', [fact.key for fact in own_modules], own.best_version) if own.best_version else []
  )
  for fact, source in itertools.chain(
    ((fact, own.weights) for fact in own_modules), ((fact, own.best) for fact in best)
  ):
    names = island.layout.names(island.parse_module(fact.key)[0])
    data = tensors.to_bytes({name: source[name] for name in names})
    name, sha256 = island.object_name(f'modules/{fact.number}/{fact.key}', data)
    if sha256 == fact.sha256:
      island.storage.write(fact.uri, data, sha256)
    else:  # a replay here has computed others, and those of the fact are lost
      island.storage.write(name, data, sha256)
      withdrawals.replace(island, fact, fact._replace(uri=name, sha256=sha256))


# -- early stopping


def evaluates(island: Island, part: Part) -> bool:
  """Returns whether a path is evaluated before a piece: at the first that has all modules of the phase's version."""
  if not island.own_levels or not island.run.settings.train.early_stopping or part.phase == 0:
    return False
  if island.has_own_objects(part.phase):
    return False
  times, shared = island.timetable, island.shared_levels

  def has_all(nth: int) -> bool:
    begin = pieces.of_phase(island, part.phase)[nth].begin
    return all(times.version(level, part.phase, begin) >= part.phase for level in shared)

  return has_all(part.nth) and (part.nth == 0 or not has_all(part.nth - 1))


def note_left_out(island: Island, path: int, phase: int, state: PathState) -> PathState:
  """Notes, before a phase, the evaluations in the phases right before it from which the path's worker excluded it.

  A replay leaves these phases out; the path's own modules are the same in all of them.
  """
  if not island.own_levels or not island.run.settings.train.early_stopping:
    return state
  exclusions = island.registry.facts('excluded', [str(path)], at_most=phase - 1)
  excluded = {fact.number for fact in exclusions if 'executor' not in fact.meta}
  left_out = list(itertools.takewhile(excluded.__contains__, reversed(range(phase))))
  if left_out:
    for evaluated in island.registry.facts('evaluation', [str(path)], at_least=left_out[-1], at_most=phase - 1):
      state = state if island.has_own_objects(evaluated.number) else note_evaluation(island, evaluated, state)
  return state


def evaluation_fact(path: int, version: int, loss: float | None, num_targets: float) -> Fact:
  """Makes the fact of a path's loss on its hold-out: nats per target, None without a hold-out; and how many targets."""
  meta = {'loss': loss if loss is None or math.isfinite(loss) else 'inf', 'targets': num_targets}
  return Fact('evaluation', str(path), version, '', hashlib.sha256(repr(loss).encode()).hexdigest(), meta)


def note_evaluation(island: Island, fact: Fact, state: PathState) -> PathState:
  """Returns a path's state after a version was evaluated, with the version's own weights if it is the best."""
  own, version = state.own, fact.number
  assert own
  loss = None if fact.meta['loss'] is None else float(fact.meta['loss'])
  if version == 1 or island.round_of(version - 1) != island.round_of(version - 2):
    own = own._replace(best={}, best_version=0, best_loss=None)  # a new round has other hold-outs
  best_version, best_loss = [own.best_version], [own.best_loss]
  evaluation.update_best(version, [loss], best_version, best_loss)
  if best_version[0] == version:
    own = own._replace(best=own.weights, best_version=version, best_loss=best_loss[0])
  return state._replace(own=own)
