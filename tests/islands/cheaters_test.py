"""Workers that cheat, as processes of their own: they are found and suspended, and honest runs are not changed."""

import contextlib
import signal
import time
from collections.abc import Iterator

import cheater
import one_process
import pytest
from cluster import Cluster, More

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.islands import audit_facts, audit_history, island, suspensions
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.storage import object_store

pytestmark = pytest.mark.slow
HONEST = 'worker-0', 'worker-1', 'worker-2'
OTHERS = 'outer-0', 'evaluator-0', 'monitor-0'
LONGEST_S = 400


def make_settings(folder, phases: int = 8, **sections) -> settings_lib.Settings:
  s = one_process.two_phases(folder)
  train, inner = dict(phases=phases), dict(decay_steps=12 + 6 * phases)
  return one_process.changed(s, train=train, inner=inner, **sections)


@contextlib.contextmanager
def running(folder, settings: settings_lib.Settings, names, lease_s: float = 4.0) -> Iterator[Cluster]:
  place = folder / 'run'
  place.mkdir()
  cluster = Cluster(settings, str(place), f'sqlite:///{place}/registry.db', folder / 'machines', names, More(lease_s))
  try:
    yield cluster
  finally:
    cluster.kill()


def wait_for(cluster: Cluster, moment) -> None:
  deadline = time.monotonic() + LONGEST_S
  while not moment():
    assert time.monotonic() < deadline, cluster.registry.counts()
    cluster.tend()
    time.sleep(0.1)


def look(cluster: Cluster) -> island.Island:
  run = run_lib.unattended(cluster.folder, cluster.settings)
  return island.Island(run, cluster.registry, object_store.open_storage(cluster.place), 'test')


def digest(cluster: Cluster) -> str:
  return cluster.registry.facts('finished')[0].sha256


@pytest.mark.parametrize('kind', cheater.KINDS)
def test_a_cheater_is_found_and_suspended_and_the_run_ends_without_it(kind, tmp_path):
  settings = make_settings(tmp_path, audit=dict(fraction=0.5), checkpoint=dict(state_every_phases=2))
  name = f'{kind}-0'
  with running(tmp_path, settings, (name, *HONEST[:2], *OTHERS)) as cluster:
    wait_for(cluster, cluster.finished)
    assert [*suspensions.current(cluster.registry)] == [name]
    assert cluster.processes[name].exitcode == 2
    log = (cluster.folder / f'{name}.log').read_text().splitlines()
    assert log[-1].startswith(f'{name} is suspended: ')
    again = cluster.start(name)
    again.join(60)
    assert again.exitcode in (0, 2)  # 0: the run is finished
    here = look(cluster)
    figures = audit_history.figures(here)
    assert figures['audits']['different'] and figures['suspended'][0]['worker'] == name
    left_out = [fact for fact in cluster.registry.facts('module') if 'suspended' in str(fact.meta.get('left_out'))]
    named = {path for fact in left_out for path in fact.meta['left_out']}
    assert named <= {fact.key for fact in cluster.registry.facts('excluded')}


def test_honest_runs_have_the_same_digest_with_and_without_audits_though_auditors_are_killed(tmp_path):
  digests = []
  for name, sections in (('plain', {}), ('audited', dict(audit=dict(fraction=1.0)))):
    folder = tmp_path / name
    folder.mkdir()
    settings = make_settings(folder, 4, checkpoint=dict(state_every_phases=2), **sections)
    with running(folder, settings, (*HONEST, *OTHERS)) as cluster:
      killed = set()

      def moment(cluster=cluster, killed=killed) -> bool:
        for task in cluster.registry.tasks('running', 'audit'):
          if len(killed) < 3 and task['id'] not in killed and task['owner'] in HONEST:
            killed.add(task['id'])
            cluster.signal(task['owner'], signal.SIGKILL)
        return cluster.finished()

      wait_for(cluster, moment)
      digests.append(digest(cluster))
      assert not suspensions.current(cluster.registry) and len(killed) == (3 if sections else 0)
      audited = cluster.registry.facts(audit_facts.AUDITED)
      assert len(audited) == (16 if sections else 0) and not [f for f in audited if f.meta['equal'] is False]
      if sections:
        assert sum(fact.meta['equal'] is True for fact in audited) > 8
  assert digests[0] == digests[1]


def test_a_run_with_one_worker_ends_and_says_that_nothing_was_audited(tmp_path):
  settings = make_settings(tmp_path, 2, audit=dict(fraction=1.0))
  with running(tmp_path, settings, (HONEST[0], *OTHERS)) as cluster:
    wait_for(cluster, cluster.finished)
    assert audit_history.count(look(cluster))['given_up'] == 8
