"""Synthetic runs that several tests of reports look at."""

import pytest
import synthetic


@pytest.fixture(scope='session')
def runs(tmp_path_factory):
  """The workdir of a run by its name in synthetic.RUNS, made when it is asked for."""
  made = {}

  def make(name):
    if name not in made:
      made[name] = tmp_path_factory.mktemp('runs') / name
      synthetic.make(made[name], **synthetic.RUNS[name])
    return made[name]

  return make
