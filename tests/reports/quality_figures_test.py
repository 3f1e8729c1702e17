"""Where early stopping points, as a picture or a sentence."""

import synthetic

from dipaco_jax.reports import figures, run_data, run_report


def test_early_stopping_that_stops_nothing_is_a_sentence(tmp_path):
  synthetic.make(tmp_path, (('a', 2), ('b', 2)), phases=3)
  synthetic.write_json(tmp_path / 'paths' / 'best.json', {'version': [3] * 4})
  found = figures.draw_all(run_data.read_run(tmp_path, run_report.make_report(tmp_path)))
  assert 'early_stopping' not in found and 'All paths were best after the last phase' in found['holdout_losses'].caption
  synthetic.write_json(tmp_path / 'paths' / 'best.json', {'version': [3, 1, 3, 3]})
  found = figures.draw_all(run_data.read_run(tmp_path, run_report.make_report(tmp_path)))
  assert found['early_stopping'].caption == '1 of 4 paths is taken from before the last phase.'
