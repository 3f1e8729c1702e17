"""The task `own_text (owner)`: an owner's worker reads the owner's text, which stays in the owner's store.

It needs tokenizer, base model and validation text of the run, which are public. Its fact has sizes and digests alone.
Digests are keyed by a secret of the store: they say whether the owner's workers have the same shards, and nothing to
others. A store that was lost gets a new key, and its text a new fact of the same sizes.
"""

from typing import Any, cast

from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import members, owner_facts, owner_store, shared_stages, validation_text
from dipaco_jax.islands.island import OWN_TEXT, Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.owner_store import OwnerStorage
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.pipeline import own_text_stage
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact, Task

SHARDS = 'shards/0'


@time_use.doing(time_use.STAGES)
def perform(island: Island, task: Task, lease: Lease) -> Publish:
  """Makes sequences, routes and shards of an owner's text; raises InputError if it differs from that of the fact."""
  island.fetch_trees('base')
  island.fetch_tokenizer()
  published = island.registry.facts(OWN_TEXT, [island.owner], 0)
  storage = cast(OwnerStorage, island.storage)
  key = owner_store.take_key(storage.store, published[0].sha256 if published else '')
  text = own_text_stage.Text(island.owner, island.own_globs, validation_text.read(island), key.secret)
  with island.hold_workdir():
    for before in published:
      shared_stages.take_over(island, before)
    about = own_text_stage.make(members.run_of(island, island.owner), text)
    lease.check()  # after a long suspension, others may be using the files here
    if any(is_other(before, about, key) for before in published):
      message = f'--data differs from the text that {island.owner} began this run with'
      raise InputError(f'{message}: restore the files that were read')
    for tree in own_text_stage.TREES:
      if tree != SHARDS:
        island.storage.upload_tree(island.run.workdir / tree, tree)
    fact = island.publish_trees(OWN_TEXT, 0, (SHARDS,), {'paths': about}, island.owner, key.replaces)
  return lambda: [fact]


def is_other(published: Fact, about: dict[str, Any], key: owner_store.Key) -> bool:
  """Returns whether the text of a fact is another, as far as can be told: of a store that was lost, by its sizes."""
  if published.sha256 == key.replaces:
    return owner_facts.sizes(published) != owner_facts.sizes(published._replace(meta={'paths': about}))
  return published.meta['paths'] != about
