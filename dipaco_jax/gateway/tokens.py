"""Tokens of workers, in a table of the registry's database: only their sha256, with what each of them may do.

The table is no part of the registry's schema, so that registries of runs that have no gateway stay as they are. A
token is looked up at every request, so a revoked one is rejected at once.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from dipaco_jax.core.errors import InputError
from dipaco_jax.registry import database
from dipaco_jax.registry.database import Among, Now, Row

METADATA = sa.MetaData()
TOKENS = sa.Table(
  'dipaco_tokens',
  METADATA,
  sa.Column('sha256', sa.Text, primary_key=True),
  sa.Column('name', sa.Text, nullable=False, unique=True),
  sa.Column('role', sa.Text, nullable=False),
  sa.Column('owner', sa.Text, nullable=False),  # for people; `paths` says what follows
  sa.Column('paths', sa.Text, nullable=False),  # JSON list; '' for all
  sa.Column('created', sa.Double, nullable=False),
  sa.Column('expires', sa.Double, nullable=False),
  sa.Column('revoked', sa.Double),
)
FIND = sa.select(TOKENS, Now().label('now')).where(Among(TOKENS.c.sha256, sa.bindparam('digests', type_=sa.Text)))
WORKER = 'worker'  # the only role
NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
BITS = 256
DAY_S = 86400.0


class Token(NamedTuple):
  """What a token says of the worker that has it."""

  name: str  # the worker's identity in the run
  paths: tuple[int, ...] | None  # that it may train; None: all
  expires: float  # unix seconds, by the database's clock
  owner: str = ''
  revoked: float | None = None

  def state(self, now: float) -> str:
    """Returns 'valid', 'expired' or 'revoked'."""
    if self.revoked is not None:
      return 'revoked'
    return 'valid' if now < self.expires else 'expired'


class Tokens:
  """The tokens of a run."""

  def __init__(self, url: str, patience_s: float = 20.0):
    """Makes the table if there is none. `url`: of the run's registry."""
    self._db = database.Database(url, patience_s, False)
    self._db.transact(lambda connection: METADATA.create_all(connection))

  def close(self):
    self._db.close()

  def add(self, name: str, paths: Sequence[int] | None, days: float, owner: str = '') -> str:
    """Makes a token and returns it: this once, as only its digest is kept. Raises InputError if the name is taken."""
    if not NAME.fullmatch(name):
      raise InputError(f'--name={name}: give a name of letters, digits, ".", "-" and "_", of 64 characters at most')
    token = secrets.token_urlsafe(BITS // 8)
    row = {'sha256': digest(token), 'name': name, 'role': WORKER, 'owner': owner}
    row |= {'paths': '' if paths is None else json.dumps(list(paths))}
    insert = self._db.insert(TOKENS).values(created=Now(), expires=Now() + days * DAY_S)
    if not self._db.change(insert.on_conflict_do_nothing().execution_options(preserve_rowcount=True), row):
      raise InputError(f'--name={name}: there is a token of this name: give another, such as {name}-2')
    return token

  def find(self, tokens: Sequence[str]) -> list[tuple[Token, float] | None]:
    """Returns what each token says, and the time by the database's clock; None for one that does not exist."""
    digests = [digest(token) for token in tokens]
    found = {row['sha256']: row for row in self._db.rows(FIND, {'digests': json.dumps(digests)})}
    return [(_from_row(row), row['now']) if (row := found.get(each)) else None for each in digests]

  def list(self) -> list[tuple[Token, float]]:
    """Returns all tokens by name, with the time by the database's clock."""
    rows = self._db.rows(sa.select(TOKENS, Now().label('now')).order_by(TOKENS.c.name))
    return [(_from_row(row), row['now']) for row in rows]

  def revoke(self, name: str):
    """Revokes a token, at once. Raises InputError if there is none of this name."""
    update = sa.update(TOKENS).where(TOKENS.c.name == sa.bindparam('of')).values(revoked=Now())
    if not self._db.change(update, {'of': name}):
      known = ', '.join(token.name for token, _ in self.list()) or 'none'
      raise InputError(f'--name={name}: there is no such token; there are: {known}')


def digest(token: str) -> str:
  """Returns the sha256 of a token, in hexadecimal digits. Tokens are random, so that no salt is needed."""
  return hashlib.sha256(token.encode(errors='replace')).hexdigest()


def describe(token: Token, now: float) -> str:
  """Returns a line on a token, without the token."""
  which = 'all paths' if token.paths is None else f'paths {", ".join(map(str, token.paths))}'
  state = token.state(now)
  until = time.strftime('%Y-%m-%d %H:%M', time.gmtime(token.expires))
  when = f'until {until} UTC' if state == 'valid' else state
  return f'{token.name:24} {f"{which} of {token.owner}" if token.owner else which:32} {when}'


def _from_row(row: Row) -> Token:
  paths = tuple(json.loads(row['paths'])) if row['paths'] else None
  return Token(row['name'], paths, row['expires'], row['owner'], row['revoked'])
