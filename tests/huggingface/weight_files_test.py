"""PyTorch's own files of weights are read as safetensors are, and run nothing; indices name files beside them alone."""

import json
import pathlib
import pickle
import sys

import numpy as np
import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import weight_files

A, B = np.arange(6, dtype='f').reshape(2, 3), np.ones(3, 'f')


def write(folder: pathlib.Path, name: str = weight_files.TORCH, **tensors):
  torch = pytest.importorskip('torch')
  given = {'a.weight': torch.from_numpy(A), 'b.weight': torch.from_numpy(B).bfloat16()} | tensors
  torch.save(given, folder / name)


def test_pytorchs_own_are_read(tmp_path):
  write(tmp_path)
  assert weight_files.find(str(tmp_path)) == ['pytorch_model.bin']
  assert weight_files.shapes(str(tmp_path), weight_files.TORCH) == {'a.weight': (2, 3), 'b.weight': (3,)}
  sha256, found, names = weight_files.load(str(tmp_path), weight_files.TORCH, {'a.weight', 'b.weight', 'c.weight'})
  assert len(sha256) == 64 and found.keys() == {'a.weight', 'b.weight'} and {*names} == {*found}
  assert all(x.dtype == np.float32 for x in found.values())
  assert (found['a.weight'] == A).all() and (found['b.weight'] == B).all()


def test_shards_are_those_of_the_index(tmp_path):
  for name in ('pytorch_model-00001-of-00002.bin', 'pytorch_model-00002-of-00002.bin'):
    write(tmp_path, name)
  index = {
    'weight_map': {'a.weight': 'pytorch_model-00001-of-00002.bin', 'b.weight': 'pytorch_model-00002-of-00002.bin'}
  }
  (tmp_path / 'pytorch_model.bin.index.json').write_text(json.dumps(index))
  assert weight_files.find(str(tmp_path)) == ['pytorch_model-00001-of-00002.bin', 'pytorch_model-00002-of-00002.bin']
  (tmp_path / weight_files.WEIGHTS).touch()  # goes first, as in transformers
  assert weight_files.find(str(tmp_path)) == [weight_files.WEIGHTS]


@pytest.mark.parametrize('of', [{}, None, ['a'], {'a': '../../etc/passwd'}, {'a': '/etc/passwd'}])
def test_an_index_names_files_beside_it(tmp_path, of):
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': of}))
  with pytest.raises(InputError, match=r'index\.json has no weight_map with names of files next to it'):
    weight_files.find(str(tmp_path))


class Evil:
  def __reduce__(self):
    return pathlib.Path.touch, (pathlib.Path('was-here'),)


def test_a_file_that_would_run_something_is_rejected(tmp_path, monkeypatch):
  pytest.importorskip('torch')
  monkeypatch.chdir(tmp_path)
  (tmp_path / weight_files.TORCH).write_bytes(pickle.dumps({'a.weight': Evil()}))
  with pytest.raises(InputError, match='not a PyTorch file of weights only'):
    weight_files.load(str(tmp_path), weight_files.TORCH, {'a.weight'})
  write(tmp_path, odd=Evil())
  with pytest.raises(InputError, match='not a PyTorch file of weights only'):
    weight_files.shapes(str(tmp_path), weight_files.TORCH)
  assert not (tmp_path / 'was-here').exists()


def test_what_is_no_weight_is_named(tmp_path):
  torch, folder = pytest.importorskip('torch'), str(tmp_path)
  for kind in (torch.int8, torch.float8_e4m3fn):
    write(tmp_path, **{'a.weight': torch.ones(2, 3).to(kind)})
    with pytest.raises(InputError, match=f"weights of type '{kind}': convert them to float32"):
      weight_files.shapes(folder, weight_files.TORCH)
  write(tmp_path, state_dict={'a.weight': torch.ones(2)})
  with pytest.raises(InputError, match='does not hold tensors by name'):
    weight_files.shapes(folder, weight_files.TORCH)
  data = (tmp_path / weight_files.TORCH).read_bytes()
  (tmp_path / weight_files.TORCH).write_bytes(data[: len(data) // 2])
  with pytest.raises(InputError, match='or incomplete'):
    weight_files.load(folder, weight_files.TORCH, {'a.weight'})


def test_without_pytorch_that_is_said(tmp_path, monkeypatch):
  (tmp_path / weight_files.TORCH).write_bytes(b'x')
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(InputError, match=r"pytorch_model\.bin is PyTorch's own file: pip install torch, or convert it"):
    weight_files.shapes(str(tmp_path), weight_files.TORCH)
