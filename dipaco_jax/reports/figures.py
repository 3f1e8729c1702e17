"""What a report shows: every picture with a caption that says what is to be seen in it."""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core import averaging_gap, settings
from dipaco_jax.core.grid import Grid, Level
from dipaco_jax.reports import grid_plot, module_drift, plot_style, plots, timeline_plot
from dipaco_jax.reports.history import History
from dipaco_jax.reports.plot_style import Curve
from dipaco_jax.routing import agreement
from dipaco_jax.storage import seals
from dipaco_jax.training.progress import duration

GREAT_GAP = 0.3  # nats between training and held-back loss, that are explained


class Run(NamedTuple):
  """What a report is made from."""

  workdir: pathlib.Path
  settings: settings.Settings
  grid: Grid
  levels: tuple[Level, ...]
  results: dict[str, dict[str, Any]]  # of complete stages
  report: dict[str, Any]
  history: History
  drifts: list[tuple[module_drift.Slab, module_drift.Drift]]  # empty where no modules are published yet
  tasks: list[timeline_plot.Task]  # of islands
  notice: str  # how far a run is that is not finished


class Picture(NamedTuple):
  figure: Any
  caption: str


def count(n: float | None) -> str:
  """'1.05 M', '5.3 B', '812'."""
  if n is None:
    return 'not known'
  for scale, unit in ((1e15, 'P'), (1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
    if abs(n) >= scale:
      return f'{n / scale:.3g} {unit}'
  return f'{n:,.0f}'


def size(n: float) -> str:
  """Bytes, in decimal units."""
  return f'{count(n).replace(" B", " G").replace(" K", " k")}B' if n >= 1e3 else f'{n:,.0f} bytes'


def labels(grid: Grid) -> list[str]:
  """What paths are called: the number that commands know them by."""
  return [str(path) for path in range(grid.num_paths)] if grid.num_paths > 1 else ['path']


def make(run: Run) -> dict[str, Picture]:
  """By name, in the page's order; those whose data is not there yet are left out."""
  found = {}
  for name, draw in PICTURES.items():
    with plot_style.left_out(name):
      if picture := draw(run):
        found[name] = picture
  return found


def _validation(run: Run) -> Picture | None:
  r, curve = run.report, run.history.validation
  if not len(curve.steps) or not (run.history.last or r['perplexity']):  # the base's alone is no curve
    return None
  words, stopped = 'Every validation text is read by the one path that the router picks for it.', None
  words = words if run.grid.num_paths > 1 else 'On all validation text.'
  if r['perplexity'] and r['perplexity_final'] and r['perplexity'] != r['perplexity_final']:
    stopped = r['perplexity']
    words += (
      ' The ring is early stopping: each path taken from the phase where it was best on text held back from its shard.'
    )
  curves = {'paths': curve}
  if len(run.history.control.steps):
    curves['dense'] = run.history.control
    words += ' Dense is one model that goes on from the base, on all text, with as many rows in a step as one path.'
  return Picture(plots.perplexity_curves(curves, {'base': r['base_perplexity']}, stopped), words)


def _by_domain(run: Run) -> Picture | None:
  base, paths = run.report['base_perplexity_by_domain'] or {}, run.report['perplexity_by_domain'] or {}
  known = {n: paths[n] / base[n] for n in paths if paths[n] and base.get(n)}
  if len(known) < 2:
    return None
  best, worst = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
  words = f'From the base model to the paths, on validation text. Most is gained on {best}, least on {worst}.'
  return Picture(plots.by_domain(base, paths), words)


def _by_path(run: Run) -> Picture | None:
  values = run.report['perplexity_by_path'] or []
  known = [v for v in values if v is not None]
  if len(values) < 2 or not known:
    return None
  empty = len(values) - len(known)
  base = run.report['base_perplexity_by_path'] or [None] * len(values)
  words = (
    f'Each path{", and the base model," if any(base) else ""} on the validation text that is routed to that path, from '
    'the lowest to the highest. Paths read different kinds of text, and some kinds are easier: the spread is not one '
    'of skill.'
  )
  if empty:
    words += f' To {empty} path{"s" if empty > 1 else ""} no validation text was routed.'
  return Picture(plots.by_path(values, base, labels(run.grid)), words)


def gap(history: History, steps: int) -> float | None:
  """How far held-back loss lies above the training loss of the last so many steps: the median over the paths, nats."""
  held, training = history.holdout, history.training
  if not len(held.steps) or not len(training.steps):
    return None
  last = training.values[training.steps > held.steps[-1] - steps]
  known = np.isfinite(last)
  means = np.where(known, last, 0).sum(0) / np.maximum(known.sum(0), 1)
  apart = (held.values[-1] - means)[known.any(0) & np.isfinite(held.values[-1])]
  return float(np.median(apart)) if len(apart) else None


def _losses(run: Run) -> Picture | None:
  h = run.history
  who = 'every path on its own shard' if run.grid.num_paths > 1 else 'the path'
  words = f'The base model first, then {who}, going on from the base’s step.'  # noqa: RUF001
  return _training(run, 'Training loss', 'nats per token', h.base, h.training, words)


def _training(
  run: Run, title: str, ylabel: str, base: Curve, paths: Curve, words: str, by_path: bool = True
) -> Picture | None:
  """A figure of the inner steps; none where there is no step yet."""
  if not np.isfinite(base.values).any() and not np.isfinite(paths.values).any():
    return None
  if by_path and run.grid.num_paths > 1 and np.isfinite(paths.values).any():
    words += ' One thin line per path; the thick one is their median.'
  names = labels(run.grid) if by_path else ['paths' if run.grid.num_paths > 1 else 'path']
  return Picture(plots.training(title, ylabel, base, paths, names, settled=by_path), words)


def _holdout(run: Run) -> Picture | None:
  curve = run.history.holdout
  if not np.isfinite(curve.values).any():
    return None
  words = 'On text of the same shard that the path never trains on: where it rises, the path overfits.'
  if (pointers := _pointers(run)) and min(pointers[0]) == pointers[1]:
    words += ' All paths were best after the last phase: none is taken from before it.'
  if (apart := gap(run.history, run.settings.train.steps_per_phase)) and apart > GREAT_GAP:
    words += (
      f' In the last phase it lies {apart:.1f} nats above the training loss, a perplexity {np.exp(apart):.1f} times as '
      'high: paths know what they were trained on far better than other text of its kind. More text, fewer paths or '
      'fewer steps would bring the two together.'
    )
  return Picture(plots.holdout(curve, labels(run.grid)), words)


def _learning_rate(run: Run) -> Picture | None:
  words = 'Of the inner optimizer: one schedule over the base model’s steps and the paths’.'  # noqa: RUF001
  return _training(run, 'Learning rate', 'learning rate', *run.history.learning_rate, words, by_path=False)


def _grad_norm(run: Run) -> Picture | None:
  h, clip = run.history, run.settings.inner.clip_norm
  words = f'Before it is clipped to {clip:g}.' if clip else 'It is not clipped.'
  return _training(run, 'Norm of the inner gradient', 'L2 norm', h.base_norm, h.norm, words)


def _tokens_per_s(run: Run) -> Picture | None:
  of = 'a worker, in the mean' if run.report['island_bytes'] else 'all devices together'
  words = f'Trained tokens a second, of {of}; what lies between dispatches counts.'
  return _training(run, 'Speed', 'tokens/s', *run.history.tokens_per_s, words, by_path=False)


def _outer(run: Run) -> Picture | None:
  h = run.history
  if len(h.phases) < 2 or not h.norms:
    return None
  words = 'How far a phase moved a module, averaged over its paths: of each level the median of its modules.'
  return Picture(plots.by_level('Norm of the outer gradients', 'L2 norm', h.phases, h.norms, list(h.norms)), words)


def _agreement(run: Run) -> Picture | None:
  h = run.history
  if len(h.phases) < 2 or not h.cosines:
    return None
  words = '1 would mean that all paths of a module pull it the same way, 0 that they have nothing in common.'
  if len(h.cosines) < len(h.norms):
    words += ' A level with one module per path has nothing to agree on.'
  return Picture(plots.by_level('Agreement of the paths', 'cosine, mean', h.phases, h.cosines, list(h.norms)), words)


def _averaging_gap(run: Run) -> Picture | None:
  h = run.history
  both = np.isfinite(h.before.values) & np.isfinite(h.holdout.values)
  if len(h.phases) < 2 or run.grid.num_paths < 2 or not both.any(axis=1).all():
    return None
  before, after = (np.where(both, curve.values, 0).sum(1) / both.sum(1) for curve in (h.before, h.holdout))
  words = 'The mean over the paths, on what their shards hold back: what lies between is what averaging takes '
  words += f'away again. The last phase has an {averaging_gap.describe(after[-1] - before[-1])}.'
  curves = {'before': before, 'after': after}
  return Picture(plots.by_level('Loss around the outer step', 'nats per token', h.phases, curves, [*curves]), words)


def _pointers(run: Run) -> tuple[list[int], int] | None:
  """The version that each path is taken from, and the last; None where early stopping does not choose."""
  file = run.workdir / 'paths' / 'best.json'
  if run.grid.num_paths < 2 or not run.settings.train.early_stopping or not file.exists():
    return None
  return seals.read_json(file, 'version')['version'], int(max(run.history.phases, default=0))


def _early_stopping(run: Run) -> Picture | None:
  if not (pointers := _pointers(run)):
    return None
  versions, last = pointers
  stopped = sum(v < last for v in versions)
  if not stopped:
    return None  # the picture of the hold-outs says so
  words = f'{stopped} of {len(versions)} paths {"is" if stopped == 1 else "are"} taken from before the last phase.'
  return Picture(plots.early_stopping(versions, last, labels(run.grid)), words)


def _shards(run: Run) -> Picture | None:
  tokens = run.results.get('route', {}).get('shard_tokens') or []
  if len(tokens) < 2:
    return None
  words = (
    f'Tokens that the router gave to each path: the largest shard has {count(max(tokens))}, '
    f'the smallest {count(min(tokens))}.'
  )
  if run.settings.outer.reweigh:
    words += ' Paths weigh in the averages as their shards do.'
  return Picture(plots.shard_sizes(tokens, labels(run.grid)), words)


def _kinds(run: Run) -> Picture | None:
  table = np.array(run.results.get('route', {}).get('sequences_by_path_and_domain') or [[]])
  kinds = run.results.get('tokenize', {}).get('domains') or []
  if min(table.shape) < 2 or table.shape[1] != len(kinds):
    return None
  top = (table / np.maximum(table.sum(1, keepdims=True), 1)).max(1)
  mostly = int((top > 0.5).sum())
  words = (
    f'What each path reads. The router never saw these names; {mostly or "none"} of {len(table)} paths '
    f'{"reads" if mostly <= 1 else "read"} mostly one. '
    f'Normalized mutual information between paths and kinds: {agreement.normalized_mutual_information(table):.2f}.'
  )
  return Picture(plots.kinds_by_paths(table, kinds, labels(run.grid)), words)


def _matrix(run: Run) -> Picture | None:
  matrix = run.results.get('evaluate', {}).get('loss_matrix')
  if not matrix or len(matrix) < 2:
    return None
  words = (
    'Each column is a shard, each row a path: nats per token above the path whose shard it is. Orange is worse, blue '
    'better.'
  )
  values = np.array([[np.nan if v is None else v for v in row] for row in matrix], float)
  return Picture(plots.loss_matrix(values, labels(run.grid)), words)


def _grid(run: Run) -> Picture | None:
  words = 'The network from its bottom to its top. Each patch is a module, shared by the paths that it covers. '
  if run.grid.num_paths > 1:
    words += 'The line is one path: it goes up through one module of every storey. '
  words += 'How far each module has moved from the base model, in % of the norm of the base’s parameters.'  # noqa: RUF001
  return _drifts(run, [100 * d.from_base for _, d in run.drifts], 'Distance from the base model', 'blue', words)


def _siblings(run: Run) -> Picture | None:
  words = 'How far each module is from the mean of its level’s modules, in % of the same norm.'  # noqa: RUF001
  return _drifts(run, [100 * d.from_siblings for _, d in run.drifts], 'Distance from the siblings', 'orange', words)


def _drifts(run: Run, values: list[np.ndarray], title: str, colour: str, words: str) -> Picture | None:
  if not any(np.isfinite(v).any() for v in values):
    return None
  storeys = [grid_plot.Storey(slab.level, slab.parts, v) for (slab, _), v in zip(run.drifts, values, strict=True)]
  return Picture(grid_plot.draw(run.grid, storeys, title, colour), words)


def _time(run: Run) -> Picture | None:
  train, rows = run.results.get('train', {}), []
  for name, wall_s in run.report['wall_s'].items():
    outer_s = wall_s * (train.get('outer_fraction') or 0) if name == 'train' else 0.0
    parts = [(wall_s - outer_s, plot_style.BLUE), *([(outer_s, plot_style.ORANGE)] if outer_s else [])]
    rows.append((name, parts, duration(wall_s)))
  words = f'{duration(sum(run.report["wall_s"].values()))} {"so far" if run.notice else "in all"}.'
  if train.get('outer_s') is not None:
    words += f' Exchange between paths, striped, took {train["outer_s"]:.2g} s a phase.'
  return Picture(plots.bars('Time by stage', rows), words)


def _bytes(run: Run) -> Picture | None:
  train = run.results.get('train', {})
  sent, synchronous = (train.get(k) for k in ('outer_bytes_per_phase', 'synchronous_bytes_per_phase'))
  if not sent or not synchronous:
    return None
  phases = train['phases']
  rows = [
    ('this run', [(sent * phases, plot_style.BLUE)], size(sent * phases)),
    ('synchronous', [(synchronous * phases, plot_style.ORANGE)], size(synchronous * phases)),
  ]
  words = (
    f'Paths spoke to each other once in {run.settings.train.steps_per_phase} steps. Training the same modules '
    f'synchronously, exchanging gradients at every step, would have sent {synchronous / sent:,.0f} times as much.'
  )
  return Picture(plots.bars('Bytes between paths', rows), words)


def _timeline(run: Run) -> Picture | None:
  if not run.tasks:
    return None
  rows = timeline_plot.rows(run.tasks)
  words = 'Every bar is a task, the number its phase. A path goes on when its own modules are there'
  shared = next((level.name for level in run.levels if not level.axes), None)
  words += f'; {shared} is a module of all paths, and waits for all of them.' if shared else ', whatever others are at.'
  if (phases := timeline_plot.phases_at_once(run.tasks)) > 1:
    words += f' At one moment, {phases} different phases were trained.'
  shown = timeline_plot.shown(rows)
  if hidden := len(rows) - len(shown):
    words += f' Rows that are not shown: {hidden}.'
  return Picture(timeline_plot.draw(shown), words)


def _island_bytes(run: Run) -> Picture | None:
  moved = run.report['island_bytes']
  if not moved:
    return None
  rows = [
    (role, [(m['in'], plot_style.BLUE), (m['out'], plot_style.ORANGE)], f'{size(m["in"])}, {size(m["out"])}')
    for role, m in sorted(moved.items())
  ]
  words = 'Read from storage, and, striped, written to it. Processes of islands send each other nothing else.'
  return Picture(plots.bars('Bytes by role', rows), words)


PICTURES = {
  'validation_perplexity': _validation,
  'perplexity_by_domain': _by_domain,
  'perplexity_by_path': _by_path,
  'early_stopping': _early_stopping,
  'losses': _losses,
  'holdout_losses': _holdout,
  'learning_rate': _learning_rate,
  'gradient_norm': _grad_norm,
  'tokens_per_s': _tokens_per_s,
  'outer_gradients': _outer,
  'agreement': _agreement,
  'averaging_gap': _averaging_gap,
  'shard_sizes': _shards,
  'loss_matrix': _matrix,
  'kinds_by_paths': _kinds,
  'grid': _grid,
  'siblings': _siblings,
  'time_by_stage': _time,
  'bytes_sent': _bytes,
  'timeline': _timeline,
  'island_bytes': _island_bytes,
}
