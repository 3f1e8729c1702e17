"""Tasks of islands without arrays: what each makes is the digest of all that went into it."""

import hashlib

import numpy as np

from dipaco_jax.islands import island, lineage, path_state, run_history, schedule
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.registry import Fact
from dipaco_jax.pipeline import jobs
from dipaco_jax.storage import tensors


def digest(*parts) -> dict[str, np.ndarray]:
  words = repr([{n: x.tolist() for n, x in sorted(p.items())} if isinstance(p, dict) else p for p in parts])
  return {'x': np.frombuffer(hashlib.sha256(words.encode()).digest(), np.float32).copy()}


def prepare(of: island.Island, task) -> list[Fact]:
  made = {level.name: of.write_object(f'modules/0/{level.name}', digest(level.name)) for level in of.layout.levels}
  modules = [Fact('module', key, 0, *made[key.split('/')[0]], {}) for key in of.all_modules()]
  return [Fact('prepared', '', 0, '', '', {}), *modules]


def the_round(of: island.Island, phase: int) -> str:
  """What a phase trains on; raises where there is no such thing yet."""
  kind, number = ('round', of.round_of(phase)) if of.round_of(phase) else ('prepared', 0)
  return of.registry.facts(kind, number=number)[0].sha256


def parameters(of: island.Island, path: int, version: int) -> dict[str, np.ndarray]:
  """Of all modules; raises where one is not there."""
  facts = of.registry.facts('module', list(of.modules_of(path).values()), version)
  assert len(facts) == len(of.layout.levels), f'a module of path {path} is not of version {version}'
  return digest(*(of.read_object(fact.uri, fact.sha256) for fact in facts))


def held_by(of: island.Island) -> HeldStates:
  """What a worker of this name has on its disk."""
  return HeldStates(of.run.workdir / 'held' / of.name, of.name)


def train(of: island.Island, task) -> list[Fact]:
  path, phase, held = int(task.key), task.number, held_by(of)
  found = lineage.find(of, held, task)
  inner: dict = found.carried
  for t in found.phases:
    new = digest(path, t, the_round(of, t), parameters(of, path, t), inner)
    inner = digest('inner', new)
    for before in of.registry.facts('checkpoint', [task.key], t) if t < phase else []:
      assert before.meta['objects']['low'][1] == sha256(digest('low', new)), 'a replay has made the same'
      held.put(Key(path, t, before.sha256), inner)
  prefix = f'paths/{phase}/{path}'
  objects = {
    level.name: of.write_object(f'{prefix}-{level.name}', digest(level.name, new)) for level in of.layout.levels
  }
  if lineage.publishes_state(of, path, phase):
    objects[path_state.INNER] = of.write_object(f'{prefix}-{path_state.INNER}', inner)
  made = schedule.checkpoint_fact(path, phase, objects, {'holder': held.holder, 'replayed': len(found.phases) - 1})
  held.put(Key(path, phase, made.sha256), inner)
  return [made]


def sha256(arrays: dict[str, np.ndarray]) -> str:
  return hashlib.sha256(tensors.to_bytes(arrays)).hexdigest()


def outer(of: island.Island, task) -> list[Fact]:
  phase, level = task.number - 1, task.key.split('/')[0]
  active = of.active_paths(phase)
  wanted = sorted(str(path) for path in of.paths_through(task.key) if active[path])
  found = of.registry.facts('checkpoint', wanted, phase)
  if len(found) < len(wanted):
    of.registry.release(task, waiting=True)
    return []
  [before] = of.registry.facts('module', [task.key], phase)
  new = digest(*of.read_module(before), *(of.read_object(*fact.meta['objects'][level]) for fact in found))
  return [module_fact(of, task, new, {})]


def module_fact(of: island.Island, task, new: dict[str, np.ndarray], about: dict) -> Fact:
  """Of a version whose outer state is an object of its own."""
  state = of.write_object(f'{island.OUTER}/{task.number}/{task.key}', digest('outer', new))
  made = of.write_object(f'modules/{task.number}/{task.key}', new)
  return Fact('module', task.key, task.number, *made, about | {island.OUTER: state})


def evaluation(of: island.Island, task) -> list[Fact]:
  path, version = int(task.key), task.number
  found = digest(the_round(of, version - 1), parameters(of, path, version))
  loss = int.from_bytes(found['x'].tobytes()[:2], 'big') / 2**16 + version / 4  # early versions are often the best
  return [Fact('evaluation', task.key, version, '', repr(loss), {'loss': loss, 'targets': 1.0})]


def reroute(of: island.Island, task) -> list[Fact]:
  version = jobs.round_end(of.run.settings, task.number - 1)
  every = [parameters(of, path, version) for path in range(of.layout.grid.num_paths)]
  return [Fact('round', '', task.number, '', repr(digest(*every)), {})]


def finish(of: island.Island, task) -> list[Fact]:
  s, pointers, found = of.run.settings, run_history.Pointers(of), []
  for version in range(1, s.train.phases + 1):
    losses = pointers.add(version)
    assert all(loss is not None for loss in losses) or not s.train.early_stopping
  for version in sorted({s.train.phases, *pointers.version}):
    facts = of.registry.facts('module', number=version)
    assert [fact.key for fact in facts] == sorted(of.all_modules())
    found += [of.read_object(fact.uri, fact.sha256) for fact in facts]
  return [Fact('finished', '', 0, '', repr(digest(pointers.version, *found)), {'best': pointers.version})]


PERFORM = {
  'prepare': prepare, 'train': train, 'outer': outer, 'evaluate': evaluation, 'reroute': reroute, 'finish': finish,
}  # fmt: skip
