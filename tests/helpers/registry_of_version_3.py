"""What a program of version 3 of the registry's tables wrote: its tables, tasks in every state, and its claim."""

import sqlalchemy as sa

from dipaco_jax.islands import database

TABLES = """
CREATE TABLE dipaco_facts (kind {text} NOT NULL, key {text} NOT NULL, number INTEGER NOT NULL, uri TEXT NOT NULL,
  sha256 TEXT NOT NULL, meta TEXT NOT NULL, scheduled BOOLEAN NOT NULL, PRIMARY KEY (kind, key, number));
CREATE INDEX dipaco_facts_by_number ON dipaco_facts (kind, number);
CREATE INDEX dipaco_facts_unscheduled ON dipaco_facts (number) WHERE NOT scheduled;
CREATE TABLE dipaco_roles (name {text} NOT NULL, role {text} NOT NULL, about TEXT NOT NULL,
  seen DOUBLE PRECISION NOT NULL, PRIMARY KEY (name, role));
CREATE TABLE dipaco_schema (version INTEGER NOT NULL);
CREATE TABLE dipaco_tasks (id {id} NOT NULL, kind {text} NOT NULL, key {text} NOT NULL, number INTEGER NOT NULL,
  state TEXT NOT NULL, lease DOUBLE PRECISION, fence INTEGER NOT NULL, attempts INTEGER NOT NULL,
  wakes INTEGER NOT NULL, owner TEXT NOT NULL, progress TEXT, error TEXT NOT NULL, claimed DOUBLE PRECISION,
  ended DOUBLE PRECISION, PRIMARY KEY (id), UNIQUE (kind, key, number));
CREATE INDEX dipaco_tasks_open ON dipaco_tasks (kind, number, id) WHERE lease IS NOT NULL;
CREATE INDEX dipaco_tasks_undone ON dipaco_tasks (kind, number) WHERE state <> 'done';
INSERT INTO dipaco_schema VALUES (3);
INSERT INTO dipaco_facts VALUES ('checkpoint', '0', 0, 'x', 'f', '{{}}', true);
"""
ADD = """
INSERT INTO dipaco_tasks (kind, key, number, state, lease, fence, attempts, wakes, owner, error, claimed, ended) VALUES
  ('{kind}', '{key}', {number}, '{state}', {lease}, 1, 1, 0, '{owner}', '', NULL, NULL)"""
CLAIM = """
UPDATE dipaco_tasks SET state='running', lease=({now} + 30), fence=(dipaco_tasks.fence + 1),
  attempts=(dipaco_tasks.attempts + 1), owner='old', claimed={now}
WHERE dipaco_tasks.id = (
  SELECT dipaco_tasks.id FROM dipaco_tasks JOIN (
    SELECT anon_2.number AS number, anon_2.id AS id FROM (
      SELECT dipaco_tasks.number AS number, dipaco_tasks.id AS id FROM dipaco_tasks
      WHERE dipaco_tasks.kind = 'train' AND dipaco_tasks.lease <= {now}
      ORDER BY dipaco_tasks.number, dipaco_tasks.id LIMIT 100) AS anon_2
  ) AS anon_1 ON anon_1.id = dipaco_tasks.id
  WHERE dipaco_tasks.lease <= {now} ORDER BY dipaco_tasks.number, dipaco_tasks.id LIMIT 1 {skip})
RETURNING id, kind, key, number, fence, owner, wakes, progress"""
RELEASE = "UPDATE dipaco_tasks SET state='ready', lease=0.0, error='' WHERE id = {id} AND fence = {fence}"
DIALECTS = {
  'sqlite': {'text': 'TEXT', 'id': 'INTEGER', 'skip': '', 'now': "((julianday('now') - 2440587.5) * 86400.0)"},
  'postgresql': {
    'text': 'TEXT COLLATE "C"',
    'id': 'BIGSERIAL',
    'skip': 'FOR UPDATE OF dipaco_tasks SKIP LOCKED',
    'now': 'CAST(extract(epoch FROM statement_timestamp()) AS double precision)',
  },
}


class Old:
  """A program of version 3 that has made the tables."""

  def __init__(self, url: str):
    self._engine = database.connect(url)
    self._words = DIALECTS[self._engine.dialect.name]
    for statement in TABLES.strip().split(';\n'):
      self.run(statement.rstrip(';'))

  def run(self, statement: str, **values) -> list[sa.Row]:
    with self._engine.begin() as connection:
      found = connection.exec_driver_sql(statement.format(**self._words | values))
      return list(found) if found.returns_rows else []

  def add(self, key: str, state: str, lease: float | None, kind: str = 'train', number: int = 0, owner: str = ''):
    lease = 'NULL' if lease is None else lease
    self.run(ADD, kind=kind, key=key, number=number, state=state, lease=lease, owner=owner)

  def close(self):
    self._engine.dispose()
