"""How an inner step is best computed on TPUs, found without them: kernels, rematerialization, chunks, rows at one time.

    python benchmarks/tpu.py [--topologies=v5e:1x1,v5p:2x2x1,v6e:1x1 --models=150M,1.3B --out=FILE]

Compiles the inner steps of one path, whose batch all chips of the topology share, as a run does, and makes one change
at a time to the best choices known. Figures are the dry run's: traffic is an upper bound (`hlo.Traffic`), MFU lies
between arithmetic and traffic one after the other, and at the same time; no TPU has confirmed either. With --out, rows
go to a file as they are done, and are not compiled again. Needs the TPU compiler: pip install -e '.[tpu]'.
Prints a table in Markdown and, as the last line, one JSON object.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError

TOPOLOGIES = flags.DEFINE_list('topologies', ['v5e:1x1', 'v5p:2x2x1', 'v6e:1x1'], 'of one path')
MODELS = flags.DEFINE_list('models', ['150M'], '150M, 1.3B')
CHANGES = flags.DEFINE_list(
  'changes',
  ['none', 'model.attention=xla', 'model.remat=none', 'model.remat=full', 'train.microbatch=4', 'train.microbatch=16',
   'train.microbatch=32', 'model.vocab_chunk=0'],
  'none, or of fields; several are joined by +',
)  # fmt: skip
OUT = flags.DEFINE_string('out', '', 'a file of rows, lines of JSON')

BEST = 'model.remat=dots+model.loss_chunk=4096+model.vocab_chunk=3200+train.microbatch=4+routing.method=single'
SIZES = {
  '150M': '',
  '1.3B': 'model.width=2048+model.num_layers=24+model.num_heads=16+model.head_dim=128+model.mlp_dim=5504',
}
HEADER = '| topology | model | batch | change | chips | FLOPs a row | traffic a row | HBM | MFU |' + '\n|' + '---|' * 9


def with_changes(changes: str) -> settings.Settings:
  """The defaults, changed in `SECTION.FIELD=VALUE` joined by +."""
  values = settings.Settings().to_dict()
  for change in filter(lambda x: x not in ('', 'none'), changes.split('+')):
    name, _, value = change.partition('=')
    section, _, field = name.partition('.')
    if field not in values.get(section, {}):
      raise InputError(f'--changes={change}: write SECTION.FIELD=VALUE, with a field of settings.py')
    kind = type(values[section][field])
    values[section][field] = value == 'True' if kind is bool else kind(value)
  return settings.from_dict(values)


def measure(name: str, s: settings.Settings) -> dict[str, Any]:
  """Figures of a path's inner steps on all chips of a topology."""
  from dipaco_jax.models import transformer
  from dipaco_jax.planning import dry_run, roofline, topology

  chips = topology.find_topology(name)
  s = dataclasses.replace(s, model=transformer.for_device(s.model, 'tpu'))
  made = dry_run.make_programs(s, chips)
  about = {'batch': s.train.batch_size, 'chips': made.placement.data}
  try:
    compiled = dry_run.compile_all(made, ('steps', 'outer'))
  except dry_run.DoesNotFit as e:
    return about | {'fits': False, 'hbm_bytes': e.needed}
  needed = dry_run.program_bytes(compiled['steps'])
  if needed > dry_run.USABLE * chips.chip.hbm_bytes:
    return about | {'fits': False, 'hbm_bytes': needed}
  sent = dry_run.traffic(made, compiled, chips)
  found = roofline.estimate_times(made, compiled['steps'], chips, sent)
  rows = s.train.batch_size / made.placement.data  # of a chip
  return about | {
    'fits': True,
    'hbm_bytes': needed,
    'traffic_bytes': found['traffic_bytes_per_step'] / rows,
    'flops': found['flops_per_step'] / s.train.batch_size,
    'mfu_low': found['mfu_low'],
    'mfu_high': found['mfu_high'],
  }


def line(row: dict[str, Any]) -> str:
  about = f'| {row["topology"]} | {row["model"]} | {row["batch"]} | {row["change"]} | {row["chips"]} |'
  if not row['fits']:
    return f'{about} | | needs {row["hbm_bytes"] / 2**30:.1f} GiB: does not fit | |'
  return (
    f'{about} {row["flops"] / 1e12:.2f} T | {row["traffic_bytes"] / 1e9:.1f} GB | {row["hbm_bytes"] / 2**30:.1f} GiB | '
    f'{row["mfu_low"]:.0%} to {row["mfu_high"]:.0%} |'
  )


def main():
  os.environ['JAX_PLATFORMS'] = 'cpu'
  out = pathlib.Path(OUT.value) if OUT.value else None
  done = [json.loads(x) for x in out.read_text().splitlines()] if out and out.exists() else []
  found = []
  print(HEADER)
  for name in TOPOLOGIES.value:
    for size in MODELS.value:
      for change in CHANGES.value:
        about = {'topology': name, 'model': size, 'change': change}
        row = next((old for old in done if about.items() <= old.items()), None)
        if row is None:
          row = about | measure(name, with_changes('+'.join((BEST, SIZES[size], change))))
          if out:
            with out.open('a') as file:
              file.write(json.dumps(row) + '\n')
        found.append(row)
        print(line(row), flush=True)
  print(json.dumps({'rows': found}))


if __name__ == '__main__':
  command.run(main)
