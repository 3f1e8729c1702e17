"""The notebooks of examples/ run as they are, from the first cell to the last, in a folder of their own."""

import ast
import math
import os

import nbclient
import nbformat
import pytest
import quick_xla
import tiny_run
from repository import ROOT

NOTEBOOKS = sorted((ROOT / 'examples').glob('*.ipynb'))


def read(name: str) -> nbformat.NotebookNode:
  return nbformat.read(ROOT / 'examples' / f'{name}.ipynb', as_version=4)


@pytest.fixture
def execute(tmp_path, monkeypatch):
  """`execute(name)` runs a notebook; returns the outputs of each cell of code."""
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  for name, value in {
    'PYTHONPATH': path,
    'XLA_FLAGS': quick_xla.on(1),
    'IPYTHONDIR': str(tmp_path / '.ipython'),
  }.items():
    monkeypatch.setenv(name, value)

  def run(name: str) -> list[list[nbformat.NotebookNode]]:
    notebook, place = read(name), {'metadata': {'path': tmp_path}}
    nbclient.NotebookClient(notebook, timeout=tiny_run.PATIENCE_S, resources=place).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == 'code']

  return run


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')  # of Jupyter's own
def test_train_and_route(execute, tmp_path):
  _, trained, report, picture, _, _, routed, scored, _, compared = execute('train_and_route')
  shown = ''.join(output.text for output in trained if output.output_type == 'stream')
  assert 'train 120/120 updates' in shown and '\r' not in shown
  assert picture[0].data['image/png'].startswith('iVBOR')  # as base64 has a PNG's first bytes
  paths = ast.literal_eval(routed[0].data['text/plain']).values()
  assert len(paths) == 3 and {*paths} <= {*range(4)}
  scores = [float(word.rstrip('*')) for line in scored[0].text.splitlines() for word in line.split()[1:]]
  assert len(scores) == 12 and all(1 < score < math.log(512) for score in scores) and scored[0].text.count('*') == 3
  perplexity = ast.literal_eval(report[0].data['text/plain'])['perplexity']
  found = ast.literal_eval(compared[-1].data['text/plain'])
  assert found['averages'] == perplexity and 1 < found['lion'] < 512 and found['lion'] != perplexity
  assert (tmp_path / 'runs' / 'lion' / 'report.html').exists()


@pytest.mark.parametrize('name', [file.stem for file in NOTEBOOKS])
def test_it_is_kept_without_outputs(name):
  nbformat.validate(read(name))
  code = [cell for cell in read(name).cells if cell.cell_type == 'code']
  assert code and not [cell for cell in code if cell.outputs or cell.execution_count]
