"""Runs the command with a path poisoned by hand.

    python tests/helpers/poison.py PATH STEP KIND --config=... --workdir=...

After the dispatch with the global step STEP, the parameters of PATH are of KIND: 'nan', 'huge' or 'noise'. Pretraining
is path 0 before its last step. Wherever the path is trained, in one job or in a role of an islands run.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.training import programs, train_state

KINDS = {
  'nan': lambda x: jnp.full_like(x, jnp.nan),
  'huge': lambda x: x + 1000,
  'noise': lambda x: jnp.asarray(np.random.default_rng(0).normal(0, 20, x.shape), x.dtype),
}


def poisoned(made: programs.Programs, steps, paths, step: int, kind: str):
  """`Programs.steps` that leaves these paths with bad parameters after that global step."""

  def run(params, inner, tokens, segments, first_step, weights, turn):
    params, inner, found = steps(params, inner, tokens, segments, first_step, weights, turn)
    here = np.isin(made.placement.paths(tuple(np.asarray(turn).tolist())), paths)
    if first_step <= step < first_step + tokens.shape[0] and here.any():
      bad = jax.tree.map(KINDS[kind], params)
      params = train_state.choose(bad, params, here.reshape(made.placement.positions))
    return params, inner, found

  return run


def main():
  path, step, kind, *argv = sys.argv[1:]
  steps = programs.Programs.steps

  class Steps:
    """In the place of the cached property `Programs.steps`."""

    def __get__(self, made, owner):
      if made not in compiled:
        compiled[made] = poisoned(made, steps.func(made), [int(path)], int(step), kind)
      return compiled[made]

  compiled: dict = {}
  programs.Programs.steps = Steps()
  from dipaco_jax import main as command

  command.main(['main', *argv])


if __name__ == '__main__':
  main()
