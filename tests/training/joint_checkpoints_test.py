"""Checkpoints of two processes on disks of their own: parts that add up, for any number of processes and devices."""

import json
import subprocess
import sys

import jax
import numpy as np
import ports
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from dipaco_jax.buckets import mirror
from dipaco_jax.storage import object_store
from dipaco_jax.training import run_checkpoints

SHARDED, WHOLE = np.arange(64, dtype=np.float32).reshape(8, 8), np.arange(3, dtype=np.float32)

PROCESS = """
import pathlib, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from dipaco_jax.buckets import disks_apart, mirror, other_disk
from dipaco_jax.storage import object_store
from dipaco_jax.buckets import disks
from dipaco_jax.processes import processes
from dipaco_jax.training import run_checkpoints

place, scratch, port, index = sys.argv[1:]
processes.join(f'localhost:{port}', 2, int(index))
storage, scratch, peers = object_store.open_storage(place), pathlib.Path(scratch), disks.peers()
scratch.mkdir()
if processes.is_first():
  others = disks_apart.Others(peers)
  made = mirror.Mirror(storage, scratch, others)
  disk = disks.Disk(made, disks_apart.First(made, peers))
  (scratch / 'run').mkdir()
  (scratch / 'run' / 'config.json').write_text('{}')
else:
  made = other_disk.Other(storage, scratch, peers)
  disk = disks.Disk(made, made)
folder, mesh = made.workdir / 'checkpoints' / 'train', jax.make_mesh((2,), ('a',))
values = {'sharded': (np.arange(64, dtype=np.float32).reshape(8, 8), P('a')), 'whole': (np.arange(3, dtype='f'), P())}

def array(x, spec):
  return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

def opened():
  return run_checkpoints.RunCheckpoints(folder, 2, 1, made.publish_checkpoint, disk)

arrays = {name: array(*value) for name, value in values.items()}
state = opened()
for updates in (4, 8):
  state.save(updates, arrays, {'process': index})
state.close()
print(sorted(str(file.relative_to(folder / '8')) for file in (folder / '8').rglob('*') if file.is_file()))
disk.follow('saved', with_checkpoints=True)
state = opened()
abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays.items()}
found, meta = state.restore(lambda meta: abstract)
assert meta == {'process': '0'}, meta
for name, x in found.items():
  for ours, theirs in zip(x.addressable_shards, arrays[name].addressable_shards):
    np.testing.assert_array_equal(ours.data, theirs.data)
state.close()
if processes.is_first():
  others.close()
made.wait()
"""


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> tuple[str, list[set[str]]]:
  """(a bucket with checkpoints of two processes, which went on from the last; the files that each wrote of it)."""
  folder, port = tmp_path_factory.mktemp('joint'), str(ports.free_port())
  place = (folder / 'place').as_uri()
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', PROCESS, place, folder / f'scratch-{k}', port, str(k)],
      env={'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': ':'.join(sys.path)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for k in range(2)
  ]
  found = []
  for process in processes:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-4000:]
    found.append({*json.loads(out.splitlines()[-1].replace("'", '"'))})
  return place, found


@pytest.mark.slow
def test_each_process_writes_and_seals_its_shards(saved):
  place, (first, other) = saved
  assert 'arrays/sharded/0.0' in first and 'arrays/sharded/1.0' not in first
  assert 'arrays/sharded/1.0' in other and 'arrays/whole/0' not in other
  storage = object_store.open_storage(place)
  parts = [json.loads(bytes(storage.fetch(f'checkpoints/train.sha256/8/{k}.json'))).keys() for k in range(2)]
  assert parts[0] == first and parts[1] == other - first and 'arrays/sharded/1.0' in parts[1]
  assert json.loads(bytes(storage.fetch('checkpoints/train/8.index.json'))).keys() == first | other


@pytest.mark.slow
def test_one_process_restores_it_on_other_devices(saved, tmp_path):
  one = mirror.Mirror(object_store.open_storage(saved[0]), tmp_path)
  one.fetch_files(names := one.names())
  one.fetch_trees(names, is_finished=False, all_checkpoints=False)
  mesh = jax.make_mesh((4, 2), ('a', 'b'))
  wanted = {
    'sharded': jax.ShapeDtypeStruct(SHARDED.shape, SHARDED.dtype, sharding=NamedSharding(mesh, P('a', 'b'))),
    'whole': jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype, sharding=NamedSharding(mesh, P())),
  }
  state = run_checkpoints.RunCheckpoints(one.workdir / 'checkpoints' / 'train', 2)
  try:
    found, meta = state.restore(lambda meta: wanted)
  finally:
    state.close()
  assert meta == {'process': '0'}
  np.testing.assert_array_equal(found['sharded'], SHARDED)
  np.testing.assert_array_equal(found['whole'], WHOLE)
