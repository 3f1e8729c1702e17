"""Pictures of the paths: what each reads, and how far its modules have moved."""

import numpy as np

from dipaco_jax.reports import amounts, category_plots, grid_plot, heatmap
from dipaco_jax.reports.plot_style import Picture
from dipaco_jax.reports.run_data import Run, path_names
from dipaco_jax.routing import path_labels


def shard_sizes(run: Run) -> Picture | None:
  tokens = run.results.get('route', {}).get('shard_tokens') or []
  if len(tokens) < 2:
    return None
  words = (
    f'Tokens that the router gave to each path: the largest shard has {amounts.count(max(tokens))}, '
    f'the smallest {amounts.count(min(tokens))}.'
  )
  if run.settings.outer.reweigh:
    words += " Paths are weighted in the averages by their shards' sizes."
  return Picture(category_plots.shard_sizes(tokens, path_names(run.grid)), words)


def loss_matrix(run: Run) -> Picture | None:
  matrix = run.results.get('evaluate', {}).get('loss_matrix')
  if not matrix or len(matrix) < 2:
    return None
  words = (
    'Each column is a shard, each row a path: nats per token above the path whose shard it is. Orange is worse, blue '
    'better.'
  )
  values = np.array([[np.nan if v is None else v for v in row] for row in matrix], float)
  return Picture(heatmap.loss_matrix(values, path_names(run.grid)), words)


def kinds_by_paths(run: Run) -> Picture | None:
  table = np.array(run.results.get('route', {}).get('sequences_by_path_and_domain') or [[]])
  kinds = run.results.get('tokenize', {}).get('domains') or []
  if min(table.shape) < 2 or table.shape[1] != len(kinds):
    return None
  top = (table / np.maximum(table.sum(1, keepdims=True), 1)).max(1)
  mostly = int((top > 0.5).sum())
  words = (
    f'What each path reads. The router never saw these names; {mostly or "none"} of {len(table)} paths '
    f'{"reads" if mostly <= 1 else "read"} mostly one. '
    f'Normalized mutual information between paths and kinds: {path_labels.normalized_mutual_information(table):.2f}.'
  )
  return Picture(heatmap.kinds_by_paths(table, kinds, path_names(run.grid)), words)


def distance_from_base(run: Run) -> Picture | None:
  words = 'The network from its bottom to its top. Each patch is a module, shared by the paths that it covers. '
  if run.grid.num_paths > 1:
    words += 'The line is one path: it goes up through one module of every storey. '
  words += 'How far each module has moved from the base model, in % of the norm of the base’s parameters.'  # noqa: RUF001
  return _drifts(run, [100 * d.from_base for _, d in run.drifts], 'Distance from the base model', 'blue', words)


def distance_from_siblings(run: Run) -> Picture | None:
  words = 'How far each module is from the mean of its level’s modules, in % of the same norm.'  # noqa: RUF001
  return _drifts(run, [100 * d.from_siblings for _, d in run.drifts], 'Distance from the siblings', 'orange', words)


def _drifts(run: Run, values: list[np.ndarray], title: str, colour: str, words: str) -> Picture | None:
  if not any(np.isfinite(v).any() for v in values):
    return None
  storeys = [grid_plot.Storey(slab.level, slab.parts, v) for (slab, _), v in zip(run.drifts, values, strict=True)]
  return Picture(grid_plot.draw(run.grid, storeys, title, colour), words)
