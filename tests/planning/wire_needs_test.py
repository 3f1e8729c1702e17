"""The line that the islands of a config need; tests/project/wire_simulation_test.py compares it with a simulation."""

import pytest

from dipaco_jax.config import settings
from dipaco_jax.models import transformer
from dipaco_jax.planning import wire_needs

MODEL = dict(width=32, num_layers=4, num_heads=2, head_dim=16, mlp_dim=64, seq_len=64)


def made(wire: str, grid: dict[str, int], **outer) -> settings.Settings:
  axes = [*grid]
  levels = (('ends', 'embed|final', ()), ('low', 'block_[01]', axes[:1]), ('high', 'block_[23]', axes[1:2]))
  sections = {'model': MODEL, 'grid': grid, 'levels': levels, 'outer': {'wire': wire} | outer}
  return settings.from_dict(sections | {'train': {'steps_per_phase': 20, 'steps_per_dispatch': 2, 'phases': 4}})


def test_without_overlap_a_path_waits_for_all_that_it_sends_and_reads():
  traffic = wire_needs.make_traffic(made('lan', {'a': 4, 'b': 4}))
  exchanged = sum(traffic.message.values()) + sum(traffic.version.values())
  phase_s, share = 20 * 0.5, wire_needs.TARGET
  line = wire_needs.line_bytes_per_s(traffic, 0.5)
  assert phase_s / (phase_s + exchanged / line) == pytest.approx(share)
  assert wire_needs.line_bytes_per_s(traffic, 0.5, 2) == pytest.approx(line / 2)


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


def test_nothing_is_reported_of_what_islands_do_not_do():
  one = settings.from_dict({'model': MODEL, 'grid': {'a': 1}})
  for s in (one, made('lan', {'a': 2, 'b': 2}, lost=0.5)):
    assert wire_needs.estimate(s, (1.0,)) == {} and wire_needs.to_text({}) == []


def test_speeds_in_words():
  assert [wire_needs.speed(x) for x in (0.5, 123.4, 999.9, 50_000.0)] == [
    '0.5 Mbit/s', '123 Mbit/s', '1 Gbit/s', '50 Gbit/s',
  ]  # fmt: skip
