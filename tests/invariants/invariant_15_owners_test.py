"""Invariant 15: nothing leaves an owner but what docs/owners.md says: not the text, nor what is made of it alone."""

import json
import pathlib
import re
import types

import numpy as np
import one_process
import owners_run
import pytest
from owners_run import OWNERS, OwnersRun
from secrets_of_owners import ARRAY_BYTES, Secrets, Sent, of_store

from dipaco_jax.inference import engine, request, trained_run
from dipaco_jax.islands import island, own_text, owner_store
from dipaco_jax.registry.registry import Registry, Task
from dipaco_jax.storage import tensors

KINDS = {
  'text', 'ids <u2', 'ids <i4', 'rows of train <u2', 'rows of train <i4', 'rows of holdout <u2', 'rows of holdout <i4',
  'modules', 'AdamW states', 'weights in states',
}  # fmt: skip


@pytest.fixture(scope='module')
def one_device():
  with one_process.one_device():
    yield


@pytest.fixture(scope='module')
def finished(one_device, tmp_path_factory) -> tuple[OwnersRun, Sent]:
  """A whole run, and everything that its processes have given to the registry, the shared place and a gateway.

  The clinic's worker has direct access; that of the court is behind a gateway.
  """
  folder, sent = tmp_path_factory.mktemp('owners'), Sent()
  owners_run.write_text(folder)
  run = OwnersRun(folder, owners_run.settings(folder))
  with run.behind_gateway('court'), sent.recorded(run.place), run.members() as members:
    run.to('finished', members)
    for member in members[1:]:
      owners_run.owner_workdir.complete(member.island)
  return run, sent


def secrets_of(run: OwnersRun, owner: str) -> Secrets:
  levels = owner_store.private_levels(run.settings)
  file, path = owners_run.own_file(run.folder, owner), OWNERS.index(owner)
  return of_store(file, run.store(owner), path, run.settings.model.seq_len, levels)


@pytest.fixture(scope='module')
def secrets(finished) -> dict[str, Secrets]:
  return {owner: secrets_of(finished[0], owner) for owner in OWNERS}


def test_nothing_that_an_owner_keeps_leaves_it(finished, secrets):
  run, sent = finished
  for path, owner in enumerate(OWNERS):
    assert {*secrets[owner].windows} == KINDS and secrets[owner].ids, 'there is something of each kind to look for'
    assert {f'{phase}/{path}-shared'.encode() for phase in range(run.settings.train.phases)} == {
      *re.findall(rb'objects/paths/(\d+/%d-shared)-' % path, b' '.join([*names_sent(sent, owner)]))
    }, 'what the path sends is among what is looked at'
    facts = sent.statements if owner == 'clinic' else sent.requests
    assert any(b'own_text' in blob and b'holdout_targets' in blob and owner.encode() in blob for blob in facts)
  assert sum(map(len, sent.requests)) > 10_000 and not any(b'own_text.key' in blob for blob in sent.blobs())
  rest = [file.read_bytes() for file in run.place.iterdir() if file.is_file()]  # the registry, and files at the end
  assert secrets['clinic'].together(secrets['court']).find([*sent.blobs(), *rest]) == set()


def names_sent(sent: Sent, owner: str) -> list[bytes]:
  """The names of objects that a worker has sent: to the place, or in requests to put an object."""
  if owner == 'clinic':
    return [name.encode() for name in sent.objects]
  return [line for blob in sent.requests for line in re.findall(rb'PUT /v1/objects/(\S+)\?', blob)]


def test_each_kind_is_found_where_it_has_leaked(secrets):
  """Also between other bytes, and as JSON."""
  of_court = secrets['court']
  for kind, windows in of_court.windows.items():
    assert kind in of_court.find([b'x' * 5 + next(iter(windows)) + b'y' * 3])
  ids = [*next(iter(of_court.ids))]
  assert of_court.find([json.dumps({'ids': [1, *ids]}).encode()]) == {'ids in JSON'}
  assert not of_court.find([np.zeros(ARRAY_BYTES, np.float32).tobytes()])


@pytest.mark.slow
@pytest.mark.parametrize('leaving', ['shards', 'sequences'])
def test_what_is_not_in_the_store_is_found(leaving, finished, secrets, monkeypatch, tmp_path):
  run, leaky = finished[0], Sent()
  private, to = owner_store.is_private, owner_store.OwnerStorage.to
  monkeypatch.setattr(owner_store, 'is_private', lambda name, levels: private(name, levels) and leaving not in name)
  with pytest.raises(PermissionError, match=f'{leaving}.* would leave the store of its owner'):
    read_text(run, tmp_path / 'rejected')
  monkeypatch.setattr(owner_store.OwnerStorage, 'to', lambda at, name: at.shared if leaving in name else to(at, name))
  with leaky.recorded(run.place):
    read_text(run, tmp_path / 'leaky')
  kinds = {kind.rpartition(' ')[0] for kind in secrets['clinic'].find(leaky.blobs())}
  assert kinds >= ({'rows of train', 'rows of holdout'} if leaving == 'shards' else {'ids'})


def read_text(run: OwnersRun, store: pathlib.Path):
  """Reads an owner's text again, into another store."""
  made, task = run.begin('clinic', store), Task(0, island.OWN_TEXT, 'clinic', 0, 1, '', 0)
  try:
    own_text.perform(made, task, types.SimpleNamespace(check=lambda: None))
  finally:
    one_process.close(made)


def test_facts_of_text_are_sizes_and_digests(finished):
  run = finished[0]
  facts = Registry(f'sqlite:///{run.place}/registry.db')
  for path, fact in enumerate(facts.facts(island.OWN_TEXT)):
    [about] = fact.meta['paths'].values()
    assert fact.key == OWNERS[path] and about.keys() == {'tokens', 'documents', 'holdout_targets', 'sha256'}
    assert fact.meta.keys() - {'paths', 'trees'} <= COSTS
  facts.close()


COSTS = {'role', 'bytes_in', 'bytes_out', 'reading_s', 'writing_s', 'seconds', 'until'}


def test_the_report_has_perplexities_on_the_owners_hold_outs(finished):
  run = finished[0]
  report = json.loads((run.place / 'report.json').read_text())
  losses = {}
  facts = Registry(f'sqlite:///{run.place}/registry.db')
  for path, owner in enumerate(OWNERS):
    [fact] = facts.facts('evaluation', [str(path)], report['best_version_by_path'][path])
    losses[owner] = fact.meta['loss'], fact.meta['targets']
    assert report['owners'][owner]['perplexity'] == pytest.approx(np.exp(fact.meta['loss']))
    [text] = facts.facts(island.OWN_TEXT, [owner])
    assert text.meta['paths'][str(path)]['holdout_targets'] == fact.meta['targets']
  facts.close()
  nats, targets = (sum(each) for each in zip(*((loss * n, n) for loss, n in losses.values()), strict=True))
  assert report['perplexity'] == pytest.approx(np.exp(nats / targets))
  assert 'clinic' in (run.place / 'report.html').read_text()
  assert not [*(run.place / 'modules').glob('*/own')], 'modules of single paths are with their owners'


def test_a_store_ends_as_a_workdir_of_its_owners_path(finished):
  run = finished[0]
  path = trained_run.load(str(run.store('court')), 'court')
  module = run.store('court') / 'modules' / str(path.version) / 'own' / '1.safetensors'
  own = tensors.read_arrays(module)
  assert own and all(np.array_equal(path.params[name], x) for name, x in own.items() if x.ndim < 2)
  assert path.logits('bcd fgk').shape[1] == path.tokenizer.vocab_size
  assert trained_run.TrainedRun(str(run.store('court'))).paths_here == [1], 'which `serve` warms up'
  with pytest.raises(ValueError, match=r'--path=clinic: it is not in .*; its owner has it'):
    trained_run.load(str(run.store('court')), 'clinic')
  served = engine.Engine(trained_run.TrainedRun(str(run.store('court'))), 1, 1, None)
  with pytest.raises(ValueError, match='path=0: it is not here; the paths of this store are: 1'):
    served.check_request(request.Request((5, 6), 2, 0))


def test_a_store_is_a_run_of_its_own_for_nobody_else(finished):
  run = finished[0]
  assert pathlib.Path(run.store('court') / owner_store.MARK).exists()
  with pytest.raises(ValueError, match='is that of court in run'):
    owner_store.settle(owner_store_of(run, 'court'), 'another', 'court')
  with pytest.raises(ValueError, match='name another store for clinic'):
    mark = json.loads((run.store('court') / owner_store.MARK).read_text())
    owner_store.settle(owner_store_of(run, 'court'), mark['run'], 'clinic')


def owner_store_of(run: OwnersRun, owner: str):
  return owners_run.object_store.open_storage(str(run.store(owner)))
