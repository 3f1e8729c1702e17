"""Devices in words, and a warning where JAX fell back to the CPU."""

import importlib
import logging
import sys
import types

import pytest

from dipaco_jax.processes import display
from dipaco_jax.training import devices


def device(kind: str, platform: str = 'tpu', limit: int | None = None):
  stats = None if limit is None else {'bytes_limit': limit}
  return types.SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats)


def test_accelerators_are_counted_with_their_memory():
  eight = [device('TPU v5 lite', limit=16 << 30)] * 8
  assert devices.describe(eight, eight, '') == '8 x TPU v5 lite, 16 GiB each'
  assert devices.describe(eight, eight[:4], '') == '8 x TPU v5 lite, 16 GiB each, 4 of them on this machine'
  assert devices.describe([device('NVIDIA H100', 'gpu')], [device('NVIDIA H100', 'gpu')], 'cuda') == '1 x NVIDIA H100'


def test_a_cpu_is_said_to_be_one(monkeypatch):
  monkeypatch.setattr(devices.os, 'sched_getaffinity', lambda pid: {0, 1})
  one = [device('cpu', 'cpu')]
  assert devices.describe(one, one, '').startswith('CPU, 2 cores, ')
  assert devices.describe(one, one, '').endswith(' GiB of memory: no GPU or TPU was found')
  assert devices.describe(one * 8, one * 8, 'cpu').startswith('8 devices on the CPU, ')
  assert devices.describe(one, one, 'cpu').endswith(': JAX_PLATFORMS=cpu')


@pytest.mark.parametrize(
  ('platform', 'platforms', 'accelerator', 'words'),
  [
    ('cpu', '', ('', ''), ''),
    ('cpu', 'cpu', ('GPU', '/dev/nvidia0'), ''),
    ('gpu', '', ('GPU', '/dev/nvidia0'), ''),
    ('cpu', '', ('GPU', '/dev/nvidia0'), 'this machine has a GPU (/dev/nvidia0): install JAX for it (pip install'),
    ('cpu', '', ('TPU', '/dev/accel0'), 'this machine has a TPU (/dev/accel0)'),
    ('cpu', 'cuda,cpu', ('', ''), 'JAX uses the CPU, but JAX_PLATFORMS=cuda,cpu names cuda first'),
  ],
)
def test_a_fall_back_to_the_cpu_is_explained(platform, platforms, accelerator, words):
  found = devices.explain_fallback(platform, platforms, accelerator)
  assert words in found and bool(words) == bool(found)


def test_accelerators_are_found_by_their_files(tmp_path, monkeypatch):
  vendor = tmp_path / 'vendor'
  for name in ('GPU_FILES', 'TPU_FILES'):
    monkeypatch.setattr(devices, name, (f'{tmp_path}/{name}[0-9]*',))
  monkeypatch.setattr(devices, 'NEWER_TPU_FILES', f'{tmp_path}/vfio[0-9]*')
  monkeypatch.setattr(devices, 'PCI_VENDORS', str(vendor))
  assert devices.find_accelerator() == ('', '')
  (tmp_path / 'vfio0').touch()
  vendor.write_text('0x8086\n')
  assert devices.find_accelerator() == ('', ''), 'of another maker'
  vendor.write_text('0x1ae0\n')
  assert devices.find_accelerator() == ('TPU', f'{tmp_path}/vfio0')
  for name, kind in (('TPU_FILES', 'TPU'), ('GPU_FILES', 'GPU')):
    (tmp_path / f'{name}0').touch()
    assert devices.find_accelerator() == (kind, f'{tmp_path}/{name}0')


@pytest.mark.parametrize(
  ('file', 'variables', 'is_hidden'),
  [('', {}, True), ('accel0', {}, False), ('vfio0', {}, False), ('', {'JAX_PLATFORMS': 'tpu,cpu'}, False),
   ('', {'JAX_FORCE_TPU_INIT': '1'}, False)],
)  # fmt: skip
def test_libtpu_is_hidden_from_jax_where_there_is_no_tpu(file, variables, is_hidden, tmp_path, monkeypatch):
  (tmp_path / 'libtpu.py').touch()
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(devices, 'TPU_FILES', (f'{tmp_path}/accel[0-9]*',))
  monkeypatch.setattr(devices, 'NEWER_TPU_FILES', f'{tmp_path}/vfio[0-9]*')
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  del sys.modules['libtpu']
  if file:
    (tmp_path / file).touch()
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  devices.hide_unused_libtpu()
  if is_hidden:
    with pytest.raises(ImportError):  # what JAX takes for a machine without libtpu
      importlib.import_module('libtpu')
  devices.restore_libtpu()
  importlib.import_module('libtpu')


def test_the_line_and_the_warning_are_shown(monkeypatch, capsys, caplog):
  monkeypatch.setattr(devices, 'find_accelerator', lambda: ('GPU', '/dev/nvidia0'))
  monkeypatch.setattr(devices, 'named_platforms', lambda: '')
  monkeypatch.setattr(display.STDERR, 'only_terminal', False)
  with caplog.at_level(logging.WARNING):
    devices.show()
  assert capsys.readouterr().err.startswith('devices: ')
  assert 'this machine has a GPU (/dev/nvidia0)' in caplog.text
