"""An owner's path beside a model of its text alone, from the owner's store and nothing else."""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import shutil
import socket
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import object_server
import one_process
import optax
import owner_stores
import parsed_page
import pytest
import twin

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core import bootstrap
from dipaco_jax.data import loader, packing
from dipaco_jax.islands import owner_comparison
from dipaco_jax.models import loss as loss_lib
from dipaco_jax.pipeline import jobs, own_comparison, run as run_lib, validate_stage
from dipaco_jax.processes import stopping
from dipaco_jax.registry import registry
from dipaco_jax.storage import module_store, object_store, seals
from dipaco_jax.training import evaluation, training_loop

PATH = 1  # of the owner
SECTIONS = {
  'checkpoint': dict(every_steps=2),
  'data': dict(holdout_fraction=0.25),
  'train': dict(learning_rate=0.006),
}


class Signals(stopping.Signals):
  """Signals of which one comes after so many questions for it; within a phase there is something to save."""

  def __init__(self, after: int = 10**6):
    super().__init__(lambda number: None)
    self.left = after

  def requested(self) -> bool:
    self.left -= 1
    return self.left < 0

  def graceful(self, has_news):
    return contextlib.nullcontext()


@pytest.fixture(scope='module')
def keeper(tmp_path_factory) -> run_lib.Run:
  with one_process.one_device():
    yield owner_stores.keep(tmp_path_factory.mktemp('owners'), **SECTIONS)


@pytest.fixture(scope='module')
def store(keeper, tmp_path_factory) -> pathlib.Path:
  """A store of which all else is gone: the keeper's place, and all text."""
  place = tmp_path_factory.mktemp('stores') / 'court'
  owner_stores.make(place, keeper)
  return place


@pytest.fixture(scope='module')
def programs():
  """What is compiled once for all tests here."""
  made: dict = {}

  def make(run: run_lib.Run):
    if 'alone' not in made:
      made['alone'] = run._programs(run.settings.alone(), 'train')
    return made['alone']

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run_lib.Run, 'alone_programs', property(make))
    yield


@pytest.fixture(scope='module')
def compared(store, programs, tmp_path_factory) -> pathlib.Path:
  """A copy of the store with its comparison, made where nothing else can be opened."""
  place = tmp_path_factory.mktemp('compared') / 'court'
  shutil.copytree(store, place)

  def refuse(*args, **options):
    raise AssertionError('the store is all that is opened')

  with pytest.MonkeyPatch.context() as patch:
    for owner, name in ((socket.socket, 'connect'), (registry.Registry, '__init__')):
      patch.setattr(owner, name, refuse)
    owner_comparison.compare(str(place), Signals())
  return place


def read_alone(place: pathlib.Path) -> dict[str, np.ndarray]:
  run = run_lib.unattended(place, settings_lib.of_run(json.loads((place / 'config.json').read_text())))
  return module_store.load_path(place / 'alone' / str(PATH), run.alone_programs.layout, 0, run.settings.train.phases)


@pytest.mark.slow
def test_alone_is_adamw_on_the_text_of_the_owner(keeper, compared):
  """By optax, step by step, on rows that are read one batch after the other."""
  s, model = keeper.settings, keeper.model
  assert s.inner.clip_norm and s.inner.weight_decay
  inner = dataclasses.replace(s.inner, learning_rate=s.train.learning_rate)
  rate = functools.partial(twin.learning_rate, inner=inner, total_steps=s.num_steps, pretrain_steps=0)
  mask = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
  adamw = optax.inject_hyperparams(optax.adamw, static_args=('mask',))(
    0.0, s.inner.b1, s.inner.b2, s.inner.epsilon, weight_decay=s.inner.weight_decay, mask=mask
  )
  optimizer = optax.chain(optax.clip_by_global_norm(s.inner.clip_norm), adamw)

  @jax.jit
  def gradient(params, tokens_BL, segments_BL):
    def mean(params):
      nll, count = loss_lib.path_loss(model, s.num_untrained_tokens, params, tokens_BL, segments_BL)
      return nll / count

    return jax.grad(mean)(params)

  file = str(compared / 'shards' / '0' / str(PATH) / 'train.array_record')
  rows = loader.Shard([file], s.train.batch_size, s.model.seq_len, s.seed, PATH)
  params = {name: jnp.asarray(x) for name, x in keeper.base().items()}
  state = optimizer.init(params)
  for step in range(s.train.phases * s.train.steps_per_phase):
    state[1].hyperparams['learning_rate'] = jnp.float32(rate(step))
    updates, state = optimizer.update(gradient(params, *rows.batch(step)), state, params)
    params = optax.apply_updates(params, updates)
  alone, base = read_alone(compared), keeper.base()
  for name, x in params.items():
    moved = np.abs(alone[name] - base[name]).max()
    assert moved > 1e-3
    # Each step moves a weight by about the rate, known to 2**-24 of the gradient's sums: far less than 1e-3 of it.
    np.testing.assert_allclose(alone[name], x, atol=1e-3 * moved, err_msg=name)


def test_the_path_of_an_owner_that_joined_has_as_many_steps_and_the_same_batches(keeper, store):
  run = run_lib.unattended(store, keeper.settings)
  whole, joined = jobs.alone_job(run, PATH), jobs.alone_job(run, PATH, first_phase=1)
  tau = run.settings.train.steps_per_phase
  assert whole.schedule.phases == 2 and joined.schedule.phases == 1
  assert joined.schedule.global_step(0, 3) == whole.schedule.global_step(1, 3) == tau + 3, 'learning rates of the phase'
  for job in (whole, joined):
    assert job.evaluation.holdout.counts == [run.shards_meta(0)['holdout_rows'][PATH]] != [0], 'of early stopping'
  for step in range(tau):
    first = [job.data.batch(0, job.own_step(0, 0, step))[0] for job in (whole, joined)]
    np.testing.assert_array_equal(*first)


def test_a_path_of_timed_phases_is_compared_with_as_many_steps_of_its_own(keeper, store):
  run = run_lib.unattended(store, keeper.settings)
  whole, timed = jobs.alone_job(run, PATH), jobs.alone_job(run, PATH, first_phase=1, steps=5)
  assert (timed.schedule.phases, timed.schedule.steps_per_phase) == (1, 5)
  assert timed.schedule.global_step(0, 3) == whole.schedule.global_step(0, 3), 'its own steps, from the base on'
  for step in range(5):
    rows = [job.data.batch(0, job.own_step(0, 0, step))[0] for job in (whole, timed)]
    np.testing.assert_array_equal(*rows)


@pytest.mark.slow
def test_it_stops_and_continues_with_the_same_bits(store, compared, tmp_path):
  place = tmp_path / 'court'
  shutil.copytree(store, place)
  with pytest.raises(training_loop.Stopped):
    owner_comparison.compare(str(place), Signals(after=1))
  assert (place / 'alone' / str(PATH) / 'checkpoints').exists() and not (place / owner_comparison.RESULT).exists()
  steps = [json.loads(line) for line in (place / 'alone' / 'metrics.jsonl').read_text().splitlines()]
  assert [row['step'] for row in steps if row['kind'] == 'step'] == [2, 4]
  report = owner_comparison.compare(str(place), Signals())
  assert report == seals.read_json(compared / owner_comparison.RESULT)
  after, undisturbed = read_alone(place), read_alone(compared)
  assert all((after[name] == x).all() for name, x in undisturbed.items())
  steps = [json.loads(line) for line in (place / 'alone' / 'metrics.jsonl').read_text().splitlines()]
  assert [row['step'] for row in steps if row['kind'] == 'step'] == [2, 4, 6, 8]
  losses = [row['holdout_loss_by_path'][0] for row in steps if row['kind'] == 'phase']
  assert report['by_path']['court']['phase_of_alone'] == 1 + losses.index(min(losses)), 'early stopping'


@pytest.mark.slow
def test_a_finished_comparison_is_only_shown_again(compared):
  file = compared / 'alone' / str(PATH) / 'modules'
  before = file.stat().st_mtime_ns
  report = owner_comparison.compare(str(compared), Signals(after=0))
  assert report == seals.read_json(compared / owner_comparison.RESULT)
  assert file.stat().st_mtime_ns == before and not (compared / 'alone' / str(PATH) / 'checkpoints').exists()


@pytest.mark.slow
def test_all_models_are_measured_on_each_document_that_is_held_back(keeper, compared):
  run = run_lib.unattended(compared, keeper.settings)
  losses = own_comparison.measure(run, PATH)
  indices, contents = own_comparison.held_back(run, PATH)
  assert len(indices) > len(np.unique(contents)) >= bootstrap.MIN_DOCUMENTS, 'some documents have several sequences'
  sequences, prefix = run.sequences('train').read(indices), run.settings.routing.prefix_tokens
  params = {'base': run.base(), 'alone': read_alone(compared)}
  params['federation'] = module_store.load_path(compared, run.layout, PATH)
  tokens_NL, segments_NL = packing.pad([sequence.tokens for sequence in sequences], run.settings.model.seq_len)
  direct = jax.jit(functools.partial(loss_lib.token_losses, run.model))
  for name, of_model in params.items():
    nll_NL = np.asarray(direct(of_model, tokens_NL, segments_NL))
    for i, sequence in enumerate(sequences):
      assert losses.targets[i] == len(sequence.tokens) - prefix
      expected = nll_NL[i, prefix - 1 : len(sequence.tokens) - 1].sum()  # position j has the loss of token j + 1
      assert losses.nats[name][i] == pytest.approx(float(expected), rel=1e-5)
  rows = validate_stage.holdout_of_path(run, PATH)
  in_rows = evaluation.losses(
    run.alone_programs, lambda turn: evaluation.in_flight(run.alone_programs, turn, lambda _: run.base()), rows
  )
  assert in_rows.targets[0].sum() == losses.targets.sum(), 'the rows of early stopping'
  assert in_rows.nll[0].sum() == pytest.approx(losses.nats['base'].sum(), rel=1e-6)


@pytest.mark.slow
def test_the_report_has_ratios_with_paired_intervals(keeper, compared):
  losses = own_comparison.measure(run_lib.unattended(compared, keeper.settings), PATH)
  report = seals.read_json(compared / owner_comparison.RESULT)
  about, count = report['by_path']['court'], losses.targets.sum()
  assert about['steps'] == 8 and about['tokens'] == 8 * 4 * 64 and about['path'] == PATH
  for name, value in about['perplexity'].items():
    assert value == pytest.approx(math.exp(losses.nats[name].sum() / count))
  difference = losses.nats['federation'] - losses.nats['alone']
  assert about['ratio']['federation_to_alone'] == pytest.approx(math.exp(difference.sum() / count))
  interval = bootstrap.interval(difference, losses.targets, contents_N=losses.contents)
  assert about['ratio_interval']['federation_to_alone'] == pytest.approx(interval)
  apart = bootstrap.interval(difference, losses.targets)
  assert apart != interval, 'sequences of one document are drawn together'


def test_the_page_says_whether_the_federation_paid(compared):
  page = parsed_page.Page((compared / owner_comparison.PAGE).read_text())
  words = ''.join(page.words)
  assert not page.fetched and page.tags.count('svg') == 1
  assert 'the federation did not pay: its perplexity is higher than alone' in words, 'its modules are the base, moved'
  assert 'A positive difference means that it did not pay' in ' '.join(words.split())
  assert (compared / owner_comparison.PICTURE).read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
  ('removed', 'message'),
  [
    ('owner.json', "is no owner's store: name the --store of"),
    ('paths/best.json', 'has no model yet: wait for the end'),
  ],
)
def test_what_is_no_store_of_a_finished_run_is_an_error_before_any_work(removed, message, store, tmp_path):
  place = tmp_path / 'court'
  shutil.copytree(store, place)
  (place / removed).unlink()
  before = {*place.rglob('*')}
  with pytest.raises(ValueError, match=message):
    owner_comparison.compare(str(place), Signals())
  assert {*place.rglob('*')} == before
  with pytest.raises(ValueError, match="is no owner's store"):
    owner_comparison.compare(str(tmp_path / 'nowhere'), Signals())
  assert not (tmp_path / 'nowhere').exists()


def test_other_sequences_than_those_of_the_shard_are_damage(keeper, store, tmp_path):
  place = tmp_path / 'court'
  shutil.copytree(store, place)
  other = settings_lib.from_dict(keeper.settings.to_dict() | {'seed': 1})
  with pytest.raises(seals.Damaged):
    own_comparison.held_back(run_lib.unattended(place, other), PATH)


@pytest.mark.slow
def test_each_path_of_an_owner_is_compared_and_all_together(keeper, tmp_path):
  grid, levels = {'owner': ('clinic', 'court'), 'topic': 2}, (('all', '.*', ('owner', 'topic')),)
  s = settings_lib.from_dict(keeper.settings.to_dict() | {'grid': grid, 'levels': levels})
  owner_stores.make(tmp_path / 'court', keeper, s)
  report = owner_comparison.compare(str(tmp_path / 'court'), Signals())
  assert [*report['by_path']] == ['court,0', 'court,1'] and report['paths'] == [2, 3]
  targets = [about['targets'] for about in report['by_path'].values()]
  assert report['all']['targets'] == sum(targets) and min(targets) > 0
  assert sorted(row.name for row in (tmp_path / 'court' / 'alone').iterdir() if row.is_dir()) == ['2', '3']


@pytest.mark.slow
def test_a_store_in_a_bucket_gets_its_comparison(store, compared, tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  with object_server.s3_server() as endpoint:
    for variable, value in object_server.environment(endpoint).items():
      monkeypatch.setenv(variable, value)
    url = f's3://{object_server.BUCKET}/court'
    bucket = object_store.open_storage(url)
    for tree in owner_comparison.TREES:
      bucket.upload_tree(store / tree, tree)
    for name in ('config.json', 'owner.json', 'paths/phases.json', 'paths/best.json'):
      bucket.write(name, (store / name).read_bytes())
    report = owner_comparison.compare(url, Signals())
    assert report == seals.read_json(compared / owner_comparison.RESULT)
    for local in tmp_path.glob('dipaco_jax-*'):
      shutil.rmtree(local)
    assert owner_comparison.compare(url, Signals(after=0)) == report, 'on another machine it is only read'
    assert bytes(bucket.fetch(owner_comparison.PAGE)).startswith(b'<!')
