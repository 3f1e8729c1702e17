"""report.json: its figures are those of the stages, and None where nothing was measured."""

import json
import sys

import pytest
import synthetic

from dipaco_jax.config import settings
from dipaco_jax.reports import run_report

FIELDS = (
  'perplexity perplexity_by_path perplexity_by_domain base_perplexity validation_tokens bits_per_byte train_tokens '
  'paths parameters_path parameters_total train_flops tokens_per_s model_flops_utilization step_s outer_s '
  'outer_fraction outer_bytes_per_phase synchronous_bytes_per_phase peak_memory_bytes compilations wall_s goodput '
  'modules_sha256 config_sha256 versions'
).split()


def test_it_has_the_fields_that_others_read(runs):
  assert set(FIELDS) <= set(run_report.make_report(runs('grid')))


def test_figures_are_those_of_the_stages(runs):
  found = run_report.make_report(runs('grid'))
  for stage, names in (('evaluate', run_report.EVALUATE), ('train', run_report.TRAIN)):
    result = json.loads((runs('grid') / 'stages' / f'{stage}.json').read_text())['result']
    assert {name: found[name] for name in names} == {name: result.get(name) for name in names}
  assert found['goodput'] == (1600 + 75) / (1600 + 75 + 20 + 15 + 30 + 1)
  assert found['wall_s'] == synthetic.WALL_S | {'control': 1.2, 'evaluate': synthetic.WALL_S['evaluate'] - 1.2}
  config = settings.from_dict(json.loads((runs('grid') / 'config.json').read_text()))
  assert found['config_sha256'] == settings.digest(config)
  assert found['versions']['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert {'jax', 'flax', 'optax', 'orbax', 'dipaco_jax'} <= set(found['versions'])


def test_a_figure_that_is_not_measured_is_none(runs):
  found = run_report.make_report(runs('half'))
  assert found['perplexity'] is None and found['train_tokens'] is None
  assert found['paths'] == 16 and found['pretrain_steps'] == 300
  assert list(found['wall_s']) == ['tokenize', 'pretrain', 'route']


def test_seconds_are_those_of_the_workdir_where_no_stage_tells_them(runs, tmp_path):
  synthetic.make(tmp_path, stages=1)
  assert run_report.make_report(tmp_path)['seconds'] is run_report.make_report(tmp_path)['goodput'] is None
  about = {'stage': 'train', 'until': 1.0, 'paused': True, 'seconds': {'train': {'inner': 3.0, 'wait': 1.0}}}
  synthetic.write_json(tmp_path / 'stages' / 'seconds.json', about)
  found = run_report.make_report(tmp_path)
  assert found['seconds'] == about['seconds'] and found['goodput'] == 0.75


def test_a_run_without_a_complete_stage(tmp_path):
  synthetic.make(tmp_path, stages=0)
  with pytest.raises(ValueError, match='no stage of this run is complete yet'):
    run_report.make_report(tmp_path)
