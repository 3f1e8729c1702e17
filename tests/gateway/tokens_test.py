"""Tokens: kept as digests, valid for their time, revoked at once."""

from unittest.mock import ANY

import pytest
import registries
import sqlalchemy as sa

from dipaco_jax.core.errors import InputError
from dipaco_jax.gateway.tokens import TOKENS, Token, Tokens, describe
from dipaco_jax.registry import registry_schema
from dipaco_jax.registry.registry import Registry

server, url = registries.server, registries.url


@pytest.fixture
def tokens(url):
  Registry(url).close()
  made = Tokens(url)
  yield made
  made.close()


def test_a_token_is_found_by_its_digest_alone(tokens):
  token = tokens.add('court-1', [0, 1], 2, 'court')
  [(found, now)] = tokens.find([token])
  assert found == Token('court-1', (0, 1), found.expires, 'court', None) and found.state(now) == 'valid'
  assert 1.99 < (found.expires - now) / 86400 < 2.01
  assert tokens.find([token + 'x', token, '\ud800', token]) == [None, (found, ANY), None, (found, ANY)]
  rows = tokens._db.rows(sa.select(TOKENS))
  assert token not in str(rows) and 'paths 0, 1 of court' in describe(found, now)


def test_states(tokens):
  old, new = tokens.add('old', None, -1), tokens.add('new', None, 1)
  [(found, now)] = tokens.find([old])
  assert found.state(now) == 'expired' and found.paths is None
  tokens.revoke('new')
  [(found, now)] = tokens.find([new])
  assert found.state(now) == 'revoked'
  assert [token.name for token, _ in tokens.list()] == ['new', 'old']


def test_names_are_taken_once(tokens):
  tokens.add('a', None, 1)
  for name in ('a', '', 'a/b', '../x', 'x' * 65, '-x', 'a b'):
    with pytest.raises(InputError, match='--name='):
      tokens.add(name, None, 1)
  with pytest.raises(InputError, match='there are: a'):
    tokens.revoke('b')


def test_the_registry_stays_of_its_version(tokens, url):
  registry = Registry(url)
  assert registry.read_snapshot(lambda c: c.scalar(sa.select(registry_schema.SCHEMA.c.version))) == 5
  assert 'dipaco_tokens' not in registry_schema.METADATA.tables
  registry.close()
