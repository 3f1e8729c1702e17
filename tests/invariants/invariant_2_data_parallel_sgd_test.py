"""Invariant 2: tau = 1, inner SGD, equal shards, all levels shared: data-parallel SGD on all paths' rows together."""

import jax
import numpy as np
import pytest
import slow
import small

PHASES = 6


@pytest.mark.parametrize('devices', slow.but([1, 4], 1))
def test_paths_are_one_batch_in_parts(devices, tmp_path):
  s = small.settings(
    {'a': 2, 'b': 2},
    train=dict(phases=PHASES, steps_per_phase=1),
    inner=dict(optimizer='sgd', learning_rate=0.1, clip_norm=0.0),
    outer=dict(optimizer='sgd', learning_rate=1.0, rescale=False, reweigh=False),
  )
  made = small.make_programs(s, devices)
  job = small.make_job(made)
  found = small.fetched(small.train(job, tmp_path).modules)['all']

  gradient, params = jax.jit(jax.grad(small.mean_loss(made.model, s.routing.prefix_tokens))), job.base
  for step in range(PHASES):
    rate = 0.1 * min(1, (step + 1) / 3) * (0.05 + 0.95 * (1 + np.cos(np.pi * step / 16)) / 2)
    grads = gradient(params, *(np.concatenate(x) for x in zip(*(small.batch(p, step) for p in range(4)), strict=True)))
    params = {name: x - np.float32(rate) * np.asarray(grads[name]) for name, x in params.items()}
  # A step errs by the rounding of a parameter (below 2), and of a gradient that is a sum over all rows' targets.
  targets = 4 * small.ROWS * small.LENGTH
  small.assert_close(found, params, PHASES * small.EPS * (2 + 0.1 * targets))
  assert all(np.abs(found[name] - job.base[name]).max() > 1e-3 for name in found)
