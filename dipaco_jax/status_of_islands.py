"""The live table of an islands run: who works on what, how far it is, when it was last heard."""

import os
import shutil
from typing import Any, TextIO

from dipaco_jax import plain
from dipaco_jax import registry as registry_lib
from dipaco_jax.progress import duration

KINDS = ('prepare', 'train', 'outer', 'evaluate', 'reroute', 'finish')


def lines(registry: registry_lib.Registry) -> list[str]:
  """A line for the run, and one for each role."""
  counts, roles = registry.counts(), registry.roles()
  done = [f'{kind} {n.get("done", 0)} of {sum(n.values())}' for kind in KINDS if (n := counts.get(kind))]
  rows: list[tuple[str, ...]] = [('', 'task', 'step', 'tokens/s', 'tasks done', 'last heard')]
  rows += [tuple(map(plain.name, row(role))) for role in roles]
  widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
  table = ['  '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]
  stuck = [plain.text(f'stuck: {why}') for role in roles if (why := role['about'].get('stuck'))]
  return ['tasks so far: ' + (', '.join(done) or 'none'), *table, *stuck]


def row(role: dict[str, Any]) -> tuple[str, ...]:
  about = role['about']
  step = f'{about["step"]}/{about["of"]}' if 'step' in about else ''
  rate = f'{about["tokens_per_s"]:,.0f}' if 'tokens_per_s' in about else ''
  return (
    role['name'], about.get('task') or 'idle', step, rate, str(about.get('tasks_done', '')),
    f'{duration(role["silent_s"])} ago',
  )  # fmt: skip


class Screen:
  """Lines that overwrite themselves on a terminal; elsewhere the first of them, where it has changed."""

  def __init__(self, stream: TextIO):
    self.stream, self.height, self.last = stream, 0, ''
    self.terminal = stream.isatty() and os.environ.get('TERM') != 'dumb'

  def show(self, found: list[str]):
    if not self.terminal:
      if found[0] != self.last:
        print(found[0], file=self.stream, flush=True)
      self.last = found[0]
      return
    size = shutil.get_terminal_size()
    shown = [line[: size.columns - 1] for line in found[: size.lines - 1]]
    up = f'\x1b[{self.height}F' if self.height else ''
    self.stream.write(up + ''.join(f'{line}\x1b[K\n' for line in shown) + '\x1b[J')
    self.stream.flush()
    self.height = len(shown)

  def close(self):
    self.height = 0
