"""Pictures of what a run cost: time, bytes, and the work of its islands."""

from dipaco_jax.reports import category_plots, timeline_plot
from dipaco_jax.reports.amounts import size
from dipaco_jax.reports.palette import BLUE, ORANGE
from dipaco_jax.reports.plot_style import Picture
from dipaco_jax.reports.run_data import Run
from dipaco_jax.training.display import duration


def time_by_stage(run: Run) -> Picture | None:
  """Draws wall time by stage, exchange apart."""
  train, rows = run.results.get('train', {}), []
  for name, wall_s in run.report['wall_s'].items():
    outer_s = wall_s * (train.get('outer_fraction') or 0) if name == 'train' else 0.0
    parts = [(wall_s - outer_s, BLUE), *([(outer_s, ORANGE)] if outer_s else [])]
    rows.append((name, parts, duration(wall_s)))
  words = f'{duration(sum(run.report["wall_s"].values()))} {"so far" if run.notice else "in all"}.'
  if train.get('outer_s') is not None:
    words += f' Exchange between paths, striped, took {train["outer_s"]:.2g} s a phase.'
  return Picture(category_plots.bars('Time by stage', rows), words)


def bytes_sent(run: Run) -> Picture | None:
  """Draws bytes between paths, and those of synchronous training; None where nothing was exchanged."""
  train = run.results.get('train', {})
  sent, synchronous = (train.get(k) for k in ('outer_bytes_per_phase', 'synchronous_bytes_per_phase'))
  if not sent or not synchronous:
    return None
  phases = train['phases']
  rows = [
    ('this run', [(sent * phases, BLUE)], size(sent * phases)),
    ('synchronous', [(synchronous * phases, ORANGE)], size(synchronous * phases)),
  ]
  words = (
    f'Paths exchanged parameters once in {run.settings.train.steps_per_phase} steps. Training the same modules '
    f'synchronously, exchanging gradients at every step, would have sent {synchronous / sent:,.0f} times as much.'
  )
  return Picture(category_plots.bars('Bytes between paths', rows), words)


def timeline(run: Run) -> Picture | None:
  """Draws the tasks of each worker of an islands run."""
  if not run.tasks:
    return None
  rows = timeline_plot.rows(run.tasks)
  words = 'Every bar is a task, the number its phase. A path goes on when its own modules are there'
  shared = next((level.name for level in run.levels if not level.axes), None)
  words += f'; {shared} is a module of all paths, and waits for all of them.' if shared else ', whatever the others do.'
  if (phases := timeline_plot.phases_at_once(run.tasks)) > 1:
    words += f' At one moment, {phases} different phases were trained.'
  shown = timeline_plot.shown(rows)
  if hidden := len(rows) - len(shown):
    words += f' Rows that are not shown: {hidden}.'
  return Picture(timeline_plot.draw(shown), words)


def island_bytes(run: Run) -> Picture | None:
  """Draws the bytes that each role has read and written."""
  moved = run.report['island_bytes']
  if not moved:
    return None
  rows = [
    (role, [(m['in'], BLUE), (m['out'], ORANGE)], f'{size(m["in"])}, {size(m["out"])}')
    for role, m in sorted(moved.items())
  ]
  words = 'Read from storage, and, striped, written to it. Processes of islands send each other nothing else.'
  return Picture(category_plots.bars('Bytes by role', rows), words)
