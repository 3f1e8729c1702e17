"""What a run's settings choose of the algorithm: its optimizers, the paths of a phase, and when levels exchange."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import numpy as np
import optax

from dipaco_jax.algorithm import inner, outer
from dipaco_jax.algorithm.grid import largest_divisor
from dipaco_jax.algorithm.modules import Layout
from dipaco_jax.algorithm.streaming import Timetable, spread
from dipaco_jax.config import extension, wires
from dipaco_jax.config.settings import Inner, Outer, Settings, Train


def make_inner(config: Inner, decay_steps: int, pretrain_steps: int, path_rate: float) -> inner.Inner:
  """Makes a path's optimizer and its schedule.

  Of the user's own [extension.py], make(config) is for 'inner.optimizer' an optax.GradientTransformation u without
  learning rate, theta <- theta - eta_s u, and for 'inner.schedule' a function of the global step s, int32 [], that is
  eta_s, with config.decay_steps and config.warmup_steps filled in.

  Args:
    config: the section `inner`.
    decay_steps: length of the schedule in global steps.
    pretrain_steps: the first global step of the paths.
    path_rate: learning rate from that step on; 0: config.learning_rate.

  Raises:
    InputError: a user-defined part cannot be made.
  """
  rate = make_schedule(config, decay_steps, pretrain_steps, path_rate)
  transformation = make_transformation(config)
  if config.frozen:
    transformation = optax.chain(transformation, inner.freeze(config.frozen))
  return inner.make(transformation, rate, config.clip_norm, config.max_skipped)


def make_inner_of_run(s: Settings) -> inner.Inner:
  """Makes the optimizer of a run's paths."""
  return make_inner(s.inner, s.decay_steps, s.pretrain.steps, s.train.learning_rate)


def make_schedule(
  config: Inner, decay_steps: int, pretrain_steps: int, path_rate: float
) -> Callable[[jax.Array], jax.Array]:
  """Returns the learning rate by global step; for the arguments see `make_inner`."""
  warmup_steps = config.warmup(decay_steps)
  if extension.is_reference(config.schedule):
    completed = dataclasses.replace(config, decay_steps=decay_steps, warmup_steps=warmup_steps)
    return extension.make('inner.schedule', config.schedule, completed)
  return inner.Schedule(
    rate=config.learning_rate,
    decay_steps=decay_steps,
    warmup_steps=warmup_steps,
    final_fraction=config.final_fraction,
    decay_fraction=config.decay_fraction if config.schedule == 'wsd' else 0.0,
    pretrain_steps=pretrain_steps,
    path_rate=path_rate,
    rewarm_steps=config.rewarm_steps,
  )


def make_transformation(config: Inner) -> optax.GradientTransformation:
  """Returns u of theta <- theta - eta_s u: AdamW's, Muon's, the gradient (sgd), or the user's."""
  if extension.is_reference(config.optimizer):
    return extension.make('inner.optimizer', config.optimizer, config)
  if config.optimizer == 'sgd':
    return optax.identity()
  moments = config.b1, config.b2, config.epsilon, config.weight_decay
  return inner.adamw(*moments) if config.optimizer == 'adamw' else inner.muon_or_adamw(config.muon_momentum, *moments)


def make_outer_optimizer(config: Outer) -> optax.GradientTransformation:
  """Returns OuterOpt; of the user's own [extension.py], make(config) is an optax.GradientTransformation."""
  if extension.is_reference(config.optimizer):
    return extension.make('outer.optimizer', config.optimizer, config)
  return outer.make_optimizer(config.optimizer, config.learning_rate, config.momentum, config.b2, config.epsilon)


def make_outer(config: Outer, compress: str = 'none') -> outer.Outer:
  """Returns the outer step; `compress`: see streaming.Wire."""
  return outer.Outer(make_outer_optimizer(config), config.rescale, compress)


def takes_over(layout: Layout, config: Outer) -> bool:
  """Returns whether paths continue from their own parameters: no module is shared, and theta <- theta - 1 Delta."""
  shared = any(layout.grid.paths_through(level) > 1 for level in layout.levels)
  return not shared and config.optimizer == 'sgd' and config.learning_rate == 1


def active_paths(train: Train, num_paths: int, seed: int, phase: int) -> np.ndarray:
  """Returns which paths train in a phase, bool [P]: by schedule, by path sampling [2.6.2], or all of them."""
  if train.schedule:
    chosen = [paths for first, paths in train.schedule if first <= phase][-1]
  elif train.paths_per_phase:
    chosen = outer.sampled_paths(num_paths, train.paths_per_phase, seed, phase)
  else:
    chosen = tuple(range(num_paths))
  return np.isin(np.arange(num_paths), chosen)


def make_timetable(s: Settings, sizes: Mapping[str, int]) -> Timetable:
  """Makes the timetable of a run, from its settings and {level: parameters that a path shares; 0: its own alone}."""
  wire, tau = wires.make_wire(s.outer, s.train), s.train.steps_per_phase
  unit = largest_divisor(math.gcd(tau, wire.overlap_steps), s.train.steps_per_dispatch)
  return Timetable(
    tau=tau,
    unit=unit,
    places=spread(sizes, tau, unit) if wire.stream else dict.fromkeys(sizes, tau),
    overlaps={level: wire.overlap_steps if size else 0 for level, size in sizes.items()},
    alpha=wire.alpha,
    stream=wire.stream,
    phases=s.train.phases,
    closed=frozenset((n + 1) * s.routing.phases_per_round - 1 for n in range(s.rounds)),
    closed_every=s.outer.closed_every,
    keeps=wire.keeps,
  )
