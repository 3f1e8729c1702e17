"""Writes every table that has results into README.md, between its markers.

    python experiments/readme.py
"""

import pathlib
import re
import sys

import ablations
import beyond
import common
import config
import diloco
import exchanged
import labels
import methods
import paths
import reroute
import runs
import sharding
import tau
import tune
import tune_outer

from dipaco_jax import progress

MODULES = (
  tune, tune_outer, methods, sharding, reroute, tau, ablations, paths, exchanged, diloco, labels, beyond,
)  # fmt: skip
TABLES = [module.TABLE for module in MODULES]
README = pathlib.Path(__file__).parent / 'README.md'


def between(table: common.Table, folder: pathlib.Path) -> str:
  """The table at every size that has results, largest first."""
  parts = []
  for size in reversed(config.SIZES):
    if results := common.read(table, size, folder):
      parts += [about(size, results), common.to_markdown(table, size, results)]
      parts.append(f'![{table.title}](results/{size}/{table.name}.png)')
  return '\n\n'.join(parts or ['Not run yet.'])


def about(size: str, results: common.Results) -> str:
  """Seeds, machine and time."""
  seeds = ', '.join(map(str, sorted({seed for _, seed in results})))
  machines = {f'{e["devices"]} {e["device"]}, {e["cpus"]} cores' for e in (r['environment'] for r in results.values())}
  seconds = progress.duration(sum(map(runs.own_seconds, results.values())))
  where = ' and '.join(sorted(machines))
  return f'Size `{size}`; seeds {seeds}; {where}; training and evaluation took {seconds}.'


def render(words: str, folder: pathlib.Path) -> str:
  """The page with what is between its markers made anew; raises ValueError where a table has not one place."""
  for table in TABLES:
    begin, end = f'<!-- {table.name} -->\n', f'\n<!-- end of {table.name} -->'
    inside = begin + between(table, folder) + end
    words, count = re.subn(f'{begin}.*?{end}', lambda _, inside=inside: inside, words, flags=re.DOTALL)
    if count != 1:
      raise ValueError(f'{README.name} has {count} places for the table {table.name}: it needs one')
  return words


if __name__ == '__main__':
  if sys.argv[1:]:
    sys.exit(__doc__)
  common.publish(README, render(README.read_text(), common.RESULTS))
