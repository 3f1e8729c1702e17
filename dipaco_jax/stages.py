"""From text to a report: tokenize, pretrain, route, train, evaluate, report.

Each stage leaves an artefact in the workdir that is published whole or not at all, and then its record
`stages/<name>.json`: the digest of what it depended on, how long it took, and what it found. The same command again
goes on from what is there. After `route` nothing reads raw text again.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from dipaco_jax import checkpoint, evaluate, mesh, metrics, model, modules, outer, router, shards, spmd
from dipaco_jax import programs as programs_lib
from dipaco_jax import sequences as sequences_lib
from dipaco_jax import settings as settings_lib
from dipaco_jax import state as state_lib
from dipaco_jax import text as text_lib
from dipaco_jax import tokenizer as tokenizer_lib

NAMES = ('tokenize', 'pretrain', 'route', 'train', 'evaluate')
# The settings that each stage is the first to depend on; its record's digest covers those before it too.
DEPENDS = {
  'tokenize': ('data', 'tokenizer', 'model.seq_len', 'evaluate.seq_len', 'routing.prefix_tokens', 'seed'),
  'pretrain': ('model', 'pretrain', 'inner', 'train.steps_per_dispatch'),
  'route': ('grid', 'routing', 'train.batch_size'),
  'train': ('levels', 'train.steps_per_phase', 'train.schedule', 'train.paths_per_phase', 'outer'),
  'evaluate': ('evaluate',),
}


@dataclasses.dataclass(frozen=True)
class Run:
  """A run in a workdir, and how it is asked to stop."""

  workdir: pathlib.Path
  settings: settings_lib.Settings
  metrics: metrics.Metrics
  compilations: collections.Counter[str]
  stop_requested: Callable[[], bool]
  graceful: Callable[[], contextlib.AbstractContextManager]  # inside it, a signal only sets stop_requested

  def record(self, name: str) -> dict[str, Any] | None:
    """What a finished stage left, None where it isn't finished."""
    file = self.workdir / 'stages' / f'{name}.json'
    return json.loads(file.read_text()) if file.exists() else None

  def result(self, name: str) -> dict[str, Any]:
    """What a finished stage found."""
    return json.loads((self.workdir / 'stages' / f'{name}.json').read_text())['result']

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    return tokenizer_lib.Tokenizer(self.workdir / 'tokenizer.model')

  @functools.cached_property
  def model(self) -> model.Transformer:
    return model.make(self.settings.model, self.result('tokenize')['vocab_size'])

  @property
  def layout(self) -> modules.Layout:
    return self.programs.layout

  @functools.cached_property
  def programs(self) -> programs_lib.Programs:
    """Of the grid of paths."""
    return self._programs(self.settings, 'train')

  @functools.cached_property
  def base_programs(self) -> programs_lib.Programs:
    """Of the base model: the empty grid, and an outer step that only takes over what AdamW did."""
    s = self.settings
    plain = dataclasses.replace(
      s, grid=(), levels=(('all', '.*', ()),), outer=settings_lib.Outer('sgd', 1.0, rescale=False, reweigh=False),
      train=dataclasses.replace(s.train, schedule=(), paths_per_phase=0),
    )  # fmt: skip
    return self._programs(plain, 'pretrain')

  def _programs(self, settings: settings_lib.Settings, stage: str) -> programs_lib.Programs:
    layout = modules.make_layout(settings.grid, settings.levels, model.shapes(self.model))
    placement = mesh.place(layout.grid, settings.mesh, settings.batch_sizes(stage), jax.devices())
    return programs_lib.make(settings, placement, layout, self.model)

  @property
  def eval_len(self) -> int:
    return self.settings.evaluate.seq_len or self.settings.model.seq_len

  @property
  def eval_batch(self) -> int:
    return self.settings.evaluate.batch_size or self.settings.train.batch_size


def digest(settings: settings_lib.Settings, name: str) -> str:
  """Of everything that a stage's artefact depends on."""
  upto = [prefix for stage in NAMES[: NAMES.index(name) + 1] for prefix in DEPENDS[stage]]
  return settings_lib.digest(settings, *upto)


def run_all(run: Run):
  """Every stage that is not done yet, in order; a finished run is only reported again."""
  stages = {'tokenize': tokenize, 'pretrain': pretrain, 'route': route, 'train': train, 'evaluate': evaluate_all}
  for name in NAMES:
    record = run.record(name)
    longer = name in ('train', 'evaluate') and record and record['result'].get('phases') != run.settings.train.phases
    if record is None or longer or record['digest'] != digest(run.settings, name):
      with stopwatch(run.workdir, name) as elapsed:
        result = stages[name](run)
        if name in ('train', 'evaluate'):
          result = result | {'phases': run.settings.train.phases}
        if name == 'train':
          result['goodput'] = min(1.0, result['busy_s'] / elapsed())
      if jax.process_index() == 0:
        write_record(run, name, elapsed(), result)
    checkpoint.barrier(f'stage {name}')


def write_record(run: Run, name: str, wall_s: float, result: dict[str, Any]):
  """Marks a stage as done; its artefacts are there already."""
  record = {'digest': digest(run.settings, name), 'wall_s': wall_s, 'result': metrics.plain(result)}
  checkpoint.write_json(run.workdir / 'stages' / f'{name}.json', record)


@contextlib.contextmanager
def stopwatch(workdir: pathlib.Path, name: str) -> Iterator[Callable[[], float]]:
  """Seconds that a stage has taken, those of interrupted runs of it too (noted every few seconds)."""
  file = workdir / 'stages' / f'{name}.seconds'
  before = float(file.read_text()) if file.exists() else 0.0
  started, done = time.monotonic(), threading.Event()

  def elapsed() -> float:
    return before + time.monotonic() - started

  def note():
    while not done.wait(5):
      with contextlib.suppress(OSError):
        checkpoint.write_file(file, f'{elapsed():.1f}')

  thread = threading.Thread(target=note, daemon=True)
  thread.start()
  try:
    yield elapsed
  finally:
    done.set()
    thread.join()
  file.unlink(missing_ok=True)


def only_first_process(function: Callable[[], None], name: str):
  """Process 0 does it, the others wait."""
  if jax.process_index() == 0:
    function()
  checkpoint.barrier(name)


# -- tokenize


def tokenize(run: Run) -> dict[str, Any]:
  """Documents to a tokenizer and to sequences of at most seq_len tokens."""
  only_first_process(lambda: _tokenize(run), 'sequences')
  return json.loads((run.workdir / 'sequences' / 'meta.json').read_text())


def _tokenize(run: Run):
  s, file = run.settings, run.workdir / 'tokenizer.model'
  if s.tokenizer.model_file:
    checkpoint.write_file(file, pathlib.Path(s.tokenizer.model_file).read_bytes())
  elif not file.exists():
    texts = tokenizer_lib.sample(text_lib.documents(s.data, 'train'), s.tokenizer.sample_bytes, s.seed)
    checkpoint.write_file(file, tokenizer_lib.train(texts, s.tokenizer.vocab_size))
  progress = metrics.Progress('tokenize', s.data.max_documents, 'documents')
  with checkpoint.publish_directory(run.workdir / 'sequences') as aside:
    meta = sequences_lib.write_sequences(
      lambda split: text_lib.documents(s.data, split), run.tokenizer, str(aside), seq_len=s.model.seq_len,
      eval_len=run.eval_len, prefix_tokens=s.routing.prefix_tokens, progress=lambda done, _: progress.update(done),
    )  # fmt: skip
    check_size(s, meta)
  progress.close()


def check_size(s: settings_lib.Settings, meta: dict[str, Any]):
  """Raises ValueError where the text can't fill a batch of every path, or nothing is left to validate on."""
  rows, num_paths = meta['tokens'] // s.model.seq_len, len(list(modules.grid_lib.Grid(s.grid).points()))
  if rows < num_paths * s.train.batch_size:
    raise ValueError(
      f'config.grid has {num_paths} paths with config.train.batch_size={s.train.batch_size} rows of '
      f'{s.model.seq_len} tokens each, but the text fills only {rows} rows: use a smaller grid or batch, or more text'
    )
  if not meta['validation_documents']:
    raise ValueError(
      'no validation document is longer than the prefix: name longer ones in config.data.validation, or raise '
      'config.data.validation_fraction'
    )


# -- pretrain


def pretrain(run: Run) -> dict[str, Any]:
  """The base model: one path on all text, with plain AdamW (the empty grid, an outer step that only takes over)."""
  s = run.settings
  if jax.process_index() == 0 and not (run.workdir / 'shards' / 'base').exists():
    everything = np.zeros((len(sequences(run, 'train')), 1), np.int32)
    _write_shards(run, 'base', everything, 1)
  checkpoint.barrier('base shards')
  made = run.base_programs
  start = {name: np.asarray(x) for name, x in model.init(run.model, jax.random.key(s.seed)).items()}
  state, seconds = None, time.monotonic()
  if s.pretrain.steps:
    job = _job(run, 'pretrain', made, 'base', start, None, 1, s.pretrain.steps, 0, s.pretrain.batch_size)
    state = _train(run, job)
    start = {name: mesh.fetch(x) for name, x in state.modules['all'].items()}
  inner = named_leaves(state.inner[0]) if state else {}
  if jax.process_index() == 0:
    with checkpoint.publish_directory(run.workdir / 'base') as aside:
      (aside / 'params.safetensors').write_bytes(checkpoint.to_bytes(start))
      (aside / 'inner.safetensors').write_bytes(checkpoint.to_bytes(inner))
    shutil.rmtree(run.workdir / 'checkpoints' / 'pretrain', ignore_errors=True)
  record = state.record if state else state_lib.new_record(1)
  rate = record.timed_tokens / max(record.inner_s, 1e-9)
  return {
    'steps': s.pretrain.steps, 'tokens': record.tokens, 'tokens_per_s': rate, 'wall_s': time.monotonic() - seconds
  }  # fmt: skip


def named_leaves(tree) -> dict[str, np.ndarray]:
  """A pytree of in-flight arrays of one path to host arrays by their place in it."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): mesh.fetch(leaf) for path, leaf in leaves}


def load_base(run: Run) -> dict[str, np.ndarray]:
  """Parameters of the base model."""
  return dict(sorted(safetensors.numpy.load_file(run.workdir / 'base' / 'params.safetensors').items()))


def load_base_state(run: Run, made: programs_lib.Programs):
  """Inner state of the base model, None where paths start with a fresh one."""
  arrays = safetensors.numpy.load_file(run.workdir / 'base' / 'inner.safetensors')
  if not run.settings.inner.inherit_state or not arrays:
    return None
  structure = jax.eval_shape(made.inner.init, made.shapes)
  return jax.tree_util.tree_map_with_path(lambda path, _: arrays[jax.tree_util.keystr(path)], structure)


# -- route


def sequences(run: Run, split: str) -> sequences_lib.Sequences:
  return sequences_lib.Sequences(str(run.workdir / 'sequences' / f'{split}.array_record'))


def route(run: Run) -> dict[str, Any]:
  """Every sequence to its path, every path's sequences to its shard [2.4]."""
  only_first_process(lambda: _route(run), 'routed')
  validation = np.load(run.workdir / 'routing' / '0' / 'validation.npy')
  counts = np.bincount(validation, minlength=run.layout.grid.num_paths).tolist()
  return json.loads((run.workdir / 'shards' / '0' / 'meta.json').read_text()) | {'validation_sequences': counts}


def _route(run: Run):
  s, num_paths = run.settings, run.layout.grid.num_paths
  if not (run.workdir / 'routing' / '0').exists():
    with checkpoint.publish_directory(run.workdir / 'routing' / '0') as aside:
      assign = make_router(run, aside)
      np.save(aside / 'train.npy', assign('train', s.routing.top_n))
      np.save(aside / 'validation.npy', assign('validation', 1)[:, 0])
  _write_shards(run, '0', np.load(run.workdir / 'routing' / '0' / 'train.npy'), num_paths)


def make_router(run: Run, aside: pathlib.Path) -> Callable[[str, int], np.ndarray]:
  """`assign(split, top_n) -> int32 [sequences, top_n]`, and the router's file beside it where one is fitted."""
  s, num_paths = run.settings, run.layout.grid.num_paths
  if s.routing.method not in router.FITS:

    def by_hash(split, top_n):
      ids = (f'{split}/{i}' for i in range(len(sequences(run, split))))
      return router.random_assignment(s.seed, ids, num_paths, top_n)

    return by_hash
  features = make_features(run)
  everything = sequences(run, 'train')
  drawn = np.sort(np.random.default_rng(s.seed).permutation(len(everything))[: s.routing.sample])
  z_ND = np.concatenate(list(features('fit the router', everything, drawn)))
  fitted = router.fit(s.routing.method, jax.random.key(s.seed), z_ND, run.layout.grid.shape, s.routing)
  arrays = {name: np.asarray(x) for name, x in fitted._asdict().items()}
  (aside / 'router.safetensors').write_bytes(checkpoint.to_bytes(arrays))

  def by_features(split, top_n):
    found = sequences(run, split)
    routed = [router.route(fitted, z, top_n) for z in features(f'route {split}', found, np.arange(len(found)))]
    return np.concatenate([np.asarray(r) for r in routed]).astype(np.int32)

  return by_features


FEATURE_ROWS = 1024


def make_features(run: Run):
  """`features(title, sequences, indices)` yields z of FEATURE_ROWS sequences at a time, float32, by the base model."""
  base, prefix = jax.device_put(load_base(run)), run.settings.routing.prefix_tokens
  compute = jax.jit(lambda params, tokens: model.features(run.model, params, tokens))

  def features(title: str, found: sequences_lib.Sequences, indices: np.ndarray) -> Iterator[np.ndarray]:
    progress = metrics.Progress(title, len(indices), 'sequences')
    for start in range(0, len(indices), FEATURE_ROWS):
      chosen = indices[start : start + FEATURE_ROWS]
      tokens = np.zeros((FEATURE_ROWS, prefix), np.int32)
      tokens[: len(chosen)] = [sequence.tokens[:prefix] for sequence in found.read(chosen)]
      yield np.asarray(compute(base, tokens))[: len(chosen)]
      progress.update(start + len(chosen))
    progress.close()

  return features


def _write_shards(run: Run, name: str, assignment: np.ndarray, num_paths: int):
  s = run.settings
  progress = metrics.Progress(f'shards/{name}', num_paths, 'paths')
  with checkpoint.publish_directory(run.workdir / 'shards' / name) as aside:
    meta = shards.write_shards(
      sequences(run, 'train'), assignment, num_paths, str(aside), seq_len=s.model.seq_len, seed=s.seed,
      holdout_fraction=s.data.holdout_fraction if s.train.early_stopping else 0.0,
      num_domains=len(run.result('tokenize')['domains']), progress=lambda done, _: progress.update(done),
    )  # fmt: skip
    empty = [path for path, rows in enumerate(meta['shard_rows']) if not rows]
    if empty:
      raise ValueError(f'no text was routed to paths {empty}: use a smaller config.grid, or more text')
  progress.close()


# -- train


def _job(run: Run, name, made, shard, base, base_state, phases, tau, first_step, batch_size) -> spmd.Job:
  """What both pretraining and training have; the path's stream goes on where pretraining left it."""
  s, folder = run.settings, run.workdir / 'shards' / shard
  meta = json.loads((folder / 'meta.json').read_text())

  @functools.cache
  def stream(path: int) -> shards.Shard:
    return shards.Shard(str(folder / str(path) / 'train.array_record'), batch_size, s.model.seq_len, s.seed, path)

  def weights(phase: int) -> np.ndarray:
    grid = made.layout.grid
    active = outer.active_paths(s.train, grid.num_paths, s.seed, phase) if name == 'train' else np.ones(1, bool)
    return outer.path_weights(active, meta['shard_tokens'], s.outer.reweigh, grid.shape)

  return spmd.Job(
    name=name, programs=made, phases=phases, steps_per_phase=tau, steps_per_dispatch=s.train.steps_per_dispatch,
    first_step=first_step, batch_size=batch_size, batch=lambda path, step: stream(path).batch(step), weights=weights,
    base=base, base_state=base_state,
  )  # fmt: skip


def _train(run: Run, job: spmd.Job) -> state_lib.State:
  c = run.settings.checkpoint
  trainer = spmd.Trainer(job, run.workdir, c.every_steps, c.keep, run.metrics, run.stop_requested)
  with run.graceful():
    return trainer.train()


def train(run: Run) -> dict[str, Any]:
  """The grid of paths, from the base."""
  s = run.settings
  made = run.programs
  base_state = load_base_state(run, made)
  t = s.train
  job = _job(
    run, 'train', made, '0', load_base(run), base_state, t.phases, t.steps_per_phase, s.pretrain.steps, t.batch_size
  )
  held = holdout_rows(run) if t.early_stopping else None
  job = dataclasses.replace(
    job, keep_state=s.inner.keep_state, holdout=held, validate=functools.partial(validate, run, made),
    validate_every=s.evaluate.every_phases, publish=True, offload=t.offload,
  )  # fmt: skip
  state = _train(run, job)
  return train_figures(run, job, state.record)


def train_figures(run: Run, job: spmd.Job, record: state_lib.Record) -> dict[str, Any]:
  """What the training stage says in the report."""
  s, made, base = run.settings, job.programs, run.result('pretrain')
  placement = made.placement
  devices = placement.mesh.devices.reshape(-1)
  flops = metrics.flops_per_token(s.model, run.model.vocab_size, s.model.seq_len)
  rate = record.timed_tokens / max(record.inner_s, 1e-9)
  path_parameters = sum(x.size for x in made.shapes.values())
  tokens = record.tokens + base['tokens']
  return {
    'phases': job.phases, 'steps': job.phases * job.steps_per_phase, 'train_tokens': tokens, 'tokens_per_s': rate,
    'step_s': record.inner_s / max(1, record.timed_steps), 'outer_s': record.outer_s / max(1, job.phases),
    'outer_fraction': record.outer_s / max(1e-9, record.outer_s + record.inner_s),
    'outer_bytes_per_phase': outer.exchanged_bytes(made.layout, made.shapes),
    'synchronous_bytes_per_phase': 2 * 4 * path_parameters * made.layout.grid.num_paths * job.steps_per_phase,
    'peak_memory_bytes': metrics.device_peak_bytes(devices) or metrics.process_peak_bytes(),
    'train_flops': flops * tokens,
    'model_flops_utilization': metrics.mfu(flops * rate, devices[0].device_kind, run.model.dtype.name, len(devices)),
    'busy_s': record.inner_s + record.outer_s,
    'parameters_path': path_parameters, 'parameters_total': made.layout.num_parameters(made.shapes),
    'paths': made.layout.grid.num_paths, 'device': devices[0].device_kind, 'num_devices': len(devices),
    'compilations': sum(run.compilations[name] for name in programs_lib.NAMES),
    'modules_sha256': checkpoint.modules_sha256(run.workdir, job.phases),
  }  # fmt: skip


def holdout_rows(run: Run) -> evaluate.Rows:
  """Every shard's hold-out."""
  s, folder = run.settings, run.workdir / 'shards' / '0'

  @functools.cache
  def blocks(path: int) -> tuple[np.ndarray, np.ndarray]:
    rows = list(shards.read_rows(str(folder / str(path) / 'holdout.array_record'), run.eval_batch, s.model.seq_len))
    tokens, segments = (np.concatenate(x) for x in zip(*rows, strict=True))
    return tokens, segments

  def load(path, start, stop):
    tokens, segments = blocks(path)
    return tokens[start:stop], segments[start:stop]

  counts = json.loads((folder / 'meta.json').read_text())['holdout_rows']
  return evaluate.Rows(counts, load, run.eval_batch, s.model.seq_len)


# -- evaluate


def validation_rows(run: Run, assignment: np.ndarray, num_paths: int) -> evaluate.Rows:
  """Validation documents by the path that they are routed to, one in a row."""
  found = sequences(run, 'validation')
  mine = [np.flatnonzero(assignment == path) for path in range(num_paths)]

  def load(path, start, stop):
    return shards.pad([x.tokens for x in found.read(mine[path][start:stop])], run.eval_len)

  return evaluate.Rows([len(indices) for indices in mine], load, run.eval_batch, run.eval_len)


def validate(run: Run, made: programs_lib.Programs, params_of_turn, routed: bool = True) -> dict[str, Any]:
  """Perplexity of validation documents, each under its own path (`routed`), or all under the only one."""
  found, num_paths = sequences(run, 'validation'), made.layout.grid.num_paths
  assignment = np.load(run.workdir / 'routing' / '0' / 'validation.npy')
  assignment = assignment if routed else np.zeros_like(assignment)
  losses = evaluate.losses(made, params_of_turn, validation_rows(run, assignment, num_paths))
  nll, count = np.zeros(len(found)), np.zeros(len(found))
  for path in range(num_paths):
    nll[assignment == path], count[assignment == path] = losses.nll[path], losses.count[path]
  piece_bytes, prefix = run.tokenizer.piece_bytes(), run.settings.routing.prefix_tokens
  everything = found.read(range(len(found)))
  num_bytes = np.array([piece_bytes[x.tokens[prefix : run.eval_len]].sum() for x in everything])
  domains = np.array([x.domain for x in everything])
  return metrics.summarize(nll, count, num_bytes, assignment, domains, num_paths, run.result('tokenize')['domains'])


def evaluate_all(run: Run) -> dict[str, Any]:
  """The base, the last version of all paths, and each path at the version that early stopping chose."""
  s = run.settings
  single, made = run.base_programs, run.programs
  base = validate(run, single, lambda turn: evaluate.in_flight(single, turn, lambda _: load_base(run)), routed=False)

  def of_version(version: int | None):
    def load(path):
      return checkpoint.load_path(run.workdir, run.layout, path, version)

    return lambda turn: evaluate.in_flight(made, turn, load)

  final = validate(run, made, of_version(s.train.phases))
  best = validate(run, made, of_version(None)) if s.train.early_stopping else final
  result = best | {
    'perplexity_final': final['perplexity'], 'base_perplexity': base['perplexity'],
    'base_bits_per_byte': base['bits_per_byte'], 'base_perplexity_by_domain': base['perplexity_by_domain'],
  }  # fmt: skip
  if s.evaluate.matrix:
    load = functools.partial(checkpoint.load_path, run.workdir, run.layout)
    result['loss_matrix'] = evaluate.matrix(made, load, holdout_rows(run))
  return result


# -- what the bits belong to


def note_environment(run: Run):
  """Records what the digest of the modules depends on beside the config, and warns where a resumed run differs."""
  now = {
    'device': jax.devices()[0].device_kind, 'devices': jax.device_count(), 'processes': jax.process_count(),
    'cpus': len(os.sched_getaffinity(0)), 'jax': jax.__version__,
  }  # fmt: skip
  file = run.workdir / 'environment.json'
  then = json.loads(file.read_text()) if file.exists() else now
  changed = [f'{name} {then.get(name)} -> {value}' for name, value in now.items() if then.get(name) != value]
  if changed:
    logging.warning('this run began elsewhere (%s): it goes on, but its last bits will differ', ', '.join(changed))
  if jax.process_index() == 0:
    checkpoint.write_json(file, now)


def config_sha256(settings: settings_lib.Settings) -> str:
  return hashlib.sha256(json.dumps(settings.to_dict(), sort_keys=True).encode()).hexdigest()
