"""Pictures of an islands run: tasks of workers over time, bytes by role, and goodput over time."""

import numpy as np

from dipaco_jax.processes.display import duration
from dipaco_jax.reports import category_plots, curve_plots, timeline_plot
from dipaco_jax.reports.amounts import size
from dipaco_jax.reports.palette import BLUE, ORANGE
from dipaco_jax.reports.plot_style import Labels, Picture
from dipaco_jax.reports.run_data import Run

WORKER, EXECUTOR = 'worker', 'outer'  # roles


def timeline(run: Run) -> Picture | None:
  """Draws the tasks of each worker of an islands run."""
  if not run.tasks:
    return None
  rows = timeline_plot.rows(run.tasks)
  caption = 'Every bar is a task, the number its phase. A path continues as soon as its own modules are ready'
  shared = next((level.name for level in run.levels if not level.axes), None)
  caption += (
    f'; {shared} is a module of all paths, and waits for all of them.' if shared else ', independent of the others.'
  )
  if (phases := timeline_plot.phases_at_once(run.tasks)) > 1:
    caption += f' At one moment, {phases} different phases were trained.'
  if seconds := sum(task.end - task.start for task in run.tasks if task.kind == timeline_plot.REPLAY):
    caption += f' Phases that were trained again, because the worker with a state was lost, took {duration(seconds)}.'
  shown = timeline_plot.shown(rows)
  if hidden := len(rows) - len(shown):
    caption += f' Rows that are not shown: {hidden}.'
  return Picture(timeline_plot.draw(shown), caption)


def island_bytes(run: Run) -> Picture | None:
  """Draws the bytes that each role has read and written."""
  moved = run.report['island_bytes']
  if not moved:
    return None
  rows = [
    (role, [(m['in'], BLUE), (m['out'], ORANGE)], f'{size(m["in"])}, {size(m["out"])}')
    for role, m in sorted(moved.items())
  ]
  caption = 'Read from storage, and, striped, written to it. Processes of islands send each other nothing else.'
  return Picture(category_plots.bars('Bytes by role', rows), caption)


def bytes_by_phase(run: Run) -> Picture | None:
  """Draws the bytes that workers and executors read and write in each phase, beside those of plain DiLoCo."""
  bytes_by_role, plain = run.report['island_bytes_by_phase'], run.report['diloco_bytes_per_phase']
  if not bytes_by_role or len(bytes_by_role) < 2 or not plain:
    return None
  series = {
    f'{label} {way}': np.array([phase.get(role, {}).get(which, 0) for phase in bytes_by_role]) / 1e6
    for role, label in ((WORKER, 'workers'), (EXECUTOR, 'executors'))
    for which, way in (('in', 'read'), ('out', 'write'))
  }
  series['plain DiLoCo'] = np.full(len(bytes_by_role), plain / 2 / 1e6)
  label = (
    'Of all processes of a role together. With plain DiLoCo, which sends parameters in float32 once a phase, workers '
    'would read as much as its line shows, and write as much.'
  )
  phases = np.arange(1, len(bytes_by_role) + 1)
  return Picture(curve_plots.by_phase(Labels('Bytes by phase', 'MB'), phases, series, [*series], from_zero=True), label)


def bytes_beside(run: Run) -> Picture | None:
  """Draws what workers move in a phase, beside plain DiLoCo and data-parallel training of the same model."""
  r = run.report
  island_bytes, plain, every_step = (
    r[name] for name in ('island_bytes_by_phase', 'diloco_bytes_per_phase', 'synchronous_bytes_per_phase')
  )
  if not island_bytes or not plain or not every_step:
    return None
  ours = [sum(phase.get(WORKER, {}).get(way, 0) for phase in island_bytes) / len(island_bytes) for way in ('in', 'out')]
  if not sum(ours):
    return None
  rows = [
    (name, [(each[0], BLUE), (each[1], ORANGE)], size(sum(each)))
    for name, each in (('this run', ours), ('plain DiLoCo', [plain / 2] * 2), ('data-parallel', [every_step / 2] * 2))
  ]
  caption = (
    'Of all workers in a phase, on average: read and, striped, written. Plain DiLoCo would exchange parameters in '
    f'float32 once a phase, {plain / sum(ours):,.1f} times as many bytes; data-parallel training gradients in float32 '
    f'at each step of a phase of {run.settings.train.phase_length}, {every_step / sum(ours):,.0f} times as many.'
  )
  if speed := (r['island_mbits'] or {}).get(WORKER):
    ways = (('in', 'reading'), ('out', 'writing'))
    speeds = [f'{speed[way]:,.3g} Mbit/s while {verb}' for way, verb in ways if speed[way]]
    caption += f' A worker moved {" and ".join(speeds)}.' if speeds else ''
  return Picture(category_plots.bars('Bytes of a phase', rows), caption)


def goodput(run: Run) -> Picture | None:
  """Draws the share of the workers' time that was spent in steps, over time."""
  over_time = run.report['goodput_over_time']
  if not over_time or len(over_time) < 2:
    return None
  times, shares = np.array(over_time, float).T
  caption = (
    f'Of all workers that were present, from the first step of training on; {run.report["goodput"]:.0%} in all. It '
    'is low while processes start and compile, and while they wait.'
  )
  return Picture(curve_plots.over_time('Time in steps', '% of the workers’ time', times, 100 * shares), caption)  # noqa: RUF001
