"""Runs of a table as processes: settings, digests, shared stages, and recorded results.

A result belongs to a config and a text, by digest. The config's is over the fields that differ from their defaults,
those that name files apart; the text's is over the bytes of the files.
"""

import functools
import glob
import hashlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import config
import jax
import scores
import source_losses

from dipaco_jax import recipe
from dipaco_jax.algorithm import compression, modules, outer
from dipaco_jax.config import choices, fields, settings, wires
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import pretrained
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import stage as stage_lib, stage_records
from dipaco_jax.planning import wire_traffic
from dipaco_jax.telemetry import metrics_log, performance

HERE = pathlib.Path(__file__).parent
NOT_IN_DIGEST = ('data.source', 'data.train', 'data.validation', 'checkpoint.')
ONE_THREAD = {'PJRT_NPROC': '1'}  # of a CPU: the same sums on any number of cores, and a run for each core is faster
SHARED = ('tokenize', 'pretrain', 'route')  # stages that another run may have done already

Record = dict[str, Any]

# What is kept of report.json.
KEPT = (
  'perplexity perplexity_interval perplexity_final base_perplexity perplexity_by_domain base_perplexity_by_domain '
  'bits_per_byte validation_tokens pretrain_steps pretrain_tokens phases steps train_tokens train_flops paths '
  'parameters_path parameters_total outer_bytes_per_phase domain_nmi router_accuracy reroute tokens_per_s '
  'wall_s modules_sha256 versions'
).split()


class Row(NamedTuple):
  """A run of a table, once per seed."""

  name: str
  title: str
  method: str  # and its numbers, see config.py
  changes: Mapping[str, Any] = {}  # fields of the config that are overridden


class Run(NamedTuple):
  """A row for one size and one seed."""

  size: str
  row: Row
  overrides: dict[str, Any]  # of the config's fields: the row's changes, the seed, the text
  settings: settings.Settings
  config: str  # digests
  text: str

  @property
  def seed(self) -> int:
    return self.settings.seed

  @property
  def key(self) -> str:
    return f'{self.config}-{self.text}'

  @property
  def variant(self) -> str:
    return f'{self.size},{self.row.method}'


def make(size: str, row: Row, seed: int, train: str = '', validation: str = '') -> Run:
  """The run of a row; without globs its text is that of the running Python."""
  globs = {'data.train': train, 'data.validation': validation}
  text = {name: tuple(value.split(',')) for name, value in globs.items() if value}
  overrides = {'seed': seed, **row.changes, **({'data.source': 'files'} if train else {}), **text}
  s, digest = made(f'{size},{row.method}', tuple(overrides.items()))
  return Run(size, row, overrides, s, digest, text_digest(train, validation))


@functools.cache
def made(variant: str, overrides: tuple[tuple[str, Any], ...]) -> tuple[settings.Settings, str]:
  """The settings and their digest: every base's name asks for those of its row."""
  s = make_settings(variant, dict(overrides))
  return s, config_digest(s)


def make_settings(variant: str, overrides: Mapping[str, Any]) -> settings.Settings:
  """The settings; those of a model that the run starts from are filled in where its folder is there."""
  c = config.get_config(variant)
  c.update_from_flattened_dict(overrides)
  values = c.to_dict()
  if os.path.isdir(values['pretrain']['init']):
    pretrained.fill(values, overrides)
  return settings.from_dict(values)


def placed(run: Run, folder: pathlib.Path) -> dict[str, Any]:
  """The overrides, with {workdir}, {text} and {seed} filled in: what a row starts from is in the folder of the runs."""
  places = {'workdir': folder.absolute(), 'text': run.text[:4], 'seed': run.seed}
  return {name: x.format(**places) if isinstance(x, str) else x for name, x in run.overrides.items()}


def config_digest(s: settings.Settings) -> str:
  """A field that is added with a default changes no digest."""
  default = fields.flatten(settings.Settings().to_dict())
  changed = {k: v for k, v in fields.flatten(s.to_dict()).items() if k not in default or v != default[k]}
  changed = {k: v for k, v in changed.items() if not k.startswith(NOT_IN_DIGEST) and k != 'model.attention'}
  return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()


def text_digest(*globs: str) -> str:
  """Of the files' bytes; of Python's version where there are none."""
  total = hashlib.sha256(b'' if any(globs) else sys.version.encode())
  for pattern in globs:
    for file in sorted(path for part in pattern.split(',') for path in glob.glob(part, recursive=True)):
      with open(file, 'rb') as f:
        total.update(hashlib.file_digest(f, 'sha256').digest())
    total.update(b'|')
  return total.hexdigest()


# -- processes


def execute(run: Run, folder: pathlib.Path) -> int:
  """Goes on with the run from wherever it is; its exit status."""
  options = [f'--config={HERE / "config.py"}:{run.variant}', f'--workdir={workdir(run, folder)}']
  if other := most_shared(run, folder):
    options += [f'--reuse={other}']
  options += [f'--config.{name}={value}' for name, value in placed(run, folder).items()]
  return recipe.train(options, ONE_THREAD | os.environ)


def workdir(run: Run, folder: pathlib.Path) -> pathlib.Path:
  """Of its own for every config and text."""
  return folder / f'{run.row.method.replace(",", "-")}-{run.config[:8]}-{run.text[:4]}'


def most_shared(run: Run, folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the workdir with the most stages to reuse, by records with these settings."""

  mine = make_settings(run.variant, placed(run, folder))

  def shared(other: pathlib.Path) -> int:
    for count, stage in enumerate(SHARED):
      file = other / 'stages' / f'{stage}.json'
      record = json.loads(file.read_text()) if file.exists() else {}
      if record.get('digest') != stage_lib.digest(mine, stage) or 'inputs' not in record:  # as in runs of before
        return count
      if count == 1 and not stage_lib.same_base(stage_records.read_settings(other), mine):
        return count
    return len(SHARED)

  others = [file.parent for file in sorted(folder.glob('*/config.json')) if file.parent != workdir(run, folder)]
  best = max(others, key=lambda other: (shared(other), (other / 'features').exists()), default=None)
  return best if best and shared(best) else None


# -- results


def is_finished(run: Run, folder: pathlib.Path) -> bool:
  """Also one that diverged."""
  return (workdir(run, folder) / 'stages' / 'evaluate.json').exists()


def make_record(run: Run, folder: pathlib.Path) -> Record:
  """What is kept of a finished run; nothing of it depends on where the run was."""
  report = json.loads((workdir(run, folder) / 'report.json').read_text())
  if report['config_sha256'] != settings.digest(make_settings(run.variant, placed(run, folder))):
    raise InputError(f'{workdir(run, folder)} holds a run of another config: remove it')
  kept = {name: report.get(name) for name in KEPT}
  if start := before(pathlib.Path(placed(run, folder).get('pretrain.init', ''))):
    kept |= {'before': start, 'train_flops': kept['train_flops'] + start['flops']}
  scored = (workdir(run, folder) / 'routing' / '1-scores').exists()
  return {
    'row': run.row.name, 'seed': run.seed, 'config': run.config, 'text': run.text, 'variant': run.variant,
    'changes': dict(run.row.changes), **kept, **from_metrics(workdir(run, folder)),
    'environment': json.loads((workdir(run, folder) / 'environment.json').read_text()),
    'loss': kept['perplexity'] and math.log(kept['perplexity']),
    'validation_loss': kept['perplexity_final'] and math.log(kept['perplexity_final']),
    'sent_bytes': report['outer_bytes_per_phase'] * report['phases'],
    'steps_per_phase': run.settings.train.steps_per_phase,
    'text_tokens': sum(json.loads((workdir(run, folder) / 'shards' / '0' / 'meta.json').read_text())['shard_tokens']),
    'wire_bytes': wire_bytes(run.settings), 'state_bytes': state_bytes(run.settings), 'forgetting': forgetting(kept),
    'steps_of_path': steps_of_path(kept),
    'labels': scores.compare(workdir(run, folder), run.settings) if scored else None,
    'routers': scores.routers(workdir(run, folder), run.settings) if scored and has_sklearn() else None,
    'by_source': source_losses.pack_run(workdir(run, folder), run.settings.data.validation),
  }  # fmt: skip


def find_losses(run: Run, folder: pathlib.Path, record: Record) -> source_losses.Packed | None:
  """Losses by source for a record made without them; None unless its workdir is still there, with the same modules."""
  file = workdir(run, folder) / 'report.json'
  if not file.exists() or json.loads(file.read_text()).get('modules_sha256') != record.get('modules_sha256'):
    return None
  return source_losses.pack_run(file.parent, run.settings.data.validation)


def told(base: pathlib.Path) -> pathlib.Path:
  """The file that says what a model that rows start from has taken, see bases.py."""
  return base.with_name(f'{base.name}.json')


def before(base: pathlib.Path) -> Record | None:
  """FLOPs of all its paths, tokens and steps of one of them; None where nothing is known of it."""
  return json.loads(told(base).read_text()) if base.name and told(base).exists() else None


def from_metrics(folder: pathlib.Path) -> Record:
  """The last phase's mean training loss, nats; what was measured while training: [step of a path, perplexity].

  The cosine between paths' outer gradients, by level, and the averaging gap: means over each tenth of the phases.
  The lowest loss on hold-outs.
  """
  rows = [row for row in metrics_log.read_rows(folder) if row['stage'] == 'train']
  phases = [row for _, row in sorted({row['phase']: row for row in rows if row['kind'] == 'phase'}.items())]
  losses = [x for x in phases[-1]['loss_by_path'] if x is not None]
  return {
    'train_loss': statistics.fmean(losses) if losses else None,
    'holdout_loss': lowest_holdout_loss(phases),
    'cosine': {level: tenths([row['cosine'].get(level) for row in phases]) for level in phases[-1]['cosine']},
    'averaging_gap': tenths([row.get('averaging_gap') for row in phases]),
    'perplexity_by_step': [[row['step'], row['perplexity']] for row in rows if row['kind'] == 'evaluation'],
  }


def lowest_holdout_loss(phases: Sequence[Record]) -> float | None:
  """The loss on hold-outs of each path's best version: the mean over paths; None where nothing was held out."""
  by_path = zip(*(row['holdout_loss_by_path'] for row in phases), strict=True)
  lowest = [min(losses) for of_path in by_path if (losses := [x for x in of_path if x is not None])]
  return statistics.fmean(lowest) if lowest else None


def has_sklearn() -> bool:
  if importlib.util.find_spec('sklearn'):
    return True
  print('scikit-learn is not there (it comes with .[test]): what a router can gain is left out', file=sys.stderr)
  return False


def steps_of_path(kept: Record) -> int:
  """All that its parameters have seen, from the first step of the first base on."""
  return kept.get('before', {}).get('steps', 0) + kept['pretrain_steps'] + kept['steps']


def forgetting(report: Record) -> float | None:
  """By how many nats a target the kinds of text that table (5)'s base has read have become worse: their mean."""
  base, now = report['base_perplexity_by_domain'] or {}, report['perplexity_by_domain'] or {}
  read = [kind for kind in base if base[kind] and now.get(kind) and kind not in config.UNREAD]
  return statistics.fmean(math.log(now[kind] / base[kind]) for kind in read) if read else None


def tenths(values: Sequence[float | None]) -> list[float | None]:
  """Means over ten parts of a sequence, of as many values as there are in each; fewer parts where it is shorter."""
  edges = [round(i * len(values) / min(10, len(values))) for i in range(min(10, len(values)) + 1)]
  parts = [[x for x in values[a:b] if x is not None] for a, b in itertools.pairwise(edges)]
  return [statistics.fmean(part) if part else None for part in parts]


# -- bytes


def wire_bytes(s: settings.Settings) -> float:
  """What a path sends and receives of modules in a phase, bytes for each of its parameters."""
  layout, shapes = layout_and_shapes(s)
  exchanged = outer.exchanged_bytes(layout, shapes, 1, s.outer.row_weights, compress(s))
  return exchanged / sum(x.size for x in shapes.values())


def state_bytes(s: settings.Settings) -> float:
  """What a worker of islands publishes of a path's own state, AdamW's and residuals, likewise: a mean over phases."""
  layout, shapes = layout_and_shapes(s)
  adamw = choices.make_inner_of_run(s)
  state = [jax.eval_shape(adamw.init, shapes)]
  if compress(s) != 'none':
    shared = {n: shapes[n] for n, level in layout.owner.items() if layout.grid.paths_through(level) > 1}
    state.append(jax.eval_shape(compression.first_residual, shared))
  total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  return total / sum(x.size for x in shapes.values()) / wire_traffic.make_traffic(s, shapes).state_period


def layout_and_shapes(s: settings.Settings) -> tuple[modules.Layout, dict[str, jax.ShapeDtypeStruct]]:
  shapes = transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))
  return modules.make_layout(s.grid, s.levels, shapes), shapes


def compress(s: settings.Settings) -> str:
  return wires.make_wire(s.outer, s.train).compress


# -- how long it takes


def cost(run: Run) -> float:
  """FLOPs of the paths' training."""
  s = run.settings
  tokens = s.num_paths * s.train.phases * s.train.steps_per_phase * s.train.batch_size
  return performance.flops_per_token(s.model, s.tokenizer.vocab_size, s.model.seq_len) * tokens * s.model.seq_len


def routing_flops(record: Record) -> dict[str, float]:
  """What routing takes beside the paths' training, whose FLOPs are 1; train_flops has neither.

  `features`: the base's blocks read the prefix of every training sequence, here as if all were whole rows. `scores`:
  every path reads the router data, once for each router that is fitted to its scores.
  """
  c = config.fixed(record['variant'])
  s, rows = settings.from_dict(c.to_dict()), record['text_tokens'] / c.model.seq_len
  trained = record['train_tokens'] - record['pretrain_tokens']

  def forward(vocabulary: int, length: int) -> float:
    return performance.flops_per_token(s.model, vocabulary, length) / 3 * length

  whole, prefix = forward(c.tokenizer.vocab_size, c.model.seq_len), forward(0, s.routing.prefix_tokens)
  training = 3 * whole * trained / c.model.seq_len
  return {
    'features': prefix * rows / training,
    'scores': whole * rows * c.routing.router_fraction * record['paths'] / training,
  }


def own_seconds(record: Record) -> float:
  """What a run has taken, without the stages that others share."""
  return sum(s for stage, s in record['wall_s'].items() if stage not in SHARED)


def seconds_left(todo: Iterable[Run], done: Sequence[tuple[Run, Record]]) -> float | None:
  """At the median pace of what was run; None before there is any."""
  paces = [own_seconds(record) / cost(run) for run, record in done]
  return statistics.median(paces) * sum(map(cost, todo)) if paces else None
