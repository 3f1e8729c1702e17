"""A model small enough to train in a test, on rows made up by (path, step)."""

import dataclasses
import functools

import jax
import numpy as np

from dipaco_jax.algorithm import modules, outer
from dipaco_jax.config import choices, settings as settings_lib
from dipaco_jax.models import loss, transformer
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import job as job_lib, mesh, programs, training_loop

EPS = float(np.finfo('f').eps)
VOCAB, LENGTH, ROWS = 64, 40, 4
ONE_LEVEL = (('all', '.*', ()),)
MIXED_LEVELS = (
  ('ends', 'embed|final', ()),
  ('low', 'block_0/(mlp|attention_norm)', ('a',)),
  ('high', 'block_1', ('b',)),
  ('own', 'block_0/attention/', ('a', 'b')),
)


def settings(grid=(), levels=ONE_LEVEL, **changes) -> settings_lib.Settings:
  """Of a run without pretraining; `changes` are {section: {field: value}}."""
  values = {
    'model': dict(width=16, num_layers=2, num_heads=2, head_dim=8, mlp_dim=24, seq_len=LENGTH, loss_chunk=64),
    'pretrain': dict(steps=0, batch_size=ROWS),
    'train': dict(phases=3, steps_per_phase=4, batch_size=ROWS, steps_per_dispatch=2),
    # epsilon keeps the direction a smooth function of the gradient, whose rounding is then not magnified.
    'inner': dict(learning_rate=0.01, warmup_steps=3, epsilon=1e-3, decay_steps=16),
    'routing': dict(prefix_tokens=8),
    'evaluate': dict(samples=0),
    'checkpoint': dict(every_steps=1000),
  }
  for section, fields in changes.items():
    values[section] = values.get(section, {}) | fields
  return settings_lib.from_dict({'grid': dict(grid), 'levels': levels} | values)


def on_2x2(**changes) -> settings_lib.Settings:
  """A grid of 2 x 2 paths with modules of all kinds, in float32, and VOCAB in the settings too."""
  s = settings({'a': 2, 'b': 2}, MIXED_LEVELS, **{'model': {'dtype': 'float32'}} | changes)
  return dataclasses.replace(s, tokenizer=dataclasses.replace(s.tokenizer, vocab_size=VOCAB))


def make_programs(s: settings_lib.Settings, devices: int = 1) -> programs.Programs:
  """On the first so many of the fake devices."""
  made = transformer.make_model(s.model, VOCAB)
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(made))
  placement = mesh.place(layout.grid, s.mesh, s.batch_sizes('train'), jax.devices()[:devices])
  return programs.Programs(placement, layout, made, s)


def base(made: transformer.Transformer, seed: int = 0) -> dict[str, np.ndarray]:
  """Fresh parameters, drawn by numpy: nothing to compile. Norms' scales too, since ones would hide some mistakes."""
  rng = np.random.default_rng(seed)
  return {
    name: (1 if 'scale' in name else 0) + rng.normal(0, 0.25, x.shape).astype('f')
    for name, x in sorted(transformer.shapes(made).items())
  }


@functools.cache
def mean_loss(made: transformer.Transformer, prefix_tokens: int):
  """(params, tokens, segments) -> nats a target; one function for a model, so that it is compiled once."""

  def of(params, tokens, segments):
    nll, count = loss.path_loss(made, prefix_tokens, params, tokens, segments)
    return nll / count

  return of


def batch(path: int, step: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
  """Rows of two packed sequences and padding, with tokens that each path draws from a few of its own."""
  rng = np.random.default_rng([path, step])
  tokens = rng.choice(np.random.default_rng(path).permutation(VOCAB)[:12], (rows, LENGTH)).astype(np.int32)
  segments = np.ones((rows, LENGTH), np.int32)
  segments[:, 20:], segments[:, 36:] = 2, 0
  return tokens * (segments > 0), segments


def make_job(made: programs.Programs, **changes) -> job_lib.Job:
  """As the training stage makes it, on `batch`; shards grow with the path."""
  s, grid = made.settings, made.layout.grid
  tokens = [1.0 + path for path in range(grid.num_paths)]

  def weights(phase):
    active = choices.active_paths(s.train, grid.num_paths, s.seed, phase)
    return outer.path_weights(active, tokens, s.outer.reweigh, grid.shape)

  t = s.train
  job = job_lib.Job(
    'train',
    made,
    job_lib.Schedule(t.phases, t.steps_per_phase, t.steps_per_dispatch, s.pretrain.steps, timetable=made.timetable),
    job_lib.Data(t.batch_size, batch),
    weights,
    base(made.model),
    None,
    s.inner.keep_state,
    lost=functools.partial(outer.lost_paths, s.outer.lost, grid.shape, s.seed) if s.outer.lost else None,
  )
  return change_job(job, **changes)


def change_job(job: job_lib.Job, **changes) -> job_lib.Job:
  """Replaces fields of a job, or of its schedule, data or evaluation."""
  for name, value in changes.items():
    part = next((p for p in ('schedule', 'data', 'evaluation') if hasattr(getattr(job, p), name)), None)
    fields = {name: value} if part is None else {part: dataclasses.replace(getattr(job, part), **{name: value})}
    job = dataclasses.replace(job, **fields)
  return job


def train(job: job_lib.Job, workdir, stop=lambda: False):
  """The job from where its checkpoints left it, to its end."""
  workdir.mkdir(exist_ok=True)
  with metrics_log.Metrics(workdir) as rows:
    return training_loop.Trainer(job, workdir, job.programs.settings.checkpoint, rows, stop).train()


def fetched(modules_or_params):
  """On the host."""
  return jax.tree.map(mesh.fetch, modules_or_params)


def assert_close(found, expected, tolerance: float):
  """Leaf by leaf, naming the one that differs."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for (at, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(at))
