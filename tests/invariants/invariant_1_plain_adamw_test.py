"""Invariant 1: one path and outer SGD with learning rate 1, no momentum, is the plain AdamW run.

To the rounding of one subtraction and one addition per phase: old - (old - new) instead of new.
"""

import jax
import numpy as np
import optax
import pytest
import small

from dipaco_jax.models import loss

OUTER = dict(optimizer='sgd', learning_rate=1.0)


@pytest.fixture(scope='module')
def made():
  return small.make_programs(small.settings(outer=OUTER))


def test_a_phase_adds_the_rounding_of_a_subtraction_and_an_addition(made, tmp_path):
  job = small.make_job(made, phases=1)
  moved = small.fetched(small.train(job, tmp_path).modules)['all']
  turn = np.zeros(0, np.int32)
  params = made.gather_path(made.start(job.base)[0], turn)
  state = made.fresh_state(params)
  for step in range(0, job.schedule.steps_per_phase, job.schedule.dispatch_steps):
    tokens, segments = np.stack([np.stack(small.batch(0, s)) for s in (step, step + 1)], 1)
    params, state, _ = made.steps(params, state, tokens, segments, np.int32(step), job.weights(0), turn)
  for name, plain in small.fetched(params).items():
    delta = job.base[name] - plain
    assert np.abs(delta).max() > 1e-3, name
    bound = small.EPS / 2 * (np.abs(delta) + np.abs(plain)) * (1 + 2 * small.EPS)
    assert (np.abs(moved[name] - plain) <= bound).all(), name


def test_three_phases_are_the_run_of_optax(made, tmp_path):
  job = small.make_job(made)
  s = made.settings.inner
  moved = small.fetched(small.train(job, tmp_path).modules)['all']

  def rate(count):
    warm = jax.numpy.minimum(1.0, (count + 1) / s.warmup_steps)
    return warm * optax.cosine_decay_schedule(s.learning_rate, s.decay_steps, s.final_fraction)(count)

  matrices = {name: x.ndim > 1 for name, x in job.base.items()}
  adamw = optax.adamw(rate, s.b1, s.b2, s.epsilon, weight_decay=s.weight_decay, mask=matrices)
  transformation = optax.chain(optax.clip_by_global_norm(s.clip_norm), adamw)

  def mean_loss(params, tokens, segments):
    nll, count = loss.path_loss(made.model, 8, params, tokens, segments)
    return nll / count

  @jax.jit
  def update(params, state, tokens, segments):
    updates, state = transformation.update(jax.grad(mean_loss)(params, tokens, segments), state, params)
    return optax.apply_updates(params, updates), state

  params, state = job.base, transformation.init(job.base)
  steps = job.schedule.phases * job.schedule.steps_per_phase
  for step in range(steps):
    params, state = update(params, state, *small.batch(0, step))
  # A step errs by the rounding of a parameter (below 2), and of a direction that is a sum over the rows' targets.
  targets = small.ROWS * small.LENGTH
  small.assert_close(moved, small.fetched(params), steps * small.EPS * (2 + s.learning_rate * targets))
