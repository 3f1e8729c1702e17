"""A workdir like one that a run leaves, from smooth curves and seeded noise: for the tests of report and status."""

import json
import math
import pathlib

import numpy as np
import tiny_run
from safetensors import numpy as safetensors

from dipaco_jax.algorithm import grid as grids
from dipaco_jax.config import settings
from dipaco_jax.storage import module_store
from dipaco_jax.telemetry import metrics_log

RUNS = {  # arguments of `make`, by name
  'grid': {},
  'one_path': {'axes': (), 'domains': ('stdlib',), 'phases': 3},
  'diloco': {'axes': (('a', 8),), 'phases': 1, 'domains': ()},
  'half': {'stages': 3},
  '256_paths': {'axes': (('a', 16), ('b', 16)), 'phases': 2, 'tau': 10},
}
DOMAINS = ('encyclopedia', 'fiction', 'law', 'medicine', 'news', 'patents', 'python', 'speech')


def make(workdir, axes=(('a', 4), ('b', 4)), phases=12, tau=50, pretrain_steps=300, stages=5, domains=DOMAINS, seed=0):
  """A run whose first `stages` stages are complete; with 3 of them, training has got halfway."""
  workdir, rng = pathlib.Path(workdir), np.random.default_rng(seed)
  config = make_config(axes, phases, tau, pretrain_steps)
  workdir.mkdir(parents=True, exist_ok=True)
  write_json(workdir / 'config.json', settings.recorded(config))
  grid = grids.Grid(config.grid)
  results = make_results(config, grid, list(domains), rng)
  for name, result in list(results.items())[:stages]:
    write_json(workdir / 'stages' / f'{name}.json', {'digest': name, 'wall_s': WALL_S[name], 'result': result})
  if stages >= 2:
    write_modules(workdir, config, grid, phases if stages >= 4 else phases // 2, rng)
  write_metrics(workdir, config, grid, phases if stages >= 4 else phases // 2, results, rng, train=stages >= 3)
  return config


CONTROL_AHEAD = {'law': 1.04, 'speech': 1.01}  # ratios of perplexities, by kind

WALL_S = {'tokenize': 9.1, 'pretrain': 88.0, 'route': 12.5, 'train': 1741.0, 'evaluate': 6.2}

SECONDS = {
  'tokenize': {'start': 3.0, 'stages': 9.1},
  'train': {'inner': 1600.0, 'outer': 75.0, 'compile': 20.0, 'checkpoint': 15.0, 'lost': 30.0, 'other': 1.0},
}


def make_config(axes, phases, tau, pretrain_steps) -> settings.Settings:
  names = [name for name, _ in axes]
  levels = [('all', '.*', ())]
  if len(names) == 2:
    ends = ('ends', 'embed|block_[05]/|final_norm', tuple(names))
    levels = [('lower', 'block_[12]/', ('a',)), ('upper', 'block_[34]/', ('b',)), ends]
  return settings.from_dict(
    {
      'grid': dict(axes),
      'levels': levels,
      'model': {'width': 32, 'num_layers': 6, 'num_heads': 2, 'head_dim': 16, 'mlp_dim': 64, 'seq_len': 128},
      'tokenizer': {'vocab_size': 256},
      'pretrain': {'steps': pretrain_steps, 'batch_size': 32},
      'train': {'phases': phases, 'steps_per_phase': tau, 'batch_size': 32},
      'routing': {'method': 'kmeans' if axes else 'single'},
      'evaluate': {'control': bool(axes)},
    }
  )


def write_json(path: pathlib.Path, value):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value))


def make_results(config, grid, domains, rng) -> dict[str, dict]:
  P, D = grid.num_paths, len(domains)
  steps = config.train.phases * config.train.steps_per_phase
  tokens = (steps * P + config.pretrain.steps) * 4096
  taste = rng.dirichlet(np.full(D, 0.25), P) if D else np.zeros((P, 0))
  rows = rng.lognormal(math.log(400), 0.5, P).astype(int) + 40
  counts = (taste * rows[:, None] * 1.3).astype(int)
  base_by_domain = {name: float(13.5 * rng.uniform(0.6, 1.5)) for name in domains}
  gain = rng.uniform(0.7, 0.93, D).tolist()
  by_path = [float(x) for x in 10.4 * rng.lognormal(0, 0.18, P)]
  if P > 8:
    by_path[5] = None  # no validation sequence went there
  names = parameter_shapes(config)
  owners = grids.assign_levels(grids.make_levels(grid, config.levels), names)
  size = {name: math.prod(shape) for name, shape in names.items()}
  control = {
    'control_perplexity': 11.47, 'control_perplexity_interval': [11.15, 11.79], 'ratio_to_control': 10.31 / 11.47,
    'ratio_to_control_interval': [0.889, 0.909], 'control_tokens': steps * 4096, 'control_s': 1.2,
    'control_perplexity_by_path': [x and 1.11 * x for x in by_path], 'control_budget': 'steps', 'control_steps': steps,
    'control_flops': steps * 4096 * 6.2e6, 'control_perplexity_by_domain': dict.fromkeys(domains, 12.0),
    'ratio_to_control_by_domain': {n: CONTROL_AHEAD.get(n, 0.9) for n in domains},
    'ratio_to_control_interval_by_domain': {
      n: [CONTROL_AHEAD.get(n, 0.9) - 0.03, CONTROL_AHEAD.get(n, 0.9) + 0.03] for n in domains
    },
    'ratio_to_control_by_path': [x and 0.9 for x in by_path],
    'ratio_to_control_interval_by_path': [None for _ in by_path],
  } if config.evaluate.control else {}  # fmt: skip
  return {
    'tokenize': {'documents': 21_840, 'sequences': 48_211, 'tokens': 5_904_112, 'dropped_sequences': 911,
                 'validation_documents': 402, 'validation_tokens': 41_208, 'vocab_size': 256, 'domains': domains},
    'pretrain': {'steps': config.pretrain.steps, 'tokens': config.pretrain.steps * 4096, 'tokens_per_s': 14_210.0,
                 'wall_s': 86.4},
    'route': {'shard_tokens': (rows * 127).tolist(), 'shard_rows': rows.tolist(),
              'shard_sequences': (rows * 1.3).tolist(), 'holdout_rows': (rows // 50 + 1).tolist(),
              'validation_sequences': (rows // 30).tolist(),
              'sequences_by_path_and_domain': counts.tolist(), 'padding_fraction': 0.021},
    'train': {'phases': config.train.phases, 'steps': steps, 'train_tokens': tokens, 'tokens_per_s': 13_905.2,
              'step_s': 0.294, 'outer_s': 0.61, 'outer_fraction': 0.0089, 'outer_bytes_per_phase': P * 3_310_000,
              'synchronous_bytes_per_phase': P * config.train.steps_per_phase * 4_600_000,
              'peak_memory_bytes': 1_412_000_000, 'compilations': 4, 'train_flops': tokens * 6.2e6,
              'model_flops_utilization': None, 'seconds': SECONDS, 'seconds_by_path': [{'inner': 1600 / P}] * P,
              'modules_sha256': '5f' * 32,
              'parameters_path': sum(size.values()),
              'parameters_total': sum(n * grid.num_modules(owners[name]) for name, n in size.items()), 'paths': P,
              'device': 'cpu, 2 cores', 'num_devices': 1},
    'evaluate': {'perplexity': 10.31, 'perplexity_final': 10.42, 'base_perplexity': 13.52,
                 'perplexity_interval': [10.02, 10.61], 'base_perplexity_interval': [13.11, 13.95],
                 'ratio_to_base': 10.31 / 13.52, 'ratio_to_base_interval': [0.751, 0.775],
                 'perplexity_by_path': by_path, 'validation_documents': 402,
                 'base_perplexity_by_path': [x and 1.31 * x * (1 + 0.05 * math.sin(x)) for x in by_path],
                 'validation_tokens_by_path': [0 if x is None else 39_077 // P for x in by_path], **control,
                 'perplexity_by_domain': {n: p * g for (n, p), g in zip(base_by_domain.items(), gain, strict=True)},
                 'base_perplexity_by_domain': base_by_domain, 'validation_tokens': 39_077, 'bits_per_byte': 1.214,
                 'base_bits_per_byte': 1.355,
                 'validation_documents_by_domain': dict.fromkeys(domains, 50),
                 'validation_tokens_by_domain': dict.fromkeys(domains, 4000),
                 'validation_documents_by_path': [0 if x is None else 25 for x in by_path],
                 'ratio_to_base_by_domain': dict(zip(base_by_domain, gain, strict=True)),
                 'ratio_to_base_interval_by_domain': dict.fromkeys(domains),
                 'ratio_to_base_by_path': [x and 0.76 for x in by_path],
                 'ratio_to_base_interval_by_path': [None for _ in by_path]},
  }  # fmt: skip


def parameter_shapes(config) -> dict[str, tuple[int, ...]]:
  m = config.model
  heads = (m.width, m.num_heads, m.head_dim)
  block = {'attention_norm/scale': (m.width,), 'mlp_norm/scale': (m.width,), 'attention/q': heads, 'attention/k': heads,
           'attention/v': heads, 'attention/o': (m.num_heads, m.head_dim, m.width), 'mlp/gate': (m.width, m.mlp_dim),
           'mlp/up': (m.width, m.mlp_dim), 'mlp/down': (m.mlp_dim, m.width)}  # fmt: skip
  shapes = {f'block_{n}/{name}': shape for n in range(m.num_layers) for name, shape in block.items()}
  return shapes | {'embed/tokens': (config.tokenizer.vocab_size, m.width), 'final_norm/scale': (m.width,)}


def write_modules(workdir, config, grid, version, rng):
  shapes = parameter_shapes(config)
  base = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  (workdir / 'base').mkdir()
  safetensors.save_file(base, workdir / 'base' / 'params.safetensors')
  levels = grids.make_levels(grid, config.levels)
  owners, index = grids.assign_levels(levels, shapes), {}
  for level in levels:
    folder = workdir / 'modules' / str(version) / level.name
    folder.mkdir(parents=True)
    common = {n: rng.normal(size=shapes[n]) for n in shapes if owners[n] is level}
    for module in grid.modules(level):
      own = 0.15 * rng.lognormal(0, 0.3)
      values = {n: base[n] + 0.1 * c + own * rng.normal(size=c.shape) for n, c in common.items()}
      name = '-'.join(map(str, module)) or 'shared'
      values = {n: v.astype(np.float32) for n, v in values.items()}
      safetensors.save_file(values, folder / f'{name}.safetensors')
      index |= {f'{level.name}/{name}.safetensors': tiny_run.sha256(folder / f'{name}.safetensors')}
  write_json(workdir / 'modules' / str(version) / 'index-0.json', index)


def write_metrics(workdir, config, grid, phases, results, rng, train=True):
  """Ten rows of steps a phase, one of the phase, one of its evaluation."""
  P, tau, start = grid.num_paths, config.train.steps_per_phase, config.pretrain.steps
  writer, every = metrics_log.Metrics(workdir), max(tau // 10, 1)
  for step in range(every, start + 1, every):
    loss = 2.6 + 4.4 * math.exp(-step / 70) + rng.normal() * 0.04
    writer.write('step', 'pretrain', step, step=step, phase=0, paths=[0], loss=[loss], grad_norm=[0.7],
                 learning_rate=1e-3, tokens_per_s=14_210.0)  # fmt: skip
  level, best, version = rng.normal(0, 0.22, P), np.full(P, np.inf), np.zeros(P, int)
  for phase in range(phases if train else 0):
    for k in range(every, tau + 1, every):
      done = phase * tau + k
      loss = 2.6 + level - 0.3 * (1 - math.exp(-done / 150)) - 3e-4 * done + rng.normal(size=P) * 0.06
      writer.write('step', 'train', done * P, step=start + done, phase=phase, paths=list(range(P)), loss=loss,
                   grad_norm=np.full(P, 0.6), learning_rate=5e-4, tokens_per_s=13_905.0)  # fmt: skip
    holdout = 2.72 + level - 0.27 * (1 - math.exp(-done / 120)) + 0.0001 * np.maximum(done - 380, 0) * (level < -0.1)
    holdout = holdout + rng.normal(size=P) * 0.015
    version, best = np.where(holdout < best, phase + 1, version), np.minimum(best, holdout)
    levels = grids.make_levels(grid, config.levels)
    writer.write('phase', 'train', done * P, phase=phase + 1, step=start + done, inner_s=144.0, outer_s=0.6,
                 loss_by_path=loss, holdout_loss_by_path=holdout, holdout_loss_before_by_path=holdout - 0.06,
                 averaging_gap=0.06, best_version_by_path=version,
                 outer_gradient_norm={x.name: {module_store.module_name(m): rng.lognormal(0.5 - 0.05 * phase, 0.1)
                                               for m in grid.modules(x)} for x in levels},
                 cosine={x.name: 0.5 * math.exp(-phase / 30) + 0.1 * i for i, x in enumerate(levels)
                         if grid.paths_through(x) > 1})  # fmt: skip
    perplexity = 10.42 + 3.1 * math.exp(-done / 150)
    writer.write('evaluation', 'train', done * P, phase=phase + 1, step=start + done, perplexity=perplexity,
                 perplexity_by_path=[perplexity * math.exp(x) for x in level],
                 perplexity_by_domain=dict.fromkeys(results['tokenize']['domains'], perplexity))  # fmt: skip
    if config.evaluate.control and results.get('evaluate') and phases == config.train.phases:
      writer.write(
        'evaluation', 'control', done, phase=phase + 1, step=start + done, perplexity=11.47 + 2 * math.exp(-done / 150)
      )
  writer.close()
  if train:
    write_json(workdir / 'paths' / 'best.json', {'version': version.tolist(), 'holdout_loss': best.tolist()})
