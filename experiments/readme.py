"""Writes tables and claims into the pages of this folder and docs/results.md, between their markers, from `results/`.

    python experiments/readme.py [--check]

With --check nothing is written: the exit status is 1 where a page is not what its results come to.
"""

import functools
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

import amounts
import amounts_six
import baselines
import beginnings
import canaries
import claims
import common
import documents
import downstream
import methods
import mixtures
import muon
import owners
import paper_recipe
import paths
import pretrained
import router
import runs
import sharing
import sizes
import tau
import tune
import upcycle
import upcycle_gpu
import wire

from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display

MORE = (
  sizes, tau, router, sharing, downstream, wire, muon, upcycle, beginnings, upcycle_gpu, amounts, baselines,
  mixtures, paper_recipe, documents, amounts_six, owners, canaries,
)  # fmt: skip
MODULES = {
  '../docs/results.md': (),
  '../docs/owners.md': (),
  'README.md': (),
  'TABLES.md': (methods, paths, pretrained, *MORE),
  'LEDGER.md': (tune,),
}
PAGES = {name: [module.TABLE for module in of_page] for name, of_page in MODULES.items()}
TABLES = [table for tables in PAGES.values() for table in tables]
BY_NAME = {table.name: table for table in TABLES}
SIZE = 'micro'  # of the claims
CLAIM = re.compile(r'<!-- ([a-z]+(?: [^ <>\n]+)+) -->[^<]*<!-- / -->')
HERE = pathlib.Path(__file__).parent


def between(table: common.Table, folder: pathlib.Path) -> str:
  """The table at every size that has results, largest first."""
  parts = []
  for size in reversed(table.sizes):
    if results := common.read(table, size, folder):
      parts += [about(size, results), common.to_markdown(table, size, results)]
      if table.picture:
        parts.append(f'![{table.title}](results/{size}/{table.name}.png)')
  return '\n\n'.join(parts or ['Not run yet.'])


def about(size: str, results: common.Results) -> str:
  """Seeds, machine and time."""
  seeds = ', '.join(map(str, sorted({seed for _, seed in results})))
  machines = {
    f'{e["devices"]} {e["device"]}, {e["cpus"]} core{"s" * (e["cpus"] > 1)}'
    for e in (r['environment'] for r in results.values())
  }
  seconds = display.duration(sum(map(runs.own_seconds, results.values())))
  where = ' and '.join(sorted(machines))
  return f'Size `{size}`; seeds {seeds}; {where}; training and evaluation took {seconds}.'


def render(words: str, folder: pathlib.Path, tables: Sequence[common.Table]) -> str:
  """Returns a page with new text between its markers. Raises InputError if a table does not have exactly one place."""
  for table in tables:
    begin, end = f'<!-- {table.name} -->\n', f'\n<!-- end of {table.name} -->'
    inside = begin + between(table, folder) + end
    place = f'{begin}.*?\n?<!-- end of {table.name} -->'
    words, count = re.subn(place, inside.replace('\\', r'\\'), words, flags=re.DOTALL)
    if count != 1:
      raise InputError(f'there are {count} places for the table {table.name}: it needs one')
  read = functools.cache(lambda name: common.read(BY_NAME[name], SIZE, folder))
  return CLAIM.sub(lambda found: claim(found, read), words)


def claim(found: re.Match, read: Callable[[str], common.Results]) -> str:
  """A claim's marker and figure, by a table's results; raises InputError where they do not bear it out."""
  kind, name, *of = found[1].split()
  if name not in BY_NAME:
    raise InputError(f'there is no table {name!r} to claim something of')
  return f'<!-- {found[1]} -->{claims.render([kind, *of], read(name), BY_NAME[name].part)}<!-- / -->'


def main():
  flags_left = sys.argv[1:]
  if flags_left not in ([], ['--check']):
    sys.exit(__doc__)
  for name, tables in PAGES.items():
    old = (HERE / name).read_text()
    new = render(old, common.RESULTS, tables)
    if flags_left and new != old:
      sys.exit(f'{name} is not what its results come to: run python experiments/readme.py, and read what changed')
    if new != old:
      common.publish(HERE / name, new)


if __name__ == '__main__':
  main()
