"""What enters the library is checked where it enters, while functions are traced; messages name argument and fix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dipaco_jax.algorithm import Grid, Levels, OuterStep, checks, train_phase

PARAMS = {'block': {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}, 'embed': jnp.ones((4, 2))}
LEVELS = Levels(Grid(a=2, b=2), PARAMS, low=('block', 'a'), ends=('embed', ''))
MODULES, BATCHES = LEVELS.start(PARAMS), jnp.zeros((4, 3))
OUTER = OuterStep(LEVELS, optax.sgd(0.7, 0.9))


def start(embed=None, **block):
  return LEVELS.start({'block': PARAMS['block'] | block, 'embed': PARAMS['embed'] if embed is None else embed})


def run_phase(params=None, states=None, batches=BATCHES):
  params = LEVELS.paths(MODULES) if params is None else params
  states = LEVELS.per_path({'count': jnp.int32(0)}) if states is None else states
  return train_phase(lambda params, state, batch: (params, state, batch), params, states, batches)


def step(**changes):
  arguments = {'modules': MODULES, 'state': OUTER.init(MODULES), 'paths': LEVELS.paths(MODULES)} | changes
  return OUTER.step(**arguments)


def state_of(optimizer):
  return OuterStep(LEVELS, optimizer).init(MODULES)


WRONG = [
  (lambda: start(x=jnp.ones(1)), r"params: 'block/x' unexpected; give parameters like those that Levels got"),
  (lambda: LEVELS.start({'embed': PARAMS['embed']}), r"params: 'block/b', 'block/w' missing; give parameters"),
  (lambda: LEVELS.start([]), r"params: 'block/b', .* missing"),
  (lambda: start(embed=[jnp.ones(2)]), r"params: 'embed' missing and 'embed/0' unexpected"),
  (lambda: LEVELS.start(PARAMS | {'block': optax.EmptyState}), r"params: .* missing and 'block' unexpected"),
  (lambda: start(b=jnp.ones(4)), r"params: 'block/b' has shape \(4,\) instead of \(3,\); give parameters like"),
  (lambda: start(b=jnp.ones(3, jnp.bfloat16)), r"params: 'block/b' has dtype bfloat16 instead of float32; give"),
  (lambda: start(embed=1.0), r"params: 'embed' has shape \(\)"),
  (lambda: LEVELS.paths(PARAMS), r'modules: .* missing and .* unexpected; give modules that levels.start'),
  (lambda: OUTER.init(LEVELS.paths(MODULES)), r'modules: .* missing'),
  (lambda: run_phase(params=PARAMS), r"params: 'block/w' has shape \(2, 3\) instead of \(3, ...\); give those of all"),
  (lambda: run_phase(params={'w': 1.0}), r"params: 'w' has shape \(\) instead of \(P, ...\); .* levels.paths"),
  (lambda: run_phase(states=jnp.zeros(())), r'^states has shape \(\) instead of \(4, ...\); .* levels.per_path'),
  (lambda: run_phase(states={'n': jnp.zeros(3)}), r"states: 'n' has shape \(3,\) instead of \(4, ...\)"),
  (
    lambda: run_phase(batches=jnp.zeros((3, 4))),
    r'batches has shape \(3, 4\) instead of \(4, 4, ...\); give each path',
  ),
  (lambda: run_phase(batches=jnp.zeros(4)), r'batches has shape \(4,\) instead of \(4, tau, ...\)'),
  (
    lambda: run_phase(batches={'x': np.zeros((4, 3)), 'y': np.zeros((4, 2))}),
    r"batches: 'y' has shape \(4, 2\) instead of \(4, 3, ...\)",
  ),
  (lambda: step(state=state_of(optax.adam(1.0))), r'state: .* unexpected; give outer.init\(modules\) or a later'),
  (lambda: step(state=state_of(optax.sgd(1.0))), r"state: 'levels/ends/optimizer/0/trace/embed', .* missing; give"),
  (lambda: step(state=optax.sgd(0.7, 0.9).init(PARAMS)), r'state: .* missing'),
  (lambda: step(state=tuple(OUTER.init(MODULES))), r'state: '),
  (lambda: step(weights=[1, 1, -1, 1]), r'weights=\[ 1  1 -1  1\] are negative or NaN: give 0'),
  (lambda: step(weights=jnp.array([1, 1, jnp.nan, 1])), r'are negative or NaN: give 0'),
  (
    lambda: OuterStep(LEVELS, optax.sgd(1.0), inner_optimizer='adamm'),
    r"inner_optimizer='adamm': use one of adamw, mu",
  ),
]


@pytest.mark.parametrize('call, message', WRONG)
def test_wrong_arguments_are_named_with_the_fix(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_the_containers_of_a_state_are_those_of_the_outer_step():
  with pytest.raises(ValueError, match=r'state: .*; give outer.init'):
    step(state=OUTER.init(MODULES)._asdict())


def test_what_numpy_and_checkpoints_hold_is_accepted():
  of_numpy = jax.tree.map(np.asarray, (MODULES, OUTER.init(MODULES), LEVELS.paths(MODULES)))
  step(**dict(zip(('modules', 'state', 'paths'), of_numpy, strict=True)), weights=np.ones(4))
  in_float64 = jax.tree.map(np.float64, PARAMS)  # arrays of JAX have 32 bits
  Levels(Grid(a=2), in_float64, all=('', '')).start(PARAMS)
  run_phase(params=of_numpy[2], batches=np.zeros((4, 3)))


def test_checks_read_no_values_and_add_nothing_to_the_program(monkeypatch):
  arguments = MODULES, OUTER.init(MODULES), LEVELS.paths(MODULES), jnp.ones(4)
  program = str(jax.make_jaxpr(OUTER.step)(*arguments))
  monkeypatch.setattr(checks, 'check_like', lambda *args, **options: None)
  assert str(jax.make_jaxpr(OUTER.step)(*arguments)) == program
