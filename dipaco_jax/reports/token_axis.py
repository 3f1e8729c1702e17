"""Training steps as numbers of tokens read, the x axis of curves that compare the cost of training."""

import numpy as np

from dipaco_jax.config import choices
from dipaco_jax.config.settings import Settings
from dipaco_jax.reports.plot_style import Curve

OF_ALL = 'training tokens, including those of the base'
OF_ONE = 'tokens read, including those of the base'


def of_paths(s: Settings, curve: Curve) -> Curve:
  """Returns the curve over the tokens that the base and all paths together have read, instead of steps."""
  after = np.maximum(np.asarray(curve.steps) - s.pretrain.steps, 0)
  ends = np.arange(s.train.phases + 1) * s.train.steps_per_phase
  trained = [choices.active_paths(s.train, s.num_paths, s.seed, phase).sum() for phase in range(s.train.phases)]
  path_steps = np.concatenate([[0], np.cumsum(trained)]) * s.train.steps_per_phase
  return _over_tokens(s, curve, np.interp(after, ends, path_steps))


def of_one_model(s: Settings, curve: Curve) -> Curve:
  """Returns the curve over the tokens that the base and one model after it have read: the dense control, or a path."""
  return _over_tokens(s, curve, np.maximum(np.asarray(curve.steps) - s.pretrain.steps, 0))


def _over_tokens(s: Settings, curve: Curve, steps_after: np.ndarray) -> Curve:
  before = np.minimum(np.asarray(curve.steps), s.pretrain.steps) * s.pretrain.batch_size
  return Curve((before + steps_after * s.train.batch_size) * s.model.seq_len, curve.values)


def trains_always(s: Settings) -> bool:
  """Returns whether every path trains in every phase, so that all have read the same number of tokens."""
  return not s.train.schedule and not s.train.paths_per_phase
