"""FLOPs of matrix products in a program, counted from its trace, for user-defined blocks."""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.extend import core

from dipaco_jax.config import settings
from dipaco_jax.models import block as block_lib


def of_blocks(config: settings.Model, length: int) -> int:
  """Returns the FLOPs of all blocks' matrix products, of a forward pass over one row of `length` tokens."""
  plain = dataclasses.replace(config, dtype='float32', attention='xla', layers='unrolled')
  x_BLD, ids_BL = (jax.ShapeDtypeStruct((1, length, *more), t) for more, t in (((config.width,), 'f'), ((), 'i')))

  def forward(block: Any, *args: Any) -> Any:
    return block_lib.call(plain, lambda *a: block.init_with_output(jax.random.key(0), *a)[0], *args)[0]

  period, blocks = block_lib.period(plain), block_lib.blocks(plain)
  once = [
    of_jaxpr(jax.make_jaxpr(functools.partial(forward, block))(x_BLD, ids_BL, ids_BL)) for block in blocks[:period]
  ]
  return sum(once[n % period] for n in range(config.num_layers))


def of_jaxpr(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> int:
  """Returns the FLOPs of the products and convolutions in a jaxpr: of a scan times its length, of a while loop once.

  Those inside kernels of Pallas are counted once too, though a kernel runs many times.
  """
  total = 0
  for eqn in jaxpr.eqns:
    shapes: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      total += 2 * shapes[-1].size * math.prod(shapes[0].shape[i] for i in contracted)
    elif eqn.primitive.name == 'conv_general_dilated':
      kernel, outputs = shapes[1], eqn.params['dimension_numbers'].rhs_spec[0]
      total += 2 * shapes[-1].size * kernel.size // kernel.shape[outputs]
    times = eqn.params['length'] if eqn.primitive.name == 'scan' else 1
    total += times * sum(map(of_jaxpr, core.jaxprs_in_params(eqn.params)))
  return total
