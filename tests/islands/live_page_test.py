"""The page of an islands run while it trains: rows from facts alone."""

import one_process
import pytest

from dipaco_jax.islands import monitor, run_history
from dipaco_jax.islands.registry import Fact

made = one_process.made
PATHS = '0123'


def put_phase(of, phase: int):
  """Puts the facts of a phase: a row of two steps for each path, all modules, all losses on hold-outs."""
  about = {'timed_s': 2.0, 'timed_steps': 1, 'holdout_loss': 3.0, 'started': 0.0, 'ended': 4.0}
  rows = [[2, 3.0 + phase, 1.0, 1e-3, 2, 0]]
  of.registry.put([Fact('checkpoint', path, phase, '', '', about | {'rows': rows, 'objects': {}}) for path in PATHS])
  of.registry.put([Fact('module', module, phase + 1, '', '', {}) for module in of.all_modules()])
  losses = {'loss': 2.5, 'targets': 10.0}
  of.registry.put([Fact('evaluation', path, phase + 1, '', '', losses) for path in PATHS])


def test_rows_need_no_file_of_this_machine(made):
  """A monitor that starts again far from the workdir has the registry, and nothing that the stages have left."""
  put_phase(made, 0)
  assert not (made.run.workdir / 'stages').exists()
  page = monitor.LivePage(made)
  rows = page.make_rows()
  assert [row['kind'] for row in rows] == ['step'] * 4 + ['phase'] and page.phases == 1
  assert rows[-1]['loss_by_path'] == [3.0] * 4 and rows[-1]['holdout_loss_by_path'] == [2.5] * 4
  assert page.make_rows() == rows


def test_a_phase_that_cannot_be_read_is_counted_once(made, monkeypatch):
  put_phase(made, 0)
  page, real = monitor.LivePage(made), run_history.phase_row

  def failing(*args):
    raise OSError('the registry is away')

  monkeypatch.setattr(run_history, 'phase_row', failing)
  for _ in range(2):
    with pytest.raises(OSError):
      page.make_rows()
  monkeypatch.setattr(run_history, 'phase_row', real)
  rows = page.make_rows()
  assert [row['kind'] for row in rows] == ['step'] * 4 + ['phase']
  put_phase(made, 1)
  assert [row['phase'] for row in page.make_rows() if row['kind'] == 'phase'] == [1, 2]
  assert page.pointers.version == [1] * 4
