"""The line that the islands of a config need: one worker's paths tell what a simulation of all would."""

import math

import pytest
import slow

from dipaco_jax.core import settings
from dipaco_jax.models import transformer
from dipaco_jax.planning import wire_needs, wire_simulation
from dipaco_jax.planning.wire_simulation import Conditions

MODEL = dict(width=32, num_layers=4, num_heads=2, head_dim=16, mlp_dim=64, seq_len=64)


def made(wire: str, grid: dict[str, int], **outer) -> settings.Settings:
  axes = [*grid]
  levels = (('ends', 'embed|final', ()), ('low', 'block_[01]', axes[:1]), ('high', 'block_[23]', axes[1:2]))
  sections = {'model': MODEL, 'grid': grid, 'levels': levels, 'outer': {'wire': wire} | outer}
  return settings.from_dict(sections | {'train': {'steps_per_phase': 20, 'steps_per_dispatch': 2, 'phases': 4}})


@pytest.mark.parametrize('wire', ['lan', 'wan', 'thin'])
@pytest.mark.parametrize('paths_per_worker', slow.all_but([1, 2, 4], 2))
def test_one_worker_tells_what_all_would(wire, paths_per_worker):
  traffic = wire_needs.make_traffic(made(wire, {'a': 4, 'b': 4}))
  conditions = Conditions((0.5,), paths_per_worker=paths_per_worker)
  expected = wire_simulation.find_lines(traffic, conditions, [wire_needs.TARGET])[wire_needs.TARGET]
  found = wire_needs.line_bytes_per_s(traffic, 0.5, paths_per_worker)
  assert math.isfinite(found) and found == pytest.approx(expected, rel=0.02)


def test_more_paths_than_are_simulated_do_not_take_longer():
  traffic = wire_needs.make_traffic(made('lan', {'a': 16, 'b': 16}))
  few, all_paths = (wire_needs.line_bytes_per_s(traffic, 0.5, n) for n in (wire_needs.MOST_PATHS, 256))
  assert few == all_paths <= wire_needs.line_bytes_per_s(traffic, 0.5, 1)


def test_figures_are_the_arrays_bytes_and_a_line_for_each_time():
  s = made('lan', {'a': 2, 'b': 2})
  shapes = transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))
  found = wire_needs.estimate(s, (0.1, 1.0))
  sent, state = (found[f'island_{name}_bytes_per_phase'] for name in ('sent', 'state'))
  assert sent == found['island_read_bytes_per_phase'] and state == pytest.approx(2 * sent / 16, rel=0.01)
  assert sent == 4 * sum(x.size for x in shapes.values())
  fast, slow = found['island_line_mbits']
  assert fast == pytest.approx(10 * slow, rel=0.02)
  text = '\n'.join(wire_needs.to_text(found | {'chips_per_path': 2}))
  assert f'{slow:,.3g} Mbit/s to {fast:,.3g} Mbit/s' in text and '2 chips' in text
  assert 'line needed' not in '\n'.join(wire_needs.to_text(wire_needs.estimate(s, ())))


def test_nothing_is_told_of_what_islands_do_not_do():
  one = settings.from_dict({'model': MODEL, 'grid': {'a': 1}})
  for s in (one, made('lan', {'a': 2, 'b': 2}, lost=0.5)):
    assert wire_needs.estimate(s, (1.0,)) == {} and wire_needs.to_text({}) == []


def test_speeds_in_words():
  assert [wire_needs.speed(x) for x in (0.5, 123.4, 999.9, 50_000.0)] == [
    '0.5 Mbit/s', '123 Mbit/s', '1 Gbit/s', '50 Gbit/s',
  ]  # fmt: skip
  assert wire_needs.speed(None) == wire_needs.speed(math.inf) == 'more than any line has'
