"""A picture of an islands run: a row for every worker and executor, a bar for every task [3]."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dipaco_jax.reports import plot_style
from dipaco_jax.reports.palette import shade

KIND_COLOURS = {  # of odd and even phases
  kind: (shade(colour, 1), shade(colour, 0.6))
  for kind, colour in (('train', 'blue'), ('outer', 'orange'), ('evaluate', 'green'), ('replay', 'red'))
}
REPLAY = 'replay'  # phases that a worker repeats before a task, in the same row as its training
MAX_ROWS = 32  # of a kind of task, that a picture has room for
MAX_BARS = 1000  # longer rows are rasterized in the SVG


class Task(NamedTuple):
  """A task that was done, in seconds since the first began."""

  owner: str
  kind: str
  phase: int  # from 1
  start: float  # seconds
  end: float


def rows(tasks: Sequence[Task]) -> dict[str, list[Task]]:
  """Returns tasks by owner: workers, then executors and evaluators, worker-10 after worker-9; in the order of starts.

  A task that was published while its owner was at the next one ends where that begins.
  """

  def sort_key(task: Task) -> tuple[Any, ...]:
    parts = re.split(r'(\d+)', task.owner)
    return list(KIND_COLOURS).index(role(task)), [(int(part) if part.isdigit() else -1, part) for part in parts]

  tasks_by_row = {}
  for _, group in itertools.groupby(sorted(tasks, key=sort_key), sort_key):
    mine = sorted(group, key=lambda task: task.start)
    ends = [min(task.end, later.start) for task, later in itertools.pairwise(mine)] + [mine[-1].end]
    tasks_by_row[mine[0].owner] = [task._replace(end=end) for task, end in zip(mine, ends, strict=True)]
  return tasks_by_row


def role(task: Task) -> str:
  """Returns the kind of the row that a task is in."""
  return 'train' if task.kind == REPLAY else task.kind


def phases_at_once(tasks: Sequence[Task]) -> int:
  """Returns the largest number of phases that were trained at one moment."""
  most = 0
  running: list[Task] = []
  for task in sorted((task for task in tasks if task.kind == 'train'), key=lambda task: task.start):
    running = [other for other in running if other.end > task.start] + [task]
    most = max(most, len({other.phase for other in running}))
  return most


def shown(tasks_by_row: dict[str, list[Task]]) -> dict[str, list[Task]]:
  """Returns as many rows of each kind as a picture has room for."""
  kinds = itertools.groupby(tasks_by_row.items(), lambda row: role(row[1][0]))
  return dict(itertools.chain.from_iterable(itertools.islice(group, MAX_ROWS) for _, group in kinds))


@plot_style.styled
def draw(tasks_by_row: dict[str, list[Task]]):
  """Draws the rows, the first on top; bars show their phase where there is room."""
  figure, ax = plot_style.axes(plot_style.WIDE, 1.3 + 0.3 * len(tasks_by_row))
  span = max(row[-1].end for row in tasks_by_row.values())
  scale, unit = plot_style.time_unit(span)
  for y, row in enumerate(reversed(tasks_by_row.values())):
    colours = [KIND_COLOURS[task.kind][(task.phase + 1) % 2] for task in row]
    wide = [task.end - task.start > span / 200 for task in row]  # the others would be all edge
    edges = [plot_style.PAPER if w else c for w, c in zip(wide, colours, strict=True)]
    look = {'facecolor': colours, 'edgecolor': edges, 'lw': 0.4, 'rasterized': len(row) > MAX_BARS}
    places = [(task.start / scale, (task.end - task.start) / scale) for task in row]
    ax.broken_barh(places, (y - 0.38, 0.76), **look)
    for task in row:
      if (task.end - task.start) / span * 8.5 > 0.03 + 0.07 * len(str(task.phase)):  # inches
        middle = (task.start + task.end) / 2 / scale
        ax.text(middle, y, str(task.phase), ha='center', va='center_baseline', size=plot_style.SMALL)
  kinds = {task.kind for row in tasks_by_row.values() for task in row}
  shown_kinds = [kind for kind in KIND_COLOURS if kind != REPLAY or kind in kinds]
  for kind in shown_kinds:
    ax.broken_barh([], (0, 0), facecolor=KIND_COLOURS[kind][0], label=kind)
  ax.set_yticks(range(len(tasks_by_row)), [plot_style.short(owner) for owner in reversed(tasks_by_row)])
  plot_style.numbers(ax.xaxis, ticks=8)
  ax.set(xlim=(0, span / scale), ylim=(-0.6, len(tasks_by_row) - 0.4), xlabel=unit, title='Tasks by worker')
  ax.grid(axis='y', visible=False)
  plot_style.legend(ax, ncols=len(shown_kinds), handlelength=1, fontsize=plot_style.SMALL)
  return figure
