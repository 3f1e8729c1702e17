"""An owner's text, read by the owner alone, gives the shards that one job makes of all owners' text."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import one_process
import owners_run
import pytest
import slow
from owners_run import OWNERS

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.data import corpus, equality, loader, source
from dipaco_jax.models import loss
from dipaco_jax.pipeline import own_text_stage, run as run_lib, stages
from dipaco_jax.storage import object_store

HELD = 3  # documents of validation that an owner's text has too


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  """The text of all, some of which is validation text; and that of all owners, for one job."""
  folder = tmp_path_factory.mktemp('texts')
  owners_run.write_text(folder)
  held = [json.loads(line) for line in (folder / 'public-validation.jsonl').read_text().splitlines()]
  file = owners_run.own_file(folder, 'clinic')
  file.write_text(file.read_text() + ''.join(json.dumps(row | {'domain': 'clinic'}) + '\n' for row in held[:HELD]))
  rows = [json.dumps(row | {'domain': OWNERS[i % 2]}) + '\n' for i, row in enumerate(held)]
  (folder / 'pooled-validation.jsonl').write_text(''.join(rows))
  return folder


@pytest.fixture(scope='module')
def keeper(folder) -> run_lib.Run:
  """The public stages."""
  with one_process.one_device():
    run = run_lib.unattended(folder / 'keeper', owners_run.settings(folder))
    run.workdir.mkdir()
    stages.run_all(run, 'pretrain')
    yield run


@pytest.fixture(scope='module')
def pooled(folder, keeper) -> run_lib.Run:
  """The stages of one job on the text of all owners, with the keeper's tokenizer."""
  run = run_lib.unattended(folder / 'pooled', owners_run.pooled(folder, keeper.workdir))
  run.workdir.mkdir()
  stages.run_all(run, 'route')
  return run


def begin(folder: pathlib.Path, keeper: run_lib.Run, owner: str, name: str = '', s=None) -> run_lib.Run:
  """An owner's workdir with all that is public."""
  workdir = folder / f'store-{owner}{name}'
  workdir.mkdir()
  one_process.copy(keeper.workdir, workdir, 'base', 'stages', 'tokenizer.model', 'tokenizer.model.sha256')
  return run_lib.unattended(workdir, s or keeper.settings)


def text_of(folder: pathlib.Path, keeper: run_lib.Run, owner: str) -> own_text_stage.Text:
  held = equality.HeldText(corpus.read_held_text(source.settings_of(keeper.settings), fraction=1.0))
  return own_text_stage.Text(owner, (str(owners_run.own_file(folder, owner)),), held)


def read_rows(run: run_lib.Run, path: int, name: str) -> tuple[np.ndarray, np.ndarray]:
  file = str(run.workdir / 'shards' / '0' / str(path) / f'{name}.array_record')
  return loader.read_rows(file, 0, loader.cached_reader(file).num_records(), run.settings.model.seq_len)


def in_rows(rows: tuple[np.ndarray, np.ndarray]) -> list[bytes]:
  """The sequences of rows, sorted."""
  pairs = list(zip(*rows, strict=True))
  return sorted(tokens[segments == n].tobytes() for tokens, segments in pairs for n in range(1, segments.max() + 1))


@pytest.mark.parametrize('owner', slow.but(OWNERS, 'court'))
def test_shards_are_those_of_one_job_on_the_text_of_all(owner, folder, keeper, pooled):
  path, run = OWNERS.index(owner), begin(folder, keeper, owner)
  about = own_text_stage.make(run, text_of(folder, keeper, owner))[str(path)]
  for mine, theirs in zip(read_rows(run, path, 'train'), read_rows(pooled, path, 'train'), strict=True):
    np.testing.assert_array_equal(mine, theirs)
  held = read_rows(run, path, 'holdout')
  assert in_rows(held) == in_rows(read_rows(pooled, path, 'holdout')) != []
  meta = pooled.shards_meta(0)
  assert about['tokens'] == meta['shard_tokens'][path] == run.shards_meta(0)['shard_tokens'][path] > 0
  assert run.shards_meta(0)['shard_tokens'][1 - path] == 0, 'of others nothing is known'
  _, counts = loss.targets(*map(jnp.asarray, held), run.settings.routing.prefix_tokens)
  assert about['holdout_targets'] == counts.sum() and about['documents'] > 0
  copies = json.loads((run.workdir / 'sequences' / 'meta.json').read_text())['copies_of_validation']
  assert copies == (HELD if owner == 'clinic' else 0), 'no validation text is trained on'


def test_text_that_is_the_same_is_not_read_again_and_other_text_is(folder, keeper):
  run, text = begin(folder, keeper, 'court', '-again'), text_of(folder, keeper, 'court')
  before = own_text_stage.make(run, text)
  inode = (run.workdir / 'shards' / '0').stat().st_ino
  assert own_text_stage.make(run, text) == before and (run.workdir / 'shards' / '0').stat().st_ino == inode
  other = folder / 'other.jsonl'
  lines = owners_run.own_file(folder, 'court').read_text().splitlines(keepends=True)
  other.write_text(''.join(lines[:40]))
  after = own_text_stage.make(run, text._replace(globs=(str(other),)))
  assert after['1']['documents'] < before['1']['documents'] and after['1']['sha256'] != before['1']['sha256']


def test_digests_of_a_text_depend_on_the_key_of_its_store(folder, keeper):
  """Who has the whole text and lacks the key computes others; the shards are the same."""
  run, text = begin(folder, keeper, 'court', '-keys'), text_of(folder, keeper, 'court')
  shards, abouts, indices = [], [], []
  for key in ('one', 'another', 'one'):
    abouts.append(own_text_stage.make(run, text._replace(key=key))['1'])
    indices.append(object_store.tree_index(run.workdir / 'shards' / '0'))
    shards.append(in_rows(read_rows(run, 1, 'train')))
  assert shards[0] == shards[1] and abouts[0] == abouts[2] and indices[0] == indices[2]
  assert abouts[1] == abouts[0] | {'sha256': abouts[1]['sha256']} != abouts[0] and indices[1] != indices[0]


@pytest.mark.slow
def test_several_paths_of_an_owner_share_its_text_by_k_means(folder, keeper):
  grid = {'owner': OWNERS, 'topic': 2}
  levels = (('all', '.*', ('owner', 'topic')),)
  s = settings_lib.from_dict(keeper.settings.to_dict() | {'grid': grid, 'levels': levels})
  run = begin(folder, keeper, 'court', '-topics', s)
  about = own_text_stage.make(run, text_of(folder, keeper, 'court'))
  assert about.keys() == {'2', '3'} and all(each['tokens'] > 0 for each in about.values())
  paths_N = np.load(run.workdir / 'routing' / '0' / 'train.npy')[:, 0]
  assert {*paths_N.tolist()} == {2, 3}
  assert (run.workdir / 'routing' / '0' / 'router.safetensors').exists()


def test_too_little_text_is_an_error_before_any_work(folder, keeper, tmp_path):
  (tmp_path / 'short.jsonl').write_text('{"text": "a b"}\n' * 100)
  text = own_text_stage.Text('court', (str(tmp_path / 'short.jsonl'),))
  with pytest.raises(ValueError, match=r'--data: 0 documents are longer than config.routing.prefix_tokens=32'):
    own_text_stage.check(keeper.settings, text)
  with pytest.raises(ValueError, match='no-such'):
    own_text_stage.check(keeper.settings, text._replace(globs=(str(tmp_path / 'no-such-*.jsonl'),)))
  own_text_stage.check(keeper.settings, text_of(folder, keeper, 'court'))
