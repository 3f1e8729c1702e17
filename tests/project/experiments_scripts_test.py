"""The scripts of the experiments run missing rows, once."""

import gzip
import json
import os
import re
import signal

import pytest
import tiny_run
from experiment_scripts import finish, start, wait_for


@pytest.mark.slow
def test_a_script_continues_where_it_was_killed_and_runs_nothing_twice(tmp_path):
  tiny_run.write_config(tmp_path)
  options = '--rows=dense,kmeans', '--seeds=0'
  killed = start(tmp_path, *options)
  wait_for(killed, tmp_path, 'runs/test/dense-*/stages/pretrain.json')
  os.killpg(killed.pid, signal.SIGKILL)
  killed.communicate()
  (base,) = tmp_path.glob('runs/test/dense-*/stages/pretrain.json')
  made_at = base.stat().st_mtime_ns

  out, err = finish(start(tmp_path, *options))
  assert '[1/2] dense, seed 0' in err and '[2/2] DiPaCo, k-means, seed 0; about' in err
  assert base.stat().st_mtime_ns == made_at  # it went on
  (other,) = tmp_path.glob('runs/test/dipaco-*/stages/pretrain.json')
  assert json.loads(other.read_text()) == json.loads(base.read_text())  # taken from there
  assert '| DiPaCo, k-means | 1 |' in out and 'Not run: DiLoCo, 4 workers, tau = 4;' in out

  file = tmp_path / 'results' / 'test' / 'methods.json'
  written = file.read_bytes()
  records = {record['row']: record for record in json.loads(written)['runs']}
  assert set(records) == {'dense', 'kmeans'} and str(tmp_path) not in written.decode()
  assert records['kmeans']['base_perplexity'] == records['dense']['base_perplexity'] > 1
  assert records['kmeans']['sent_bytes'] > records['dense']['sent_bytes'] == 0
  assert file.with_suffix('.png').stat().st_size > 1000

  os.rename(tmp_path / 'runs', tmp_path / 'gone')
  again, err = finish(start(tmp_path, *options))
  assert out.endswith(again) and '| DiPaCo, k-means | 1 |' in again and not err
  assert file.read_bytes() == written and not (tmp_path / 'runs').exists()


@pytest.mark.slow
def test_two_processes_share_the_rows(tmp_path):
  tiny_run.write_config(tmp_path)
  both = [start(tmp_path, '--rows=dense,kmeans', '--seeds=0') for _ in range(2)]
  told = [finish(process)[1] for process in both]
  begun = re.findall(r'\[\d/2\] (.*), seed', ''.join(told))
  assert sorted(begun) == ['DiPaCo, k-means', 'dense']
  assert 'another process trains it' in ''.join(told)
  records = json.loads((tmp_path / 'results' / 'test' / 'methods.json').read_text())['runs']
  assert [record['row'] for record in records] == ['dense', 'kmeans']


@pytest.mark.slow
def test_two_processes_make_the_bases_of_two_seeds_beside_each_other(tmp_path):
  tiny_run.write_config(tmp_path)
  both = [start(tmp_path, '--rows=diloco_own', '--seeds=0,1') for _ in range(2)]
  for process in both:
    finish(process)
  bases = list(tmp_path.glob('runs/test/diloco-*-[01].json'))
  assert sorted(file.stem[-1] for file in bases) == ['0', '1']
  records = json.loads((tmp_path / 'results' / 'test' / 'methods.json').read_text())['runs']
  assert [(record['row'], record['seed']) for record in records] == [('diloco_own', 0), ('diloco_own', 1)]
  assert all(
    record['before'] == json.loads(file.read_text()) for record, file in zip(records, sorted(bases), strict=True)
  )


@pytest.mark.slow
def test_routing_by_document_is_measured_on_pieces_and_beginnings(tmp_path):
  """Also a row that another table has results of, which have no beginnings."""
  tiny_run.write_config(tmp_path)
  (tmp_path / 'documents.jsonl.gz').write_bytes(gzip.compress((tmp_path / 'text.jsonl').read_bytes()))
  finish(start(tmp_path, '--rows=flat'))
  options = '--rows=flat,flat_documents', f'--documents={tmp_path / "documents.jsonl.gz"}'
  out, _ = finish(start(tmp_path, *options, script='documents.py'))
  assert '| flat MoE, 4 paths, k-means, by document | 1 |' in out
  records = {r['row']: r for r in json.loads((tmp_path / 'results' / 'test' / 'documents.json').read_text())['runs']}
  assert all(r['texts']['pieces']['perplexity'] == r['perplexity'] for r in records.values())
  assert all(r['texts']['beginnings_refit']['perplexity'] > 1 for r in records.values())
  assert records['flat']['perplexity'] != records['flat_documents']['perplexity']


@pytest.mark.slow
def test_versions_and_paths_of_finished_runs_are_averaged_and_mixed(tmp_path):
  tiny_run.write_config(tmp_path)
  options = '--rows=flat,dense_batch_both', '--seeds=0'
  finish(start(tmp_path, *options, script='baselines.py'))
  finish(start(tmp_path, *options, script='mixtures.py'))
  runs = json.loads((tmp_path / 'results' / 'test' / 'mixtures.json').read_text())['runs']
  records = {record['row']: record for record in runs}
  assert records['dense_batch_both']['mixtures'].keys() == {'run', 'ema', 'decay', 'versions'}
  assert records['flat']['mixtures'].keys() == {'run', 'soup', 'cbtm', 'temperature'}
  assert records['dense_batch_both']['mixtures']['versions'] == records['dense_batch_both']['phases'] == 4
  for record in runs:
    assert record['mixtures']['run'] == pytest.approx(record['perplexity'], rel=1e-4)
