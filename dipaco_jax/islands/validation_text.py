"""Digests of the public validation text of a run with `data.own_text`: owners may not train on copies of it."""

import json

from dipaco_jax.data import corpus, equality, source
from dipaco_jax.islands.guard import guarding, raising_gone
from dipaco_jax.islands.island import Island
from dipaco_jax.storage import publishing, seals

NAME = 'validation_text.json'


def publish(island: Island) -> list[str]:
  """Publishes which contents are validation text; returns [name, sha256]."""
  run = island.run
  file, data = run.workdir / NAME, source.settings_of(run.settings)
  if not seals.keep_if_whole(file):
    rows = list(corpus.read_held_text(data, fraction=corpus.plan_held_back(run.settings).fraction))
    publishing.write_sealed(file, json.dumps(rows).encode())
  return [NAME, island.storage.write(NAME, seals.read(file))]


def read(island: Island) -> equality.HeldText:
  """Reads which contents are validation text. Raises Gone."""
  [fact] = island.registry.facts('prepared')
  name, sha256 = fact.meta['validation_text']
  with guarding(name), raising_gone(name):
    return equality.HeldText(json.loads(bytes(island.storage.read(name, sha256))))
