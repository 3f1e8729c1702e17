"""Whatever the number of paths, SQLite finds rows by an index on all that is asked for."""

import json
import re

import pytest
import sqlalchemy as sa

from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact, NewTask

# What asks for all of a kind that can be claimed finds them by an index that holds nothing else.
PARTIAL = (
  *('dipaco_tasks_open', 'dipaco_tasks_undone', 'dipaco_facts_unscheduled'),
  *('dipaco_tasks_held', 'dipaco_tasks_ready', 'dipaco_tasks_running'),
)


@pytest.fixture
def plans(tmp_path):
  """A registry, and {statement: its plan} of those that it executes."""
  made, asked = registry.Registry(f'sqlite:///{tmp_path}/registry.db'), {}

  def note(connection, cursor, statement, parameters, context, many):
    if re.match('SELECT|UPDATE', statement):
      asked.setdefault(statement, parameters[0] if many else parameters)

  sa.event.listen(sa.Engine, 'before_cursor_execute', note)

  def explained() -> dict[str, list[str]]:
    sa.event.remove(sa.Engine, 'before_cursor_execute', note)
    with sa.create_engine(f'sqlite:///{tmp_path}/registry.db').connect() as connection:
      explain = lambda statement: connection.exec_driver_sql(f'EXPLAIN QUERY PLAN {statement}', asked[statement])  # noqa: E731
      return {statement: [row[3] for row in explain(statement)] for statement in asked}

  yield made, explained
  made.close()


def test_every_query_finds_its_rows_by_an_index(plans):
  made, explained = plans
  made.add_tasks([NewTask('outer', 'low/0', 1, 'waiting'), NewTask('train', '0', 0)])
  task = made.claim('worker-0', ['train', 'outer'])
  facts = [Fact('checkpoint', '0', 0, '', '', {})]
  made.heartbeat(task)
  made.complete(task, facts)
  made.wake('outer', ['low/0', 'low/1'], 1)
  made.mark_scheduled(facts)
  assert made.facts('checkpoint', ['0', '1'], 0) == facts
  made.release(made.claim('worker-0', ['train', 'outer'], ['low/0']))
  made.claim('worker-0', ['train'], holder='mine')
  found = explained()
  searched = [(statement, line) for statement, lines in found.items() for line in lines if 'dipaco_' in line]
  assert len(found) >= 7 and len(searched) >= 7
  assert any('dipaco_tasks_held (kind=? AND holder=?)' in line for _, line in searched)
  for statement, line in searched:
    whole = re.search(r'rowid=\?|\(kind=\? AND key=\?( AND number=\?)?\)', line)
    is_count = ' AS withdrawn' in statement or 'SET scheduled' in statement  # of withdrawals, owners that join: rare
    of_few = is_count and line.endswith('dipaco_facts_by_number (kind=?)')
    is_short = whole or of_few or any(name in line for name in PARTIAL)
    assert line.startswith('SEARCH') and is_short, json.dumps([statement, line])
