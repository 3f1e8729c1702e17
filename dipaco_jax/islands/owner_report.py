"""The end of a run whose text stays with its owners: shared modules, and a report of the owners' own hold-outs.

The evaluator has neither the owners' text nor the modules of single paths: all figures are from facts.
"""

import dataclasses
import math
from typing import Any

from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.islands import audit_history, final_files, members, owner_facts, run_history
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact
from dipaco_jax.reports import owners_page, run_report
from dipaco_jax.storage import files, module_store, publishing
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import module_publishing

FILES = 'report.json', 'report.html', 'config.json', 'metrics.jsonl', 'timeline.json'


def finish(island: Island) -> list[Fact]:
  """Publishes the shared modules of the last version and of those that early stopping chose, and the report."""
  own = dataclasses.replace(island.run, metrics=metrics_log.Metrics(island.run.workdir, events=False))
  island.fetch_trees('base')
  island.fetch_tokenizer()
  with island.hold_workdir():
    final_files.restore_config(island)
    final_files.write_grown_config(island)
    history = run_history.read(island)
    for version in sorted({own.settings.train.phases, *history.best_version} - {0}):
      publish_shared(island, version)
    pointers = {'version': history.best_version, 'holdout_loss': history.best_loss}
    publishing.write_json(own.workdir / 'paths' / 'best.json', pointers)
    run_history.write_rows(island, own, history)
    own.metrics.close()
    report = make_report(island, history)
    publishing.write_json(own.workdir / 'report.json', report)
    files.write_file(own.workdir / 'report.html', owners_page.render(report))
    for tree in ('modules', 'paths'):
      island.storage.upload_tree(own.workdir / tree, tree)
    for name in FILES:
      final_files.upload(island, name)
    files.tidy(own.workdir)
  about = {'perplexity': report['perplexity'], 'perplexity_interval': None, 'changes': owners_page.results(report)}
  return [Fact('finished', '', 0, '', report['modules_sha256'], about)]


def publish_shared(island: Island, version: int):
  """Writes `modules/<version>/` in the workdir, without the modules that only one path goes through."""
  facts = island.registry.facts('module', number=version)
  left = members.modules_left(island)
  here = [fact for fact in facts if fact.key not in left]
  shared = [fact for fact in here if island.parse_module(fact.key)[0].name not in island.own_levels]
  modules = ((*island.parse_module(fact.key), island.read_weights(fact)) for fact in shared)
  module_publishing.publish_module_files(island.run.workdir, version, modules)


def make_report(island: Island, history: run_history.History) -> dict[str, Any]:
  """Returns the content of report.json: perplexities on the owners' hold-outs, each at its chosen version."""
  s, grid = island.run.settings, island.layout.grid
  texts, losses = owner_facts.read(island), _chosen_losses(island, history.best_version)
  by_owner = {
    owner: _of_owner(owners.paths_of(grid, owner), texts, losses) | _stay(island, owner)
    for owner in owner_facts.names(island)
  }
  return {
    'perplexity': perplexity(x for path, x in losses.items() if path not in island.members.until),
    'perplexity_interval': None,
    'owners': by_owner,
    'best_version_by_path': history.best_version,
    'phases': s.train.phases,
    'paths': grid.num_paths,
    'path_names': [grid.path_name(path) for path in range(grid.num_paths)],
    'wall_s': history.wall_s,
    'modules_sha256': module_store.modules_sha256(island.run.workdir, s.train.phases),
    'config_sha256': settings_lib.digest(owners.before_joins(s, island.members.joined)),
    'versions': run_report.versions(),
    **audit_history.figures(island),
  }


def _chosen_losses(island: Island, best_version: list[int]) -> dict[int, tuple[float | None, float]]:
  """Returns the hold-out loss of each path at its chosen version, nats per target, and the number of targets.

  Paths of owners that left or joined too early or late for an evaluation have none, and the version 0.
  """
  losses: dict[int, tuple[float | None, float]] = {}
  for path, version in enumerate(best_version):
    if not version:
      losses[path] = None, 0.0
      continue
    [fact] = island.registry.facts('evaluation', [str(path)], version)
    loss = fact.meta['loss']
    losses[path] = None if loss is None else float(loss), fact.meta['targets']
  return losses


def _stay(island: Island, owner: str) -> dict[str, int]:
  """Returns the phases, counted from 1, in which an owner joined and after which it left, if it did."""
  about = {}
  if owner in island.members.since:
    about['joined_in_phase'] = island.members.since[owner] + 1
  if owner in island.members.left:
    about['left_after_phase'] = max(island.members.until[p] for p in owners.paths_of(island.layout.grid, owner))
  return about


def _of_owner(
  paths: list[int], texts: dict[int, dict[str, Any]], losses: dict[int, tuple[float | None, float]]
) -> dict[str, Any]:
  """Returns the figures of an owner: sizes of its text, and the perplexity of its paths on its hold-outs."""
  return {
    'paths': paths,
    'documents': sum(texts[path]['documents'] for path in paths if path in texts),
    'tokens': sum(texts[path]['tokens'] for path in paths if path in texts),
    'holdout_targets': round(sum(losses[path][1] for path in paths)),
    'perplexity': perplexity(losses[path] for path in paths),
  }


def perplexity(losses: Any) -> float | None:
  """Returns exp of the mean loss over all targets, None without any; `losses` are (nats per target, targets)."""
  measured = [(loss, targets) for loss, targets in losses if loss is not None and targets]
  if not measured:
    return None
  mean = math.fsum(loss * targets for loss, targets in measured) / math.fsum(targets for _, targets in measured)
  return math.exp(mean) if mean < 700 else None
