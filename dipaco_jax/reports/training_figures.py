"""Figures of training: losses, gradients, speed, agreement of paths, and costs."""

import numpy as np

from dipaco_jax.algorithm import averaging_gap
from dipaco_jax.processes import time_use
from dipaco_jax.processes.display import duration
from dipaco_jax.reports import category_plots, curve_plots, headline, path_figures, time_table, token_axis
from dipaco_jax.reports.amounts import size
from dipaco_jax.reports.history import History
from dipaco_jax.reports.palette import BLUE, GREY, ORANGE
from dipaco_jax.reports.plot_style import Curve, Curves, Labels, Picture
from dipaco_jax.reports.run_data import Run, path_names

EXPLAINED_GAP = 0.3  # nats; a caption explains a larger gap between training and held-back loss


def losses(run: Run) -> Picture | None:
  h = run.history
  who = 'every path on its own shard' if run.grid.num_paths > 1 else 'the path'
  caption = f'The base model first, then {who}, continuing from where the base ended.'
  if len(h.control_training.steps):
    caption += ' The dense control also continues from the base, on all text.'
  base, paths, xlabel = _over_tokens(run, h.base, h.training)
  control = _over_tokens(run, h.base, h.control_training)[1]
  return _training(run, Labels('Training loss', 'nats per token', xlabel), Curves(base, paths, control), caption)


def holdout(run: Run) -> Picture | None:
  curve, s = run.history.holdout, run.settings
  if not np.isfinite(curve.values).any():
    return None
  caption = "Each path on its shard's hold-out: where the loss rises, the path overfits."
  if len(run.history.control_holdout.steps):
    caption += ' The dense control has a hold-out of all text.'
  if (pointers := path_figures.best_versions(run)) and min(pointers[0]) == pointers[1]:
    caption += ' All paths were best after the last phase, so early stopping takes them all from it.'
  apart = None if s.train.loss_on_prefix else overfitting(run.history, s.train.steps_per_phase)  # else of other targets
  if apart and apart > EXPLAINED_GAP:
    caption += (
      f' In the last phase it lies {apart:.1f} nats above the training loss, a perplexity {np.exp(apart):.1f} times as '
      'high: paths know what they were trained on far better than other text of its kind. More text, fewer paths or '
      'fewer steps would bring the two together.'
    )
  control, over_tokens, xlabel = _over_tokens(run, run.history.control_holdout, curve)
  return Picture(curve_plots.holdout(over_tokens, path_names(run.grid), xlabel, control), caption)


def _over_tokens(run: Run, base: Curve, paths: Curve) -> tuple[Curve, Curve, str]:
  """Returns curves over the tokens that each path has read, and their axis; over steps where paths sit phases out."""
  if not token_axis.trains_always(run.settings):
    return base, paths, 'training step'
  base, paths = (token_axis.of_one_model(run.settings, curve) for curve in (base, paths))
  return base, paths, token_axis.OF_ONE if run.grid.num_paths > 1 else token_axis.OF_ALL


def overfitting(history: History, steps: int) -> float | None:
  """Returns the median over the paths of held-back loss less that of the last training `steps`, in nats."""
  held, training = history.holdout, history.training
  if not len(held.steps) or not len(training.steps):
    return None
  last = training.values[training.steps > held.steps[-1] - steps]
  known = np.isfinite(last)
  means = np.where(known, last, 0).sum(0) / np.maximum(known.sum(0), 1)
  apart = (held.values[-1] - means)[known.any(0) & np.isfinite(held.values[-1])]
  return float(np.median(apart)) if len(apart) else None


def learning_rate(run: Run) -> Picture | None:
  caption = 'Learning rate of the inner optimizer: one schedule over the steps of the base model and of the paths.'
  control = run.history.control_learning_rate
  if len(control.steps):
    caption += ' The schedule of the dense control covers the steps of the base model and its own.'
  rates = run.history.learning_rate
  curves = Curves(*rates, Curve(control.steps, control.values[:, 0]))
  return _training(run, Labels('Learning rate', 'learning rate'), curves, caption, by_path=False)


def gradient_norm(run: Run) -> Picture | None:
  h, clip = run.history, run.settings.inner.clip_norm
  caption = f'Before it is clipped to {clip:g}.' if clip else 'It is not clipped.'
  return _training(run, Labels('Norm of the inner gradient', 'L2 norm'), Curves(h.base_norm, h.norm), caption)


def tokens_per_s(run: Run) -> Picture | None:
  of = 'of a worker on average' if run.report['island_bytes'] else 'of all devices together'
  caption = f'Training tokens per second {of}, time between dispatches included.'
  return _training(run, Labels('Speed', 'tokens/s'), Curves(*run.history.tokens_per_s), caption, by_path=False)


def _training(run: Run, labels: Labels, curves: Curves, caption: str, by_path: bool = True) -> Picture | None:
  """Draws figures of the inner steps; None if there is no step yet."""
  if not np.isfinite(curves.base.values).any() and not np.isfinite(curves.paths.values).any():
    return None
  if by_path and run.grid.num_paths > 1 and np.isfinite(curves.paths.values).any():
    caption += ' One thin line per path; the thick one is their median.'
  names = path_names(run.grid) if by_path else ['paths' if run.grid.num_paths > 1 else 'path']
  return Picture(curve_plots.training(labels, curves, names, by_path), caption)


def outer_gradients(run: Run) -> Picture | None:
  h = run.history
  if len(h.phases) < 2 or not h.norms:
    return None
  caption = 'How far a phase moved a module, averaged over its paths: of each level the median of its modules.'
  drawn = curve_plots.by_phase(Labels('Norm of the outer gradients', 'L2 norm'), h.phases, h.norms, list(h.norms))
  return Picture(drawn, caption)


def cosines(run: Run) -> Picture | None:
  h = run.history
  if len(h.phases) < 2 or not h.cosines:
    return None
  caption = '1 would mean that all paths of a module pull it the same way, 0 that they have nothing in common.'
  if len(h.cosines) < len(h.norms):
    caption += ' A level with one module per path has nothing to agree on.'
  drawn = curve_plots.by_phase(Labels('Agreement of the paths', 'cosine, mean'), h.phases, h.cosines, list(h.norms))
  return Picture(drawn, caption)


def averaging(run: Run) -> Picture | None:
  h = run.history
  both = np.isfinite(h.before.values) & np.isfinite(h.holdout.values)
  if len(h.phases) < 2 or run.grid.num_paths < 2 or not both.any(axis=1).all():
    return None
  before, after = (np.where(both, curve.values, 0).sum(1) / both.sum(1) for curve in (h.before, h.holdout))
  caption = (
    "Mean of the paths' hold-out losses before and after modules are averaged. Averaging undoes part of what each "
  )
  caption += f'path has learned. The last phase has an {averaging_gap.describe(after[-1] - before[-1])}.'
  curves = {'before': before, 'after': after}
  drawn = curve_plots.by_phase(Labels('Loss around the outer step', 'nats per token'), h.phases, curves, [*curves])
  return Picture(drawn, caption)


def time_by_stage(run: Run) -> Picture | None:
  """Draws the time of each stage, with the time lost to restarts apart."""
  train, rows = run.results.get('train', {}), []
  seconds = headline.stage_seconds(run.report)
  causes = {} if run.report['island_bytes'] else run.report['seconds'] or {}
  for name, stage_s in seconds.items():
    lost_s = causes.get(name, {}).get(time_use.LOST, 0.0)
    parts = [(stage_s - lost_s, BLUE), *([(lost_s, ORANGE)] if lost_s else [])]
    rows.append((time_table.STAGES.get(name, name), parts, duration(stage_s)))
  caption = headline.total_time(run.report, ' so far' if run.notice else ' in all')
  caption += ' (hatched: lost to restarts).' if any(len(parts) > 1 for _, parts, _ in rows) else '.'
  if train.get('outer_s') is not None:
    caption += f' The exchange between paths took {train["outer_s"]:.2g} s per phase.'
  return Picture(category_plots.bars('Time by stage', rows), caption)


def time_by_cause(run: Run) -> Picture | None:
  """Draws the time of training by use, and lost time by cause."""
  seconds = (run.report['seconds'] or {}).get('train', {})
  causes = [cause for cause in time_table.WORDS if cause != time_use.STAGES and seconds.get(cause)]
  all_s = sum(seconds[cause] for cause in causes)
  if not all_s:
    return None
  colours = dict.fromkeys(time_use.STEPS, BLUE) | {time_use.OTHER: GREY}
  rows = [
    (time_table.WORDS[cause], [(s := seconds[cause], colours.get(cause, ORANGE))], f'{duration(s)}, {s / all_s:.1%}')
    for cause in causes
  ]
  whose = 'of all workers' if run.report['island_bytes'] else 'of training'
  caption = f'{duration(all_s)} {whose}; goodput, the share of steps, is {time_use.goodput(seconds):.0%}.'
  return Picture(category_plots.bars('Time of training by cause', rows), caption)


def bytes_sent(run: Run) -> Picture | None:
  """Draws bytes between paths, and those of data-parallel training; None if nothing was exchanged."""
  train = run.results.get('train', {})
  sent, synchronous = (train.get(k) for k in ('outer_bytes_per_phase', 'synchronous_bytes_per_phase'))
  if not sent or not synchronous:
    return None
  phases = train['phases']
  both = (('paths', sent, BLUE), ('data-parallel', synchronous, ORANGE))
  rows = [(name, [(each * phases, colour)], size(each * phases)) for name, each, colour in both]
  how_often = f'once in {run.settings.train.phase_length}'
  if run.report['num_devices'] == 1 and not run.report['island_bytes']:
    caption = (
      'This run had one device, so nothing was sent. The bars show what would be sent with a worker for each path: '
      f'paths exchange parameters {how_often}.'
    )
  else:
    caption = f'Paths exchanged parameters {how_often}.'
  caption += (
    ' Data-parallel training of one path on as many workers, which exchange all gradients at every step, would send '
    f'{synchronous / sent:,.0f} times as many bytes.'
  )
  return Picture(category_plots.bars('Bytes between paths', rows), caption)
