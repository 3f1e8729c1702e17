"""The dense control: one model that is trained on from the base, on all text, for the paths to be compared with. Pure.

`evaluate.control_budget` says how much it is trained:

    'steps'   as many steps as one path: it reads 1 / P of what P paths read together
    'flops'   as many tokens as all paths together, and so with as many FLOPs, since it is as large as a path

Nothing here imports JAX.
"""

import dataclasses

from dipaco_jax.config.settings import Settings


def steps_per_phase(s: Settings) -> int:
  """Returns the control's steps between two of its evaluations; there are as many evaluations as phases."""
  t = s.train
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


def control_settings(s: Settings) -> Settings:
  """Returns the settings of the control's training; its learning rate decays over its own steps."""
  dense, steps = s.dense(), steps_per_phase(s)
  train = dataclasses.replace(dense.train, steps_per_phase=steps)
  decay = s.inner.decay_steps
  if decay and steps != s.train.steps_per_phase:
    decay = s.pretrain.steps + -(-max(0, decay - s.pretrain.steps) * steps // s.train.steps_per_phase)
  return dataclasses.replace(dense, train=train, inner=dataclasses.replace(s.inner, decay_steps=decay))
