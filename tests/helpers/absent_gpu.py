"""Lowering for a GPU on a machine without one."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lowered(function, *args) -> str:
  """The text of a function for CUDA; JAX 0.11 asks for which GPU."""
  gpu = AbstractMesh((), (), abstract_device=AbstractDevice('NVIDIA H100 80GB HBM3', None, 'gpu'))
  with use_abstract_mesh(gpu):
    return jax.jit(function).trace(*args).lower(lowering_platforms=('cuda',)).as_text()
