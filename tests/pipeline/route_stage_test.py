"""Text is routed in parts, by any number of processes, and those that are there are not made again."""

import dataclasses
import functools
import logging
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import slow

from dipaco_jax.pipeline import (
  features,
  resharding_round,
  route_stage,
  run as run_lib,
  stage_records,
)
from dipaco_jax.routing import router
from dipaco_jax.storage import publishing, seals, user_modules


def opened(undisturbed, workdir, *names):
  """A run that has come as far as these of an undisturbed one's artefacts, and the router of that one."""
  for name in names:
    shutil.copytree(undisturbed / name, workdir / name)
  run = run_lib.unattended(workdir, stage_records.read_settings(undisturbed))
  arrays = safetensors.numpy.load_file(undisturbed / 'routing' / '0' / 'router.safetensors')
  return run, router.Router(**{name: jax.numpy.asarray(x) for name, x in arrays.items()})


def test_shares_make_the_whole(undisturbed, tmp_path, monkeypatch):
  run, fitted = opened(undisturbed, tmp_path, 'sequences', 'base', 'stages')
  expected, folder = np.load(undisturbed / 'routing' / '0' / 'train.npy'), tmp_path / 'parts'
  monkeypatch.setattr(features, 'MAX_FEATURE_BYTES', 0)  # as of a text whose features are not kept
  monkeypatch.setattr(features, 'FEATURE_ROWS', 64)
  monkeypatch.setattr(route_stage, 'PART_ROWS', 128)
  assert len(expected) > 3 * 128

  for share, there in (((2, 3), {2}), ((0, 3), {0, 2, 3}), ((1, 3), {0, 1, 2, 3})):
    route_stage.route_parts(run, fitted, folder, 'train', 1, share)
    assert {path.name for path in folder.glob('*.npy')} == {f'train-{i}.npy' for i in there}
  np.testing.assert_array_equal(np.concatenate([np.load(folder / f'train-{i}.npy') for i in range(4)]), expected)
  assert not (tmp_path / 'features').exists()

  publishing.write_array(folder / 'train-1.npy', np.full((128, 1), 7, np.int32))
  (folder / 'train-2.npy').unlink()
  route_stage.route_parts(run, fitted, folder, 'train', 1, (0, 1))
  assert (np.load(folder / 'train-1.npy') == 7).all()
  np.testing.assert_array_equal(np.load(folder / 'train-2.npy'), expected[256:384])
  run.metrics.close()


def test_what_is_routed_needs_no_features_and_its_parts_go(undisturbed, tmp_path, monkeypatch):
  run, fitted = opened(undisturbed, tmp_path, 'sequences', 'stages')  # no base model, of which features are made
  routed, folder = undisturbed / 'routing' / '0', tmp_path / 'routing' / '0-parts'
  shutil.copytree(routed, folder, ignore=shutil.ignore_patterns(seals.SUMS))
  for split in ('train', 'validation'):
    np.save(folder / f'{split}-0.npy', np.load(routed / f'{split}.npy').reshape(len(run.sequences(split)), -1))
  killed = shutil.copytree(folder, tmp_path / 'as it was')
  monkeypatch.setattr(features, 'MAX_FEATURE_BYTES', 0)

  for _ in range(2):
    route_stage.publish_router(run, 0, lambda: (fitted, {}))
    route_stage.write_shards(run, 0)
    assert sorted(path.name for path in (tmp_path / 'routing').iterdir()) == ['0']
    shutil.copytree(killed, folder)  # as one leaves it who is killed before it goes
  for name in ('train.npy', 'validation.npy', 'meta.json'):
    assert (tmp_path / 'routing' / '0' / name).read_bytes() == (routed / name).read_bytes()
  run.metrics.close()


def test_a_path_that_a_round_leaves_without_text_is_given_what_suits_it(undisturbed, tmp_path, caplog):
  run, fitted = opened(undisturbed, tmp_path, 'sequences', 'stages', 'features')
  z_ND = jax.numpy.asarray(np.load(undisturbed / 'features' / 'train.npy'))
  biased = fitted._replace(bias=fitted.bias - 1e4 * (np.arange(4) == 2))
  routed = np.asarray(router.route(biased, z_ND))[:, 0]
  assert 2 not in routed
  alone = shutil.copytree(tmp_path, tmp_path / 'alone')
  with caplog.at_level(logging.WARNING):
    route_stage.publish_router(run, 1, lambda: (biased, {'x': 1}), functools.partial(resharding_round.fill, run, 1))
    route_stage.write_shards(run, 1)

  meta = seals.read_json(tmp_path / 'routing' / '1' / 'meta.json')
  shard, trained = run.shards_meta(1), run.shards_meta(1)['shard_sequences']
  assert meta == {'x': 1, 'given_by_path': [0, 0, meta['given_by_path'][2], 0]}
  assert 'round 1 of re-sharding' in caplog.text and f'path 2 gets {meta["given_by_path"][2]}' in caplog.text
  assert min(shard['shard_rows']) > 0 and 0 < trained[2] <= meta['given_by_path'][2] <= 0.1 * sum(trained) / 3
  paths = run.routed('train', 1)[:, 0]
  moved = np.flatnonzero(paths != routed)
  assert set(paths[moved]) == {2} and len(moved) == meta['given_by_path'][2]
  scores_NP = np.asarray(router.scores(biased, z_ND))
  lack_N = scores_NP.max(1) - scores_NP[:, 2]
  assert lack_N[moved].mean() < np.quantile(lack_N, 0.15)

  other = run_lib.unattended(alone, run.settings)
  route_stage.publish_router(other, 1, lambda: (biased, {}))
  with pytest.raises(ValueError, match=r'no text was routed to paths \[2\]'):
    route_stage.write_shards(other, 1)
  for made in (run, other):
    made.metrics.close()


def by_document(run, **changes):
  """The run with `routing.by_document`, and of each training sequence the first one of its document."""
  routing = dataclasses.replace(run.settings.routing, by_document=True, **changes)
  first_of: dict[int, int] = {}
  firsts = [first_of.setdefault(document, i) for i, document in enumerate(run.sequences('train').columns()[0].tolist())]
  assert len(first_of) < len(firsts) and len(run.sequences('train').counts) == 3  # several sequences, several parts
  return dataclasses.replace(run, settings=dataclasses.replace(run.settings, routing=routing)), np.array(firsts)


@pytest.mark.parametrize('top_n', slow.but([1, 2], 1))
def test_sequences_of_a_document_go_where_its_first_is_routed(undisturbed, tmp_path, monkeypatch, top_n):
  run, _ = opened(undisturbed, tmp_path, 'sequences', 'stages', 'features')
  run, firsts = by_document(run, top_n=top_n, restarts=1)
  monkeypatch.setattr(route_stage, 'PART_ROWS', 100)  # parts end inside documents
  route_stage.route(run)
  z_ND = jax.numpy.asarray(np.load(undisturbed / 'features' / 'train.npy'))
  fitted = router.fit('kmeans', jax.random.key(0), z_ND[np.unique(firsts)], (2, 2), run.settings.routing)
  expected = np.asarray(router.route(fitted, z_ND, top_n))
  np.testing.assert_array_equal(run.router(0).centroids, fitted.centroids)
  np.testing.assert_array_equal(run.routed('train', 0), expected[firsts])
  assert (expected != expected[firsts]).any()  # some would go elsewhere by their own beginnings
  run.metrics.close()


def test_a_capacity_counts_documents_that_are_routed_together(undisturbed, tmp_path):
  run, fitted = opened(undisturbed, tmp_path, 'sequences', 'stages', 'features')
  run, firsts = by_document(run, capacity=1.05)
  route_stage.publish_router(run, 0, lambda: (fitted, {}))
  routed = run.routed('train', 0)[:, 0]
  np.testing.assert_array_equal(routed, routed[firsts])
  documents = np.unique(firsts)
  free = np.asarray(router.route(fitted, np.load(undisturbed / 'features' / 'train.npy')))[documents, 0]
  room = np.ceil(1.05 * len(documents) / 4)
  assert np.bincount(routed[documents]).max() <= room < np.bincount(free).max()
  run.metrics.close()


def test_a_path_without_text_is_given_whole_documents(undisturbed, tmp_path):
  run, fitted = opened(undisturbed, tmp_path, 'sequences', 'stages', 'features')
  run, firsts = by_document(run)
  biased = fitted._replace(bias=fitted.bias - 1e4 * (np.arange(4) == 2))
  route_stage.publish_router(run, 1, lambda: (biased, {}), functools.partial(resharding_round.fill, run, 1))
  routed = run.routed('train', 1)[:, 0]
  np.testing.assert_array_equal(routed, routed[firsts])
  given = seals.read_json(tmp_path / 'routing' / '1' / 'meta.json')['given_by_path']
  assert given == [0, 0, (routed == 2).sum(), 0] and given[2] > len(np.unique(firsts[routed == 2])) > 0
  run.metrics.close()


def test_a_random_path_is_drawn_for_a_document(undisturbed, tmp_path):
  run, _ = opened(undisturbed, tmp_path, 'sequences', 'stages')
  run, firsts = by_document(run, method='random')
  alone = dataclasses.replace(run, settings=stage_records.read_settings(undisturbed))
  of_sequences = route_stage.by_hash(alone, 'train', 2)
  np.testing.assert_array_equal(route_stage.by_hash(run, 'train', 2), of_sequences[firsts])
  np.testing.assert_array_equal(*(route_stage.by_hash(either, 'validation', 1) for either in (run, alone)))
  run.metrics.close()


@pytest.mark.parametrize(
  'grid, top_n', [({'owner': ('vowels', 'consonants')}, 1), ({'a': 3, 'owner': ('consonants', 'vowels')}, 2)]
)
def test_text_of_an_owner_goes_to_its_paths(undisturbed, tmp_path, grid, top_n):
  run, _ = opened(undisturbed, tmp_path, 'sequences', 'stages')
  s = run.settings
  routing = dataclasses.replace(s.routing, method='owner', top_n=top_n)
  settings = dataclasses.replace(
    s, grid=tuple(sorted(grid.items())), levels=(('all', '.*', ('owner',)),), routing=routing
  )
  run = run_lib.unattended(tmp_path, settings)
  route_stage.route(run)
  names, numbers = run.result('tokenize')['domains'], run.layout.grid
  for split, paths_N in (('train', run.routed('train', 0)), ('validation', run.routed('validation', 0)[:, None])):
    _, domain_N = run.sequences(split).columns()
    owner_N = [numbers.coordinates(int(path))[-1] for path in paths_N[:, 0]]
    assert [grid['owner'][c] for c in owner_N] == [names[i] for i in domain_N]
    assert {*paths_N.ravel().tolist()} == {*range(numbers.num_paths)}
    assert all(len({*paths}) == paths_N.shape[1] for paths in paths_N.tolist())
  run.metrics.close()


def test_scores_of_a_document_are_summed():
  routed_by_N, scores_NP = np.array([4, 4, 9, 2, 2, 2]), np.arange(12.0).reshape(6, 2)
  scores_NP[1, 1] = np.nan
  indices, sums_MP = features.sum_routed_together(routed_by_N, scores_NP)
  assert indices.tolist() == [2, 4, 9]
  np.testing.assert_array_equal(sums_MP, [[24, 27], [2, np.nan], [4, 5]])
  alone, same_NP = features.sum_routed_together(np.arange(6), scores_NP)
  assert alone.tolist() == list(range(6))
  np.testing.assert_array_equal(same_NP, scores_NP)


def test_too_little_router_data_is_said_before_training(undisturbed, tmp_path):
  run, _ = opened(undisturbed, tmp_path, 'sequences', 'stages')
  s = run.settings
  few = dataclasses.replace(s.routing, method='discriminative', router_fraction=1e-4)
  run = dataclasses.replace(run, settings=dataclasses.replace(s, routing=few))
  with pytest.raises(ValueError, match=r'router_fraction=0.0001 keeps \d sequences, fewer than the 4 paths'):
    route_stage.route(run)
  run.metrics.close()


CHANGES = [{'top_n': 2}, {'capacity': 1.1}, {'by_document': True, 'sample': 100}]
OWN = """
class ByFeature:
  uses_features = True

  def fit(self, texts, num_paths, seed):
    assert len(texts) in (100, 400) and seed == 0
    return {'like': texts.features[:num_paths]}

  def scores(self, state, texts):
    return -((texts.features[:, None] - state['like']) ** 2).sum(-1)

def make(config):
  return ByFeature()
"""


@pytest.mark.parametrize('changes', slow.but(CHANGES, {'capacity': 1.1}))
def test_a_user_defined_router_has_what_built_in_ones_have(undisturbed, tmp_path, monkeypatch, changes):
  (tmp_path / 'own_by_feature.py').write_text(OWN)
  monkeypatch.syspath_prepend(tmp_path)
  user_modules.trust(['own_by_feature'])
  run, _ = opened(undisturbed, tmp_path, 'sequences', 'base', 'stages')
  routing = dataclasses.replace(run.settings.routing, method='own_by_feature:make', **{'sample': 400} | changes)
  run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, routing=routing))
  monkeypatch.setattr(route_stage, 'PART_ROWS', 128)
  meta = route_stage.route(run)
  z_ND, fitted = np.load(tmp_path / 'features' / 'train.npy'), run.router(0)
  scores_NP = -((z_ND[:, None] - fitted.state['like']) ** 2).sum(-1)
  routed = run.routed('train', 0)
  if routing.top_n == 2:
    np.testing.assert_array_equal(routed, np.argsort(-scores_NP, axis=1, kind='stable')[:, :2])
  elif routing.by_document:
    np.testing.assert_array_equal(routed[:, 0], scores_NP.argmax(1)[by_document(run)[1]])
  else:
    assert np.bincount(routed[:, 0]).max() <= np.ceil(1.1 * len(routed) / 4) < np.bincount(scores_NP.argmax(1)).max()
  assert sum(meta['validation_sequences']) == len(run.routed('validation', 0))
  run.metrics.close()


def test_a_capacity_moves_no_more_than_it_has_to():
  scores_NP = np.random.default_rng(0).normal((1.5, 0, 0, -1.0), size=(400, 4))
  free = scores_NP.argmax(1)
  counts = np.bincount(free)
  np.testing.assert_array_equal(route_stage.within(scores_NP, counts.max()), free)
  room = 150
  found = route_stage.within(scores_NP, room)
  assert counts[0] > 200 and (counts[1:] < 100).all()
  assert np.bincount(found).max() <= room and np.bincount(found)[3] < 60  # not even shards, of 100
  moved = (found != free) & (free != 0)
  assert moved.mean() < 0.02, 'nobody has to leave a path that has room'
  scores_NP[:, 3] -= 9
  assert (np.bincount(route_stage.within(scores_NP, room), minlength=4) > 0).all(), 'a path that nobody likes best'
