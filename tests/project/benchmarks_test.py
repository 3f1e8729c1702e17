"""Every benchmark runs at a tiny size, as a person runs it, and ends with its JSON object."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import object_server
import pytest
import repository
import shapes_of_families
import slow
import small

from dipaco_jax.models import loss, transformer

FOLDER = repository.ROOT / 'benchmarks'
SIZES = '--width=32 --num_heads=2 --mlp_dim=48 --vocab_size=64 --seq_len=64 --batch_size=2'.split()


def run(name: str, *flags: str, sizes=SIZES) -> dict:
  """One device: the 8 fake ones of the tests would share its cores."""
  command = [sys.executable, str(FOLDER / name), *sizes, *flags]
  done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {'XLA_FLAGS': ''})
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_inner_step():
  found = run('inner_step.py', '--num_layers=1', '--steps_per_dispatch=2', '--rounds=2')
  keys = {'tokens_per_s', 'mfu', 'mfu_causal', 'peak_memory_bytes', 'compilations'}
  assert keys <= set(found)
  assert found['mfu'] is None  # nobody knows a CPU's peak
  assert found['compilations'] == 4  # start, begin, fresh_state and steps, once each
  assert math.isclose(found['losses'][0], math.log(64), rel_tol=0.2)  # of an untrained model on random tokens
  assert found['tokens_per_s'] > 0 and found['ratio_bare_many'] > 0 and found['ratio_bare_one'] > 0


def bare_families() -> dict[str, dict]:
  """Those that the bare loop can be of: it has no mixtures."""
  stretched = {'qwen2', 'qwen3'}  # their longer texts, in other ways than Llama's
  return {
    name: {x: y for x, y in has.items() if name not in stretched or 'rope' not in x}
    for name, has in shapes_of_families.FAMILIES.items()
    if 'num_experts' not in has
  }


@pytest.mark.parametrize('family', slow.all_but(bare_families(), 'llama3'))
def test_the_bare_loop_is_of_the_same_architecture(family, monkeypatch):
  monkeypatch.syspath_prepend(str(FOLDER))
  import bare

  model = small.settings(model={'width': 16, 'num_layers': 4, 'num_heads': 4, 'head_dim': 4, 'mlp_dim': 24}).model
  model = dataclasses.replace(model, seq_len=64, **bare_families()[family])
  made = transformer.make_model(model, small.VOCAB)
  params = small.base(made)
  tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, small.VOCAB)
  segments = jnp.asarray(np.repeat([[1, 2, 2, 0], [1, 1, 1, 1]], 16, axis=1))

  @jax.jit
  def both(params):
    nll, count = loss.path_loss(made, 8, params, tokens, segments)
    return nll / count, bare.mean_loss(bare.config_of(made.config, 8), bare.from_flat(params), tokens, segments)

  ours, theirs = both(params)
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.slow
def test_accelerator(tmp_path):
  out = tmp_path / 'found.jsonl'
  options = f'--parts=attention,outer --minutes=1 --out={out}'.split()
  commands = 'attention.py --rows=2 --seq_len=128 --num_heads=1 --kernels=xla --repeats=1', 'outer_step.py --none'
  env = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(FOLDER)}
  code = 'import accelerator as a; from absl import app; a.COMMANDS.update(attention={!r}, outer={!r}); app.run(a.main)'
  command = [sys.executable, '-c', code.format(*commands), *options]
  first, second = (subprocess.run(command, capture_output=True, text=True, env=env).stdout for _ in range(2))
  lines = [json.loads(line) for line in out.read_text().splitlines()]
  assert [line['part'] for line in lines] == ['attention', 'outer', 'outer']  # what failed is tried again
  assert 0 < lines[0]['xla_error'] < 1e-2 and lines[0]['versions']['jax'] and "'none'" in lines[1]['failed']
  assert 'attention (' in first and 'attention: done before' in second


@pytest.mark.slow
def test_bucket(monkeypatch):
  changes = 'data.max_documents=120,pretrain.steps=4,train.phases=3,train.steps_per_phase=4,inner.warmup_steps=-1'
  changes += ',evaluate.every_phases=0'
  with object_server.s3_server() as endpoint:
    for name, value in object_server.environment(endpoint).items():
      monkeypatch.setenv(name, value)
    url = f's3://{object_server.BUCKET}/bench'
    config = f'--config={repository.ROOT / "configs" / "tiny.py"}'
    found = run('bucket.py', f'--url={url}', config, '--turns=1', f'--changes={changes}', sizes=())
  assert found['phases'] == {'disk': 2, 'bucket': 2} and min(found['phase_s'].values()) > 0
  assert found['ratio'] == found['phase_s']['bucket'] / found['phase_s']['disk'] == found['ratios'][0]


@pytest.mark.slow
def test_goodput():
  flags = '--faults=0,900', '--rules=quorum', '--workers=2', '--minutes=0.4', '--tau=16', '--step_s=0.1', '--lease_s=3'
  found = run('goodput.py', *flags, sizes=())
  quiet, faulty = found['rows']
  assert quiet['steps'] > 0 and quiet['late'] == 0 and sum(quiet['faults'].values()) == 0
  assert sum(faulty['faults'].values()) > 0 and faulty['steps'] < quiet['steps']


@pytest.mark.slow
def test_outer_step():
  found = run('outer_step.py', '--num_layers=3', '--grid=2,2', '--rounds=1', '--steps_per_dispatch=2')
  assert {'outer_s', 'inner_150_s', 'fraction', 'bytes'} <= set(found)
  assert found['outer_s'] == pytest.approx(found['begin_s'] + found['finish_s'] + found['update_s'])
  assert found['inner_s'] == pytest.approx(4 * found['inner_150_s'])  # 4 paths in turn
  block = 32 + 32 + 4 * 32 * 32 + 3 * 32 * 48
  assert found['path_parameters'] == 3 * block + 2 * 64 * 32 + 32
  assert found['bytes'] == 3 * 2 * 4 * 4 * block  # three shared blocks; each path sends and receives float32


@pytest.mark.slow
def test_serve():
  sizes = '--num_layers=2 --vocab_size=512 --requests=6 --clients=3 --tokens=5 --prompt=8 --first_prompt=40 --repeats=1'
  found = run('serve.py', *sizes.split())
  assert {'ratio', 'first_token_ratio_40', 'routed_first_token_ratio_40'} <= set(found)
  assert found['ratio'] == pytest.approx(found['tokens_per_s'] / found['offline_tokens_per_s']) and found['ratio'] > 0


@pytest.mark.slow
def test_route():
  sizes = '--num_layers=2 --vocab_size=512 --requests=6 --clients=3 --tokens=5 --prompt=8 --asks=20 --repeats=1'
  found = run('route.py', *sizes.split())
  assert found['passed_ms'] > 0 and found['own_ms'] == pytest.approx(found['passed_ms'] + found['routing_ms'])
  assert found['ratio'] > 0 and found['streamed_ratio'] > 0 and found['router_cpu_ms'] > 0


@pytest.mark.slow
def test_paths():
  found = run('paths.py', '--num_layers=3', '--paths=1,4', '--steps=1', '--phases=1')
  assert {'time_ratio', 'memory_ratio', 'memory_ratios', 'results'} <= set(found)
  assert [row['paths'] for row in found['results']] == [1, 4]
  one, four = (row['parts'] for row in found['results'])
  assert four['inner_states'] == 4 * one['inner_states'] == 4 * 2 * one['params']
  assert four['modules'] > one['modules'] == one['params']


@pytest.mark.slow
def test_text(tmp_path):
  lines = pathlib.Path(__file__).read_text().splitlines()
  (tmp_path / 'a.txt').write_text(''.join(f'{n} {line}\n' for n in range(20) for line in lines))
  flags = [f'--text={tmp_path}/*.txt', '--mb=2', '--parts=2', '--vocab_size=400', '--paths=2', '--seq_len=64']
  found = run('text.py', *flags, sizes=())
  assert (tmp_path / 'a.txt').stat().st_size < found['tokens'] < 2e6  # more than its bytes: it is repeated
  assert found['c4_tokenize_core_hours'] == pytest.approx(305e3 / found['tokenize_mb_per_core_s'] / 3600, rel=1e-3)
  assert found['tokenize_mb_per_s_at_most'] > found['tokenize_mb_per_core_s']
  assert 0 < found['before_mb'] < 300 and 0 < found['tokenize_grown_mb'] < 200 and 0 <= found['shard_grown_mb'] < 100
