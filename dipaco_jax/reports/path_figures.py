"""Pictures of the paths: how well they predict, what each reads, and how far its modules have moved."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dipaco_jax.reports import amounts, category_plots, curve_plots, grid_plot, token_axis
from dipaco_jax.reports.plot_style import Curve, Labels, Picture
from dipaco_jax.reports.run_data import Run, kind_of_text, path_names
from dipaco_jax.routing import path_labels
from dipaco_jax.storage import seals

Scale = Callable[[Curve], Curve]


def validation(run: Run) -> Picture | None:
  """Draws validation perplexity over training tokens and FLOPs: models of the same cost are above each other."""
  caption = ' Tokens and FLOPs are those of the base and of all paths together.' if run.grid.num_paths > 1 else ''
  s, serving = run.settings, run.report['serve_flops_per_token']
  axis = {
    'labels': Labels('Validation perplexity by cost', 'perplexity', token_axis.OF_ALL),
    'flops_per_token': serving and 3 * serving,
  }
  return _validation(
    run, functools.partial(token_axis.of_paths, s), functools.partial(token_axis.of_one_model, s), caption, axis
  )


def validation_by_step(run: Run) -> Picture | None:
  """Draws validation perplexity over steps, which all paths make at the same time."""
  if run.grid.num_paths < 2 or not len(run.history.control.steps):
    return None
  axis = {'labels': Labels('Validation perplexity by step', 'perplexity')}
  picture = _validation(run, lambda curve: curve, lambda curve: curve, '', axis)
  caption = (
    'The same over sequential steps. In each step, all paths train side by side, and together they read '
    f'{run.grid.num_paths} times as many rows as the dense control.'
  )
  return picture and picture._replace(caption=caption)


def _validation(run: Run, scale_paths: Scale, scale_dense: Scale, more: str, axis: dict[str, Any]) -> Picture | None:
  r, curve = run.report, run.history.validation
  if not len(curve.steps) or not (run.history.last or r['perplexity']):  # the base's alone is no curve
    return None
  caption, stopped = 'Each validation text is scored under the one path that the router picks for it.', None
  caption = caption if run.grid.num_paths > 1 else 'On all validation text.'
  if r['perplexity'] and r['perplexity_final'] and r['perplexity'] != r['perplexity_final']:
    stopped = r['perplexity']
    caption += f' The ring is the result, {r["perplexity"]:.2f}, with early stopping.'
  curves = {'paths': scale_paths(curve)}
  if len(run.history.control.steps):
    curves['dense control'] = scale_dense(run.history.control)
    caption += ' The dense control reads as many rows in a step as one path.'
  drawn = curve_plots.perplexity_curves(curves, {'base': r['base_perplexity']}, stopped=stopped, **axis)
  return Picture(drawn, caption + more)


def by_domain(run: Run) -> Picture | None:
  base, paths = run.report['base_perplexity_by_domain'] or {}, run.report['perplexity_by_domain'] or {}
  known = {n: paths[n] / base[n] for n in paths if paths[n] and base.get(n)}
  if len(known) < 2:
    return None
  control = run.report['control_perplexity_by_domain'] or {}
  if any(control.values()):
    against = _compared({n: paths[n] / x for n in known if (x := control.get(n))}, 'the dense control')
    caption = f'{against} {_compared(known, "the base")}'
  else:
    caption = _compared(known, 'the base')
  return Picture(category_plots.by_domain(base, paths, control, kind_of_text(run.settings)), caption)


def _compared(ratios: dict[str, float], whom: str) -> str:
  """Returns 'Against the base, the perplexity of the paths is between 40% lower (law) and 29% lower (books).'"""

  def describe(kind: str) -> str:
    change = 100 * (ratios[kind] - 1)
    return f'{abs(change):.0f}% {"lower" if change < 0 else "higher"} ({kind})'

  least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
  if least == most:
    return f'Against {whom}, the perplexity of the paths is {describe(least)}.'
  return f'Against {whom}, the perplexity of the paths is between {describe(least)} and {describe(most)}.'


def by_path(run: Run) -> Picture | None:
  values = run.report['perplexity_by_path'] or []
  known = [v for v in values if v is not None]
  if len(values) < 2 or not known:
    return None
  empty = len(values) - len(known)
  base = run.report['base_perplexity_by_path'] or [None] * len(values)
  control = run.report['control_perplexity_by_path'] or []
  caption = (
    f'Each path{", the base and the dense control" if any(control) else " and the base" if any(base) else ""} on the '
    'validation text that is routed to that path. Paths read different kinds of text, and some kinds are easier: '
    'compare the models on one path, not the paths with each other.'
  )
  if empty:
    caption += f' To {empty} path{"s" if empty > 1 else ""} no validation text was routed.'
  return Picture(category_plots.by_path(values, base, path_names(run.grid), control), caption)


def early_stopping(run: Run) -> Picture | None:
  if not (pointers := best_versions(run)):
    return None
  versions, last = pointers
  stopped = sum(v < last for v in versions)
  if not stopped:
    return None  # the picture of the hold-outs says so
  who = f'paths {"was" if stopped == 1 else "were"}'
  caption = (
    f'Early stopping takes each path from the phase after which its hold-out loss was lowest. {stopped} of '
    f'{len(versions)} {who} best before the last phase.'
  )
  return Picture(category_plots.early_stopping(versions, last, path_names(run.grid)), caption)


def best_versions(run: Run) -> tuple[list[int], int] | None:
  """Returns the version that each path is taken from, and the last; None if early stopping does not choose."""
  file = run.workdir / 'paths' / 'best.json'
  if run.grid.num_paths < 2 or not run.settings.train.early_stopping or not file.exists():
    return None
  return seals.read_json(file, 'version')['version'], int(max(run.history.phases, default=0))


def shard_sizes(run: Run) -> Picture | None:
  tokens = run.results.get('route', {}).get('shard_tokens') or []
  if len(tokens) < 2:
    return None
  caption = (
    f'Tokens that the router gave to each path: the largest shard has {amounts.count(max(tokens))}, '
    f'the smallest {amounts.count(min(tokens))}.'
  )
  if run.settings.outer.reweigh:
    caption += " Paths are weighted in the averages by their shards' sizes."
  return Picture(category_plots.shard_sizes(tokens, path_names(run.grid)), caption)


def loss_matrix(run: Run) -> Picture | None:
  matrix = run.results.get('evaluate', {}).get('loss_matrix')
  if not matrix or len(matrix) < 2:
    return None
  caption = (
    'Each column is a shard, each row a path: nats per token above the path whose shard it is. Orange is worse, blue '
    'better.'
  )
  values = np.array([[np.nan if v is None else v for v in row] for row in matrix], float)
  return Picture(category_plots.loss_matrix(values, path_names(run.grid)), caption)


def kinds_by_paths(run: Run) -> Picture | None:
  table = np.array(run.results.get('route', {}).get('sequences_by_path_and_domain') or [[]])
  kinds = run.results.get('tokenize', {}).get('domains') or []
  if min(table.shape) < 2 or table.shape[1] != len(kinds):
    return None
  top = (table / np.maximum(table.sum(1, keepdims=True), 1)).max(1)
  mostly = int((top > 0.5).sum())
  caption = (
    f'What each path reads. The router does not see the names of the kinds. {mostly or "None"} of {len(table)} paths '
    f'{"reads" if mostly <= 1 else "read"} mostly one kind. '
    f'Normalized mutual information between paths and kinds: {path_labels.normalized_mutual_information(table):.2f}.'
  )
  return Picture(category_plots.kinds_by_paths(table, kinds, path_names(run.grid)), caption)


def distance_from_base(run: Run) -> Picture | None:
  caption = 'The network from its bottom to its top. Each patch is a module, shared by the paths that it covers. '
  if run.grid.num_paths > 1:
    caption += 'The line is one path: it passes through one module of each level. '
  caption += 'How far each module has moved from the base model, in % of the norm of the base’s parameters.'  # noqa: RUF001
  return _drifts(run, [100 * d.from_base for _, d in run.drifts], 'Distance from the base model', 'blue', caption)


def distance_from_siblings(run: Run) -> Picture | None:
  caption = 'How far each module is from the mean of its level’s modules, in % of the same norm.'  # noqa: RUF001
  return _drifts(run, [100 * d.from_siblings for _, d in run.drifts], 'Distance from the siblings', 'orange', caption)


def _drifts(run: Run, values: list[np.ndarray], title: str, colour: str, caption: str) -> Picture | None:
  if not any(np.isfinite(v).any() for v in values):
    return None
  return Picture(grid_plot.draw(run.grid, [storey for storey, _ in run.drifts], values, title, colour), caption)
