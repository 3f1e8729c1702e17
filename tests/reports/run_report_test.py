"""report.json: its figures equal those of the stages, and are None if nothing was measured."""

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


def test_the_report_has_the_fields_that_other_programs_read(runs):
  assert set(FIELDS) <= set(run_report.make_report(runs('grid')))


def test_figures_equal_those_of_the_stages(runs):
  report = run_report.make_report(runs('grid'))
  for stage, names in (('evaluate', run_report.EVALUATE), ('train', run_report.TRAIN)):
    result = json.loads((runs('grid') / 'stages' / f'{stage}.json').read_text())['result']
    assert {name: report[name] for name in names} == {name: result.get(name) for name in names}
  assert report['goodput'] == (1600 + 75) / (1600 + 75 + 20 + 15 + 30 + 1)
  assert report['wall_s'] == synthetic.WALL_S | {'control': 1.2, 'evaluate': synthetic.WALL_S['evaluate'] - 1.2}
  config = settings.from_dict(json.loads((runs('grid') / 'config.json').read_text()))
  assert report['config_sha256'] == settings.digest(config)
  assert report['versions']['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert {'jax', 'flax', 'optax', 'orbax', 'dipaco_jax'} <= set(report['versions'])


def test_a_figure_that_is_not_measured_is_none(runs):
  report = run_report.make_report(runs('half'))
  assert report['perplexity'] is None and report['train_tokens'] is None
  assert report['paths'] == 16 and report['pretrain_steps'] == 300
  assert list(report['wall_s']) == ['tokenize', 'pretrain', 'route']


def test_seconds_are_read_from_the_workdir_if_no_stage_has_them(runs, tmp_path):
  synthetic.make(tmp_path, stages=1)
  assert run_report.make_report(tmp_path)['seconds'] is run_report.make_report(tmp_path)['goodput'] is None
  times = {'stage': 'train', 'until': 1.0, 'paused': True, 'seconds': {'train': {'inner': 3.0, 'wait': 1.0}}}
  synthetic.write_json(tmp_path / 'stages' / 'seconds.json', times)
  report = run_report.make_report(tmp_path)
  assert report['seconds'] == times['seconds'] and report['goodput'] == 0.75


def test_a_run_without_a_complete_stage_has_no_report(tmp_path):
  synthetic.make(tmp_path, stages=0)
  with pytest.raises(ValueError, match='no stage of this run is complete yet'):
    run_report.make_report(tmp_path)
