"""Each worker of `dipaco local` has a device of its own; other roles have none."""

import pytest

from dipaco_jax.command_line import worker_devices
from dipaco_jax.core.errors import InputError
from dipaco_jax.training import devices


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """A function that gives this machine a number of GPUs, and JAX a plugin for them."""
  monkeypatch.setattr(devices, 'GPU_FILES', (f'{tmp_path}/nvidia[0-9]*',))
  monkeypatch.setattr(devices, 'TPU_FILES', (f'{tmp_path}/accel[0-9]*',))
  monkeypatch.setattr(devices, 'NEWER_TPU_FILES', f'{tmp_path}/vfio[0-9]*')
  monkeypatch.setattr(worker_devices, 'AMD_NODES', f'{tmp_path}/*/gpu_id')

  def make(gpus: int, plugin: str = 'xla_cuda12', amd: int = 0):
    monkeypatch.setattr(worker_devices, 'jax_plugins', lambda: [plugin])
    for i in range(gpus):
      (tmp_path / f'nvidia{i}').touch()
    for i in range(amd + 1):  # the first is the CPU
      (tmp_path / str(i)).mkdir()
      (tmp_path / str(i) / 'gpu_id').write_text(f'{i and 4711}\n')

  return make


@pytest.mark.parametrize(
  ('variables', 'expected'),
  [
    ({}, ['0', '1', '2']),
    ({'JAX_PLATFORMS': 'cuda,cpu'}, ['0', '1', '2']),
    ({'JAX_PLATFORMS': 'cpu'}, []),
    ({'CUDA_VISIBLE_DEVICES': '2,0'}, ['2', '0']),
    ({'CUDA_VISIBLE_DEVICES': 'GPU-5f,MIG-7a'}, ['GPU-5f', 'MIG-7a']),
    ({'CUDA_VISIBLE_DEVICES': '1,-1,2'}, ['1']),
    ({'CUDA_VISIBLE_DEVICES': ''}, []),
  ],
)
def test_a_worker_gets_one_of_the_gpus_that_the_environment_allows(variables, expected, machine):
  machine(3)
  assert [env['CUDA_VISIBLE_DEVICES'] for env in worker_devices.environments(variables)] == expected


def test_gpus_that_jax_cannot_use_do_not_count(machine):
  machine(3, plugin='xla_other')
  assert worker_devices.environments({}) == []


def test_amd_gpus(machine):
  machine(0, plugin='xla_rocm60', amd=2)
  assert worker_devices.environments({}) == [{'ROCR_VISIBLE_DEVICES': '0'}, {'ROCR_VISIBLE_DEVICES': '1'}]
  assert worker_devices.environments({'HIP_VISIBLE_DEVICES': '1'}) == [{'HIP_VISIBLE_DEVICES': '1'}]


def test_workers_are_as_many_as_there_are_gpus_unless_said_otherwise():
  gpus = [{'CUDA_VISIBLE_DEVICES': str(i)} for i in range(4)]
  assert worker_devices.assign(None, 0, gpus) == (4, gpus)
  assert worker_devices.assign(None, 1, gpus) == (3, gpus)
  assert worker_devices.assign(2, 1, gpus) == (2, gpus[:3])
  assert worker_devices.assign(None, 1, []) == (2, [{}] * 3)
  assert worker_devices.assign(7, 0, []) == (7, [{}] * 7)


@pytest.mark.parametrize(
  ('workers', 'backups', 'found', 'message'),
  [
    (5, 0, [{'CUDA_VISIBLE_DEVICES': ''}] * 4, '--workers=5: .* this machine has 4 GPUs; .*JAX_PLATFORMS=cpu'),
    (1, 1, [{'CUDA_VISIBLE_DEVICES': '0'}], '--workers=1 and --backups=1: .* this machine has 1 GPU; '),
    (2, 0, [{}], 'one TPU, of which a worker takes all chips'),
  ],
)  # fmt: skip
def test_more_workers_than_devices_are_rejected(workers, backups, found, message):
  with pytest.raises(InputError, match=message):
    worker_devices.assign(workers, backups, found)
