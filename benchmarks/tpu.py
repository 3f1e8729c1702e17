"""How an inner step is best computed on TPUs, found without them: kernels, rematerialization, chunks, rows at one time.

    python benchmarks/tpu.py [--topologies=v5e:1x1,v5p:2x2x1,v6e:1x1 --models=150M,1.3B --rows=8]

Compiles the gradient of some rows of 1,024 tokens for one chip, as a path computes it for each part of its batch, and
changes one thing at a time. Traffic is an upper bound (`hlo.Traffic`); MFU lies between arithmetic and traffic one
after the other, and at the same time; no TPU has confirmed either. Needs the TPU compiler: pip install -e '.[tpu]'.
Prints a table in Markdown and, as the last line, one JSON object.
"""

import dataclasses
import json
import os
from typing import Any

from absl import flags

from dipaco_jax import command, settings

TOPOLOGIES = flags.DEFINE_list('topologies', ['v5e:1x1', 'v5p:2x2x1', 'v6e:1x1'], 'whose chips to compile for')
MODELS = flags.DEFINE_list('models', ['150M'], '150M, 1.3B')
ROWS = flags.DEFINE_integer('rows', 8, 'whose activations exist at one time')
CHANGES = flags.DEFINE_list(
  'changes',
  ['', 'attention=xla', 'layers=unrolled', 'remat=none', 'remat=full', 'loss_chunk=512', 'loss_chunk=4096', 'rows=4',
   'rows=16'],
  'from splash, scanned blocks, dots kept, 1,024 tokens in a chunk of the loss',
)  # fmt: skip

SIZES = {'150M': {}, '1.3B': dict(width=2048, num_layers=24, num_heads=16, head_dim=128, mlp_dim=5504)}
VOCAB, PREFIX = 32_000, 32


def measure(topology, config: settings.Model, rows: int) -> dict[str, Any]:
  """Figures of one compiled program. Raises dry_run.DoesNotFit."""
  import jax
  import numpy as np

  from dipaco_jax import dry_run, hlo, inner, loss, metrics, model, roofline

  at = jax.sharding.SingleDeviceSharding(topology.devices[0])
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
  tokens = jax.ShapeDtypeStruct((rows, config.seq_len), np.int32)
  args = model.shapes(model.make(config, VOCAB)), tokens, tokens

  def gradient(config):
    return jax.jit(inner.summed_gradient(loss.path_loss(model.make(config, VOCAB), PREFIX)))

  program = dry_run.compiled(gradient(config), *jax.tree.map(place, args))
  counted: Any = gradient(roofline.unrolled(config, rows)).lower(*args)
  flops = counted.cost_analysis()['flops'] * roofline.recomputed(config)
  traffic = hlo.Traffic(program.as_text()).of()
  busy_s, moving_s = flops / topology.chip.flops, traffic / topology.chip.hbm_bytes_per_s
  useful_s = metrics.flops_per_token(config, VOCAB, config.seq_len) * rows * config.seq_len / topology.chip.flops
  return {
    'traffic_bytes': traffic, 'temporary_bytes': program.memory_analysis().temp_size_in_bytes, 'flops': flops,
    'mfu_low': useful_s / (busy_s + moving_s), 'mfu_high': useful_s / max(busy_s, moving_s),
  }  # fmt: skip


def changed(config: settings.Model, rows: int, change: str) -> tuple[settings.Model, int]:
  name, _, value = change.partition('=')
  if name == 'rows':
    return config, int(value)
  return (dataclasses.replace(config, **{name: type(getattr(config, name))(value)}) if name else config), rows


def main():
  os.environ['JAX_PLATFORMS'] = 'cpu'
  from dipaco_jax import dry_run, model, topology

  print('| chip | model | change | traffic of a row | temporaries | MFU |\n|---|---|---|---|---|---|')
  found = []
  for name in TOPOLOGIES.value:
    chips = topology.find(name)
    for size in MODELS.value:
      best = model.for_device(settings.Model(**SIZES[size], remat='dots'), 'tpu')
      for change in CHANGES.value:
        about = {'topology': name, 'model': size, 'change': change}
        config, rows = changed(best, ROWS.value, change)
        try:
          row = measure(chips, config, rows)
        except dry_run.DoesNotFit:
          print(f'| {name.split(":")[0]} | {size} | {change or "none"} | does not fit | | |', flush=True)
          found.append(about | {'fits': False})
          continue
        found.append(about | row | {'fits': True})
        print(
          f'| {name.split(":")[0]} | {size} | {change or "none"} | {row["traffic_bytes"] / rows / 1e9:.1f} GB | '
          f'{row["temporary_bytes"] / 2**30:.1f} GiB | {row["mfu_low"]:.0%} to {row["mfu_high"]:.0%} |',
          flush=True,
        )
  print(json.dumps({'rows': found}))


if __name__ == '__main__':
  command.run(main)
