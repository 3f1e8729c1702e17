"""The evaluator: each path's loss on its shard's hold-out, version by version, and at the end the report [2.7, 3]."""

import dataclasses
from typing import Any

from dipaco_jax.islands import (
  audit_facts,
  decisions,
  final_files,
  floor_facts,
  inner_phase,
  judge,
  own_levels,
  owner_report,
  run_history,
  schedule,
)
from dipaco_jax.islands.island import Island, Later
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.pipeline import stage_records, stages, validate_stage
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.reports import headline, run_report
from dipaco_jax.storage import files, publishing
from dipaco_jax.telemetry import metrics_log

KINDS = (floor_facts.JUDGE, 'evaluate', 'finish')
KEEPERS_KINDS = (floor_facts.JUDGE, 'finish')  # where owners evaluate their own paths


def perform(island: Island, task: Task, lease: Lease) -> Publish:
  """Does an evaluator's task; returns what publishes its facts."""
  if task.kind == 'finish':
    schedule.schedule_closed(island)  # whoever added this task may not know which phases are audited
    if audit_facts.open_tasks(island):
      raise Later('audits of the last phases are open')
  facts = {floor_facts.JUDGE: judge.judge, 'evaluate': holdout, 'finish': finish}[task.kind](island, task)
  return lambda: facts


def holdout(island: Island, task: Task) -> list[Fact]:
  """Evaluates a path on its hold-out: the mean loss, nats per target, None without a hold-out; and how many targets."""
  path, version = int(task.key), task.number
  number = island.round_of(version - 1)
  island.fetch_trees(f'shards/{number}')
  rows = validate_stage.holdout_rows(island.run, number)
  loss, num_targets = None, 0.0
  if rows.counts[path]:
    loss, num_targets = inner_phase.evaluate(island.run.programs, rows, path, island.path_parameters(path, version))
  return [own_levels.evaluation_fact(path, version, loss, num_targets)]


def finish(island: Island, task: Task) -> list[Fact]:
  """Publishes the last version and those that early stopping chose, and ends as `main` does: evaluation, report."""
  if island.run.settings.data.own_text:
    return owner_report.finish(island)
  events = 'tensorboard' in island.run.settings.metrics.sinks
  own = dataclasses.replace(island.run, metrics=metrics_log.Metrics(island.run.workdir, events=events))
  rounds = range(own.settings.rounds + 1)
  island.fetch_trees('sequences', 'base', *(f'{tree}/{n}' for tree in ('routing', 'shards') for n in rounds))
  island.fetch_tokenizer()
  with island.hold_workdir():
    final_files.restore_config(island)
    history = run_history.read(island)
    for version in sorted({own.settings.train.phases, *history.best_version}):
      island.publish_version(version, history.best_version)
    pointers = {'version': history.best_version, 'holdout_loss': history.best_loss}
    publishing.write_json(own.workdir / 'paths' / 'best.json', pointers)
    run_history.write_rows(island, own, history)
    figures = run_history.figures(island, own, history)
    if island.decisions:
      figures[decisions.REPLAY] = decisions.compare(island.decisions, island.registry)
    stage_records.write_record(own.workdir, own.settings, 'train', history.wall_s, figures)
    if taken := figures.get('steps_by_path'):
      own = dataclasses.replace(own, steps_taken=taken)
    stages.run_all(own)
    own.metrics.close()
    publishing.write_json(own.workdir / decisions.FILE, decisions.to_json(island.registry))
    report: dict[str, Any] = run_report.write(own.workdir)
    for name in (
      'excerpts.json',
      'samples.json',
      'documents.safetensors',
      'documents.safetensors.sha256',
      'chooser.safetensors',
      'router.safetensors',
    ):
      final_files.upload(island, f'evaluation/{name}')  # before the record that announces them
    for tree in ('modules', 'paths', 'stages', 'plots'):
      island.storage.upload_tree(own.workdir / tree, tree)
    for name in ('report.json', 'report.html', 'config.json', 'metrics.jsonl', 'timeline.json', decisions.FILE):
      final_files.upload(island, name)
    files.tidy(own.workdir)
  about = {name: report[name] for name in ('perplexity', 'perplexity_interval')} | {'changes': headline.results(report)}
  about |= {decisions.DIFFERING: report[decisions.REPLAY]['differing']} if decisions.REPLAY in report else {}
  return [Fact('finished', '', 0, '', report['modules_sha256'], about)]
