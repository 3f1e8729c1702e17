"""Tasks of islands without arrays: what each makes is the digest of all that went into it."""

import hashlib

import numpy as np

from dipaco_jax.islands import island, lineage, own_levels, path_state, pieces, run_history, schedule, state_facts
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.path_state import Own, PathState
from dipaco_jax.pipeline import jobs
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import tensors

OTHERWISE = set[str]()  # names of workers that compute other bits


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


def parameters(of: island.Island, path: int, version: int, own: Own | None = None) -> dict[str, np.ndarray]:
  """Of all modules, the path's own ones maybe from its state; raises where one is not there."""
  facts = of.registry.facts('module', list(of.modules_of(path).values()), version)
  assert len(facts) == len(of.layout.levels), f'a module of path {path} is not of version {version}'

  def read(fact: Fact) -> dict[str, np.ndarray]:
    weights = own.weights.get(fact.key) if own else None
    if weights is None:
      return of.read_object(fact.uri, fact.sha256)
    assert fact.sha256 == sha256({'x': weights}), f'{fact.key} is not of version {version}'
    return {'x': weights}

  return digest(*map(read, facts))


def held_by(of: island.Island) -> HeldStates:
  """What a worker of this name has on its disk."""
  return HeldStates(of.run.workdir / 'held' / of.name, of.name)


def train(of: island.Island, task, left_out=lambda path, phase: False) -> list[Fact]:
  """A path that is left out of a phase keeps its own modules as they were, and nothing else."""
  path, phase, held = int(task.key), task.number, held_by(of)
  if not any(key.path == path for key in held.names()):
    lineage.forget_moved(of, held)
  found = lineage.find(of, held, task)
  state = found.carried
  for t in found.phases:
    noted = own_levels.note_left_out(of, path, t, PathState({}, {}, own=begin_own(of, path, state)))
    own = noted.own
    if of.own_levels and lineage.previous(of, path, t)[1]:  # it begins anew, but for its own modules
      state = own.to_arrays()
    loss, own = evaluate_own(of, path, t, own)
    bits = [of.name] if of.name in OTHERWISE else []
    new = digest(path, t, the_round(of, t), parameters(of, path, t, own), state, *bits)
    if left_out(path, t):
      state = own.to_arrays()
    else:
      own = own._replace(weights={key: digest(x, key, new)['x'] for key, x in own.weights.items()})
      state = digest('inner', new) | own.to_arrays()
    for before in of.registry.facts('checkpoint', [task.key], t) if t < phase else []:
      for level, (_, there) in before.meta['objects'].items():
        assert OTHERWISE or there == sha256(digest(level, new)), 'a replay has made the same'
      hold(of, held, Key(path, t, before.sha256), state)
  objects = {
    level.name: of.write_object(f'paths/{phase}/{path}-{level.name}', digest(level.name, new))
    for level in of.layout.levels
    if level.name not in of.own_levels and not left_out(path, phase)
  }
  modules, about = own_modules(of, path, phase + 1, own), {'holder': held.holder, 'replayed': len(found.phases) - 1}
  about |= {'excluded': 'bad'} if left_out(path, phase) else {}
  made = schedule.checkpoint_fact(path, phase, objects, about, own_modules=modules)
  hold(of, held, Key(path, phase, made.sha256), state)
  return [made, *modules, *loss]


def hold(of: island.Island, held: HeldStates, key: Key, state: dict[str, np.ndarray]):
  held.put(key, state)
  if lineage.publishes_state(of, key.path, key.phase):
    held.set_aside(key, state)


def publish_states(of: island.Island):
  """What a worker does in a thread."""
  state_facts.publish_aside(of, held_by(of), state_facts.Line())


# -- modules that stay with a path; here `Own` has them by key


def begin_own(of: island.Island, path: int, state: dict[str, np.ndarray]) -> Own:
  if (own := path_state.own_from_arrays(state)) is not None:
    return own
  base = of.registry.facts('module', of.own_modules(path), 0)
  return Own({fact.key: of.read_object(fact.uri, fact.sha256)['x'] for fact in base}, {}, {}, {})


def evaluate_own(of: island.Island, path: int, version: int, own: Own) -> tuple[list[Fact], Own]:
  if not own_levels.evaluates(of, pieces.Part(version, 0)):
    return [], own
  found = of.registry.facts('evaluation', [str(path)], version)
  found = found or [evaluation_fact(of, path, version, parameters(of, path, version, own))]
  noted = own_levels.note_evaluation(of, found[0], PathState({}, {}, own=own))
  return found, noted.own


def own_modules(of: island.Island, path: int, version: int, own: Own) -> list[Fact]:
  """The facts of a version; with objects, and those of the best version, where others read them."""
  made = []
  for key, x in own.weights.items():
    data = tensors.to_bytes({'x': x})
    made.append(Fact('module', key, version, *of.object_name(f'modules/{version}/{key}', data), {}))
    if of.has_own_objects(version):
      of.storage.write(made[-1].uri, data, made[-1].sha256)
  for fact in of.registry.facts('module', list(own.best), own.best_version) if of.has_own_objects(version) else ():
    of.storage.write(fact.uri, tensors.to_bytes({'x': own.best[fact.key]}), fact.sha256)
  return made


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
  new = digest(*read_module(of, before), *(of.read_object(*fact.meta['objects'][level]) for fact in found))
  return [module_fact(of, task, new, {})]


def read_module(of: island.Island, fact: Fact) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Weights and outer state, which are not shaped as a model's are."""
  named = fact.meta.get(island.OUTER)
  return of.read_object(fact.uri, fact.sha256), of.read_object(*named) if named else {}


def module_fact(of: island.Island, task, new: dict[str, np.ndarray], about: dict) -> Fact:
  """Of a version whose outer state is an object of its own."""
  state = of.write_object(f'{island.OUTER}/{task.number}/{task.key}', digest('outer', new))
  made = of.write_object(f'modules/{task.number}/{task.key}', new)
  return Fact('module', task.key, task.number, *made, about | {island.OUTER: state})


def evaluation(of: island.Island, task) -> list[Fact]:
  return [evaluation_fact(of, int(task.key), task.number, parameters(of, int(task.key), task.number))]


def evaluation_fact(of: island.Island, path: int, version: int, params: dict[str, np.ndarray]) -> Fact:
  found = digest(the_round(of, version - 1), params)
  loss = int.from_bytes(found['x'].tobytes()[:2], 'big') / 2**16 + version / 4  # early versions are often the best
  return Fact('evaluation', str(path), version, '', repr(loss), {'loss': loss, 'targets': 1.0})


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
    found += [of.read_object(fact.uri, fact.sha256) for fact in facts if of.is_chosen(fact, pointers.version)]
  return [Fact('finished', '', 0, '', repr(digest(pointers.version, *found)), {'best': pointers.version})]


PERFORM = {
  'prepare': prepare, 'train': train, 'outer': outer, 'evaluate': evaluation, 'reroute': reroute, 'finish': finish,
}  # fmt: skip
