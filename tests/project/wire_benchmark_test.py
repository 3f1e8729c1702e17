"""The benchmark that simulates lines: its models have the requested sizes and levels, and it runs."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import repository
import slow

from dipaco_jax.algorithm import modules
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer

FILE = repository.ROOT / 'benchmarks' / 'wire.py'
sys.path.insert(0, str(FILE.parent))  # as for a program there
SPEC = importlib.util.spec_from_file_location('wire', FILE)
wire = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wire)


def run(*options: str, status: int = 0) -> subprocess.CompletedProcess:
  env = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(repository.ROOT)}
  done = subprocess.run([sys.executable, FILE, *options], capture_output=True, text=True, env=env)
  assert done.returncode == status, done.stderr
  return done


@pytest.mark.parametrize('parameters', slow.all_but([150e6, 1e9, 10e9], 150e6))
def test_models_have_the_size_asked_for(parameters):
  sizes = wire.model_of(parameters, 32_000)
  made = transformer.make_model(settings.from_dict({'model': sizes}).model, 32_000)
  assert sum(x.size for x in transformer.shapes(made).values()) == pytest.approx(parameters, rel=0.005)
  assert 80 < sizes['width'] / sizes['num_layers'] < 150


def test_a_model_is_larger_than_its_embedding():
  with pytest.raises(InputError, match='1e\\+06'):
    wire.model_of(1e6, 32_000)


@pytest.mark.parametrize('case, count, low', [
  (wire.Case('diloco', 'thin'), 1, 0), (wire.Case('diloco', 'thin', 4), 5, 0), (wire.Case('dipaco', 'thin'), 3, 1),
  (wire.Case('dipaco', 'thin', 3), 7, 3), (wire.Case('dipaco', 'thin', 99), 13, 6),
])  # fmt: skip
def test_levels_are_cut(case, count, low):
  names = ['embed/embedding', 'final_norm/scale', *(f'block_{i}/mlp/up' for i in range(12))]
  axes = {'a': 2, 'b': 4} if case.grid == 'dipaco' else {'worker': 8}
  layout = modules.make_layout(axes.items(), wire.levels_of(case, 12), names)
  assert len(layout.levels) == count and sum(level.axes == ('a',) for level in layout.levels) == low
  counts = [len(layout.names(level)) for level in layout.levels if 'block' in level.pattern]
  assert sum(counts) == (12 if len(layout.levels) > 1 else 0) and max(counts, default=0) <= min(counts, default=0) + 1


@pytest.mark.slow
def test_utilization_of_a_case():
  flags = '--parameters=50e6 --step_s=0.5 --mbits=10,100,10000 --grid=dipaco --wire=lan --tau=20 --state=with'.split()
  done = run(*flags)
  (row,) = json.loads(done.stdout.splitlines()[-1])['rows']
  shares = list(row['utilization'].values())
  state = 8 / 16  # bytes of AdamW state for each parameter
  wall_s = 20 * 0.5 + (4 + 4 + state) * row['parameters'] * 8 / 100e6
  assert shares == sorted(shares) and shares[1] == pytest.approx(20 * 0.5 / wall_s, rel=1e-5)
  assert row['up'] == pytest.approx(4.5, rel=1e-5) and row['down'] == 4
  assert f'{shares[1]:.1%}' in done.stdout.splitlines()[2] and '| dipaco, lan, state with | 50 M |' in done.stdout


@pytest.mark.slow
def test_the_table():
  done = run('--parameters=50e6', '--step_s=0.5', '--tau=20')
  rows = {row['case']: row['gbits'] for row in json.loads(done.stdout.splitlines()[-1])['rows']}
  assert len(rows) == len(wire.table_cases()) and all(lines == sorted(lines) for lines in rows.values())
  plain, lan, thin = (rows[name] for name in ('plain DiLoCo', 'diloco, lan', 'diloco, thin'))
  assert thin[3] < plain[3] < lan[3] < rows['data-parallel'][3]
  assert plain[0] == pytest.approx(2 * 2 * 50e6 * 8 / 10 / 1e9, rel=0.01)  # both transfers take as long as the steps
  assert 'the paper' not in done.stdout  # whose figures are for other sizes


@pytest.mark.slow
def test_sizes_and_times_go_in_pairs():
  assert '--step_s has 3 values, --parameters 1' in run('--parameters=50e6', status=2).stderr
