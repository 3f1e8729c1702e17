"""Writes the line numbers of docs/tour.md anew, after code has moved.

    python docs/tour_lines.py [--check]

A link is a name and a file, as in [`update`](../dipaco_jax/algorithm/outer.py#L117); the number is the line of that
name's definition. With --check nothing is written: the exit status is 1 where a number is wrong or a name is not there.
"""

import ast
import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).with_name('tour.md')
LINK = re.compile(r'\[`([\w.]+)`\]\(([^)#\s]+\.py)#L(\d+)\)')


def definitions(source: str) -> dict[str, int]:
  """Lines of all classes, functions and methods of a file, by their names, as `Shard.batch`."""
  found: dict[str, int] = {}

  def visit(node: ast.AST, prefix: str):
    for child in ast.iter_child_nodes(node):
      if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        found[prefix + child.name] = child.lineno
        visit(child, f'{prefix}{child.name}.')

  visit(ast.parse(source), '')
  return found


def rewritten(words: str, folder: pathlib.Path) -> str:
  """Returns the page with right numbers; raises ValueError that lists the files and names that are not there."""
  missing = []

  def link(found: re.Match) -> str:
    name, path, _ = found.groups()
    lines = definitions((folder / path).read_text()) if (folder / path).is_file() else {}
    if name not in lines:
      missing.append(f'{path} does not define {name}: write what it is called now, or where it is')
    return f'[`{name}`]({path}#L{lines.get(name, 0)})'

  new = LINK.sub(link, words)
  if missing:
    raise ValueError('\n'.join(missing))
  return new


def main():
  if sys.argv[1:] not in ([], ['--check']):
    sys.exit(__doc__)
  old = PAGE.read_text()
  try:
    new = rewritten(old, PAGE.parent)
  except ValueError as e:
    sys.exit(str(e))
  if sys.argv[1:] and new != old:
    sys.exit(f'{PAGE.name}: code has moved: run python docs/tour_lines.py')
  PAGE.write_text(new)


if __name__ == '__main__':
  main()
