"""Topologies by name: the compiler provides them, and errors about unknown names list the known ones."""

import types

import jax
import pytest
from jax.experimental import topologies

from dipaco_jax.planning import topology

KINDS = 'kinds are v4, v5e, v5p, v6e'
UNKNOWN = [('v5e', KINDS), ('v5e:3x5', 'a shape of 1x1, 2x2, 2x4'), ('v7:2x2', KINDS), ('v5e:2x2*', KINDS), ('', KINDS)]


@pytest.mark.parametrize('name, known', UNKNOWN)
def test_the_error_about_an_unknown_topology_lists_the_known_ones(name, known):
  with pytest.raises(ValueError, match=known):
    topology.find_topology(name)


@pytest.mark.parametrize(
  'name, asked',
  [
    ('v5e:2x4', {'topology_name': 'v5e:2x4', 'num_slices': 1}),
    ('v5e:2x2*3', {'topology_name': 'v5e:2x2', 'num_slices': 3}),
    ('v4:2x2x1', {'topology_name': 'v4:2x2x1', 'num_slices': 1, 'chip_config_name': 'megacore'}),
  ],
)
def test_the_compiler_is_asked_for_the_topology_that_is_named(name, asked, monkeypatch):
  calls = []

  def describe(**options):
    calls.append(options)
    return types.SimpleNamespace(devices=jax.devices()[:4])

  monkeypatch.setattr(topologies, 'get_topology_desc', describe)
  description = topology.find_topology(name)
  assert calls == [asked | {'platform': 'tpu'}] and description.name == name
  assert description.slices == asked['num_slices']
