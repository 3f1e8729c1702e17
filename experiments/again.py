"""Compares repeated runs with the results on the pages, to the printed digits.

    python experiments/methods.py --rows=product --seeds=2 --data=... --validation=... --results=runs/again
    python experiments/again.py runs/again

On the same kind of machine, they are equal. The exit status is 1 if one differs, or if there is none to compare.
"""

import pathlib
import sys

import common
import readme


def compare(table: common.Table, size: str, again: pathlib.Path, pages: pathlib.Path) -> dict[str, bool]:
  """Returns whether all runs in `again` are printed as on the pages. Prints a line with both if one differs."""
  results, found = common.read(table, size, pages), {}
  for at, record in common.read(table, size, again).items():
    printed = [common.to_markdown(table, size, {at: of[at]}) for of in ({at: record}, results) if at in of]
    found[f'{table.name}: {at[0]}, seed {at[1]}'] = len(printed) == 2 and printed[0] == printed[1]
    if len(set(printed)) > 1:
      print('\n'.join(sorted({line for text in printed for line in text.splitlines()})))
  return found


def main() -> int:
  if len(sys.argv) != 2:
    sys.exit(__doc__)
  found: dict[str, bool] = {}
  for table in readme.TABLES:
    for size in table.sizes:
      found |= compare(table, size, pathlib.Path(sys.argv[1]), common.RESULTS)
  for name, same in found.items():
    print(f'{name}: {"as on the page" if same else "not as on the page"}')
  return int(not found or not all(found.values()))


if __name__ == '__main__':
  sys.exit(main())
