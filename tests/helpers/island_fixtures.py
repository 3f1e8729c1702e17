"""Fixtures of islands runs in one process: a machine, and a place where training is about to begin."""

import pathlib

import one_process
import pytest
from one_process import Faults, Machine


@pytest.fixture(scope='module')
def one_device():
  with one_process.one_device():
    yield


@pytest.fixture(scope='module')
def machine(tmp_path_factory) -> Machine:
  return Machine(one_process.two_phases(tmp_path_factory.mktemp('config')), {})


@pytest.fixture(scope='module')
def prepared(machine, tmp_path_factory) -> pathlib.Path:
  """A place to copy, where training is about to begin."""
  place = tmp_path_factory.mktemp('prepared')
  machine.to_the_end(place, Faults(), end=one_process.PREPARED)
  return place
