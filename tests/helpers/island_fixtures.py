"""Fixtures of islands runs in one process: a machine, and a place where training is about to begin."""

import functools
import pathlib

import one_process
import pytest
from one_process import Faults, Machine


@pytest.fixture(scope='module')
def one_device():
  with one_process.one_device():
    yield


@functools.cache
def make_prepared(base: pathlib.Path) -> tuple[Machine, pathlib.Path]:
  """Prepares a run once for all files of a process, below the folder of its temporary files."""
  config, place = base / 'config_of_islands', base / 'prepared_islands'
  config.mkdir()
  place.mkdir()
  machine = Machine(one_process.two_phases(config), {})
  with one_process.one_device():
    machine.to_the_end(place, Faults(), end=one_process.PREPARED)
  return machine, place


@pytest.fixture(scope='module')
def machine(tmp_path_factory) -> Machine:
  return make_prepared(tmp_path_factory.getbasetemp())[0]


@pytest.fixture(scope='module')
def prepared(tmp_path_factory) -> pathlib.Path:
  """A place to copy, where training is about to begin."""
  return make_prepared(tmp_path_factory.getbasetemp())[1]
