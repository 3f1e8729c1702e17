"""Registries in SQLite and in PostgreSQL, as fixtures, and tasks to put into them."""

import postgres
import pytest

from dipaco_jax.registry.registry import NewTask, Registry


@pytest.fixture(scope='module')
def server():
  made = postgres.Server()
  yield made
  made.stop()


@pytest.fixture(params=['sqlite', 'postgresql'])
def url(request, tmp_path) -> str:
  if request.param == 'sqlite':
    return f'sqlite:///{tmp_path}/registry.db'
  return request.getfixturevalue('server').new_database()


@pytest.fixture
def connect(url):
  """Registries of this test's database, closed after it."""
  made = []

  def one(**options) -> Registry:
    made.append(Registry(url, **options))
    return made[-1]

  yield one
  for each in made:
    each.close()


@pytest.fixture
def db(connect) -> Registry:
  return connect()


def train(*names: tuple[str, int], state='ready') -> list[NewTask]:
  return [NewTask('train', key, number, state) for key, number in names]
