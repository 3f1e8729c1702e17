"""The dense control: one model that is trained on from the base, on all text, for the paths to be compared with. Pure.

`evaluate.control_budget` says how much it is trained:

    'steps'   as many steps as one path: it reads 1 / P of what P paths read together
    'flops'   as many tokens as all paths together, and so with as many FLOPs, since it is as large as a path

If phases end by time, or without paths that are late, paths take other numbers of steps than the config says. `taken`
then has them for each path, without the phases in which it was late.

Nothing here imports JAX.
"""

import dataclasses
from collections.abc import Sequence

from dipaco_jax.config.settings import Settings


def steps_per_phase(s: Settings, taken: Sequence[int] = ()) -> int:
  """Returns the control's steps between two of its evaluations; there are as many evaluations as phases."""
  t = s.train
  if taken:
    num_runs = len(taken) if s.evaluate.control_budget == 'steps' else 1
    steps, whole = -(-sum(taken) // (t.phases * num_runs)), t.steps_per_dispatch
    return -(-steps // whole) * whole if steps > whole else max(1, steps)
  if s.evaluate.control_budget == 'steps':
    return t.steps_per_phase
  return -(-count_path_phases(s) * t.steps_per_phase // t.phases)


def count_path_phases(s: Settings) -> int:
  """Returns in how many phases each path is trained, summed over paths."""
  t = s.train
  if not t.schedule:
    return t.phases * min(t.paths_per_phase or s.num_paths, s.num_paths)
  firsts = [first for first, _ in t.schedule]
  spans = zip(firsts, [*firsts[1:], t.phases], t.schedule, strict=True)
  return sum(len({*paths}) * max(0, min(end, t.phases) - first) for first, end, (_, paths) in spans)


def control_settings(s: Settings, taken: Sequence[int] = ()) -> Settings:
  """Returns the settings of the control's training; its learning rate decays over its own steps, as a path's does."""
  dense, steps = s.dense(), steps_per_phase(s, taken)
  train = dataclasses.replace(dense.train, steps_per_phase=steps)
  decay, of_path = s.inner.decay_steps, s.train.steps_per_phase
  if taken:
    decay, of_path = s.decay_steps, max(1, -(-sum(taken) // (s.train.phases * len(taken))))
  if decay and steps != of_path:
    decay = s.pretrain.steps + -(-max(0, decay - s.pretrain.steps) * steps // of_path)
  return dataclasses.replace(dense, train=train, inner=dataclasses.replace(s.inner, decay_steps=decay))
