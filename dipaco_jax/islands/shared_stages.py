"""The stages of an islands run that all paths share, each a worker's task: preparation, and rounds of re-sharding."""

import functools
import shutil
from typing import Any

from dipaco_jax.data import tokenizer_files
from dipaco_jax.islands import members, validation_text
from dipaco_jax.islands.island import Gone, Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.pipeline import (
  inputs,
  jobs,
  resharding_round,
  run as run_lib,
  stage as stage_lib,
  stage_records,
  stages,
)
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.storage import object_store as storage_lib

KINDS = ('prepare', 'reroute')
TREES = ('sequences', 'base', 'routing/0', 'shards/0')  # that `prepare` leaves in storage
PUBLIC_TREES = TREES[:2]  # the same if the text of paths stays with its owners


def describe_stages(run: run_lib.Run) -> dict[str, Any]:
  """Returns the running stage before training; for the base model's training, also step, loss and remaining time."""
  complete = stage_records.read_stages(run.workdir)
  s = run.settings
  row = run.metrics.last_step
  stage = next(stage for stage in stage_lib.STAGES if stage.name not in complete)
  about: dict[str, Any] = {'stage': stage.doing}
  if stage.name == 'pretrain' and row:
    about |= {'step': row['step'], 'of': s.pretrain.steps, 'loss': row['loss'][0]}
    if rate := row.get('tokens_per_s'):
      tokens = (s.pretrain.steps - row['step']) * s.pretrain.batch_size * s.model.seq_len
      about |= {'tokens_per_s': rate, 'left_s': tokens / rate}
  return about


def perform(island: Island, task: Task, lease: Lease) -> Publish:
  """Performs a task of these stages; returns a function that publishes its facts."""
  return {'prepare': prepare, 'reroute': reshard}[task.kind](island, task, lease)


@time_use.doing(time_use.STAGES)
def prepare(island: Island, task: Task, lease: Lease) -> Publish:
  """Makes text, base model, routing and shards; every module of version 0 is its part of the base model."""
  run, has_own_text = members.run_of(island), island.run.settings.data.own_text
  trees, last = (PUBLIC_TREES, 'pretrain') if has_own_text else (TREES, 'route')
  lease.observe = functools.partial(describe_stages, run)

  def is_here(name: str) -> bool:
    return (run.workdir / name).exists()

  with island.hold_workdir():
    for before in island.registry.facts('prepared'):
      take_over(island, before)
      try:
        island.fetch_tokenizer()
      except Gone:
        for name in tokenizer_files.FILES:
          (run.workdir / name).unlink(missing_ok=True)
    needed = (*trees, *tokenizer_files.names(run.settings.tokenizer, is_here))
    if run.record(last) and not all(map(is_here, needed)):
      stage_records.reopen(run.workdir, 'tokenize')  # records that came from storage, which has lost the rest
    inputs.check_inputs(run.workdir, run.settings)
    stages.run_all(run, last)
    lease.check()  # after a long suspension, others may be using the files here
    about: dict[str, Any] = {'tokenizer': island.publish_tokenizer()}
    about |= {'validation_text': validation_text.publish(island)} if has_own_text else {}
    prepared = island.publish_trees('prepared', 0, trees, about)
    island.storage.upload_tree(run.workdir / 'stages', 'stages')
  base = run.base()
  objects = {
    level.name: island.write_object(f'modules/0/{level.name}', {n: base[n] for n in run.layout.names(level)})
    for level in run.layout.levels
  }
  named = ((key, *objects[key.split('/')[0]]) for key in island.all_modules())
  modules = [Fact('module', key, 0, name, sha256, {}) for key, name, sha256 in named]
  return lambda: [prepared, *modules]


@time_use.doing(time_use.STAGES)
def reshard(island: Island, task: Task, lease: Lease) -> Publish:
  """Shards the text again for a round, with all paths at the last version of the previous round [2.4.2]."""
  run, number = island.run, task.number
  version = jobs.round_end(run.settings, number - 1)
  island.fetch_trees('sequences', 'base', f'routing/{number - 1}', f'shards/{number - 1}')
  with island.hold_workdir():
    island.publish_version(version)
    for before in island.registry.facts('round', number=number):
      take_over(island, before)
    resharding_round.reshard(run, number, version)
    lease.check()
    fact = island.publish_trees('round', number, (f'routing/{number}', f'shards/{number}'), {'version': version})
  return lambda: [fact]


def take_over(island: Island, published: Fact):
  """Fetches stages that were published before. Removes those that cannot be fetched, so that they are made again."""
  for tree, sha256 in ({'stages': ''} | published.meta['trees']).items():
    island.storage.verified_trees.discard((tree, sha256))
    try:
      island.storage.download_tree(tree, island.run.workdir / tree, sha256)
    except (storage_lib.Missing, storage_lib.Corrupt):
      shutil.rmtree(island.run.workdir / tree, ignore_errors=True)
