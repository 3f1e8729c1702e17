"""Every public name of the library has an example, and examples run."""

import doctest
import importlib
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dipaco_jax import algorithm
from dipaco_jax.algorithm import Grid, Levels, OuterStep

ROOM = pathlib.Path(algorithm.__file__).parent
FILES = sorted(file.stem for file in ROOM.glob('[a-z]*.py'))
NAMES = {'jax': jax, 'jnp': jnp, 'np': np, 'optax': optax, 'Grid': Grid}


@pytest.mark.parametrize('file', FILES)
def test_examples_run(file):
  module = importlib.import_module(f'dipaco_jax.algorithm.{file}')
  result = doctest.testmod(module, extraglobs=NAMES, optionflags=doctest.NORMALIZE_WHITESPACE)
  assert not result.failed


def public_functions() -> dict[str, object]:
  """Exported functions and classes, and the methods of Levels and OuterStep."""
  exported = {name: getattr(algorithm, name) for name in algorithm.__all__ if name not in ('State', 'Report')}
  for owner in (Levels, OuterStep):
    methods = inspect.getmembers(owner, inspect.isfunction)
    exported |= {f'{owner.__name__}.{name}': method for name, method in methods if not name.startswith('_')}
  return exported


@pytest.mark.parametrize('name', public_functions())
def test_what_is_public_has_an_example(name):
  assert '>>>' in inspect.getdoc(public_functions()[name])
