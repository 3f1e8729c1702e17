"""Sizes that are suggested for a text, a machine and a time."""

import pytest
import slow

from dipaco_jax.algorithm import modules
from dipaco_jax.config import settings
from dipaco_jax.models import transformer
from dipaco_jax.planning import sizing

HOUR = 3600 * 1e11  # FLOPs of a small machine


def settings_of(plan: sizing.Plan) -> settings.Settings:
  nested = settings.Settings().to_dict()
  for name, value in plan.fields().items():
    section, _, last = name.rpartition('.')
    (nested[section] if section else nested)[last] = value
  return settings.from_dict(nested)


@pytest.mark.parametrize('size', sizing.SIZES, ids=lambda size: f'width {size.width}')
@pytest.mark.parametrize('num_paths', slow.but([4, 16], 16))
def test_a_plan_counts_the_parameters_of_its_config(size, num_paths):
  plan = sizing.Plan(size, num_paths, 100, 10)
  s = settings_of(plan)
  shapes = transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))
  assert sum(x.size for x in shapes.values()) == size.parameters
  assert modules.make_layout(s.grid, s.levels, shapes).num_parameters(shapes) == plan.parameters_total
  assert s.num_paths == num_paths


def test_more_text_and_time_never_give_a_smaller_model():
  texts = [10.0**n for n in range(5, 13)]
  sizes = [sizing.make_plan(tokens, 1e30).size.parameters for tokens in texts]
  assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
  sizes = [sizing.make_plan(1e12, HOUR * hours).size.parameters for hours in (0.1, 1, 10, 100, 1e4, 1e6)]
  assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@pytest.mark.parametrize('tokens', [1e5, 1e6, 1e7, 1e8, 1e10])
@pytest.mark.parametrize('flops', [1e12, HOUR, 1e3 * HOUR, 1e9 * HOUR])
def test_a_plan_stays_within_text_and_time(tokens, flops):
  plan = sizing.make_plan(tokens, flops)
  own_tokens = plan.path_steps * plan.size.step_tokens
  is_least = plan.phases == 4
  assert is_least or own_tokens <= sizing.EPOCHS * tokens / plan.num_paths * 1.2  # phases are whole
  assert is_least or plan.flops <= flops * 1.2


def test_a_short_text_is_said_to_be_short():
  short, long = sizing.make_plan(5e5, 1e30), sizing.make_plan(5e7, 1e30)
  assert not short.has_enough_tokens and long.has_enough_tokens
  assert long.trained_tokens == pytest.approx(20 * long.size.parameters, rel=0.05)


def test_sixteen_paths_need_text_of_their_own():
  size = sizing.SIZES[-1]
  own = sizing.TOKENS_PER_PARAMETER * (1 - sizing.BASE_SHARE) * size.parameters
  assert sizing.make_plan(17 * own, 1e30).num_paths == 16 and sizing.make_plan(15 * own, 1e30).num_paths == 4


def test_the_outer_step_is_that_of_the_rule():
  plans = [sizing.Plan(size, 4, 100, 10) for size in sizing.SIZES]
  assert [s.outer.optimizer for s in map(settings_of, plans)] == [
    'nesterov'
  ] * 5  # the default, unless a config differs
  assert ['outer.optimizer' in plan.fields() for plan in plans] == [False] * 4 + [True]
