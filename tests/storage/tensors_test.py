"""Arrays as bytes are those of safetensors, without its copies."""

import ml_dtypes
import numpy as np
import safetensors.numpy

from dipaco_jax.storage import tensors


def test_numbers_that_are_not_finite_are_found():
  most = np.finfo('f').max
  sound = {'a': np.full(9, most, 'f'), 'b': np.arange(3), 'c': np.zeros((0, 2))}
  assert tensors.find_not_finite(sound) == ''
  for bad in ([1, np.nan], [np.inf, -np.inf], [most, np.inf]):
    assert tensors.find_not_finite(sound | {'d': np.array(bad, 'f')}) == 'd'
    assert tensors.find_not_finite({'e': np.array(bad).astype(ml_dtypes.bfloat16)} | sound) == 'e'


def test_bytes_are_those_of_safetensors_and_are_not_copied():
  arrays = {
    f'[{i}].é"{name}': np.arange(-6, 6).reshape(3, 2, 2)[..., :i].astype(dtype)
    for name, dtype in tensors.DTYPES.items()
    for i in range(3)
  } | {'scalar': np.float32(3), 'in another order': np.arange(6).reshape(2, 3).T}
  data = tensors.to_bytes(arrays)
  assert data == safetensors.numpy.save({name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()})
  assert data == tensors.to_bytes(dict(reversed(arrays.items())))
  found = tensors.from_bytes(data)
  assert found.keys() == arrays.keys()
  for name, x in found.items():
    assert x.dtype == arrays[name].dtype and not x.flags.owndata
    np.testing.assert_array_equal(x, arrays[name])
  assert tensors.to_bytes({}) == safetensors.numpy.save({}) and tensors.from_bytes(tensors.to_bytes({})) == {}
