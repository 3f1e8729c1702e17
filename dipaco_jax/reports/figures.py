"""All pictures of a report with their captions, by section of the page."""

import itertools
from collections.abc import Callable

from dipaco_jax.reports import island_figures, path_figures, plot_style, training_figures
from dipaco_jax.reports.plot_style import Picture
from dipaco_jax.reports.run_data import Run

SECTIONS: dict[str, dict[str, Callable[[Run], Picture | None]]] = {  # None: the run has no data for it yet
  'Quality': {
    'validation_perplexity': path_figures.validation,
    'validation_perplexity_by_step': path_figures.validation_by_step,
    'perplexity_by_domain': path_figures.by_domain,
    'perplexity_by_path': path_figures.by_path,
    'early_stopping': path_figures.early_stopping,
  },
  'Training': {
    'losses': training_figures.losses,
    'holdout_losses': training_figures.holdout,
    'gradient_norm': training_figures.gradient_norm,
    'learning_rate': training_figures.learning_rate,
    'tokens_per_s': training_figures.tokens_per_s,
    'outer_gradients': training_figures.outer_gradients,
    'agreement': training_figures.cosines,
    'averaging_gap': training_figures.averaging,
  },
  'Who reads what': {
    'shard_sizes': path_figures.shard_sizes,
    'loss_matrix': path_figures.loss_matrix,
    'kinds_by_paths': path_figures.kinds_by_paths,
  },
  'The grid': {'grid': path_figures.distance_from_base, 'siblings': path_figures.distance_from_siblings},
  'Cost': {
    'time_by_stage': training_figures.time_by_stage,
    'time_by_cause': training_figures.time_by_cause,
    'bytes_sent': training_figures.bytes_sent,
  },
  'Islands': {
    'goodput': island_figures.goodput,
    'bytes_by_phase': island_figures.bytes_by_phase,
    'bytes_beside_others': island_figures.bytes_beside,
    'island_bytes': island_figures.island_bytes,
    'timeline': island_figures.timeline,
  },
}


def draw_all(run: Run) -> dict[str, Picture]:
  """Returns the pictures by name, in the page's order, without those whose data is not yet available."""
  drawn = {}
  for name, draw in itertools.chain.from_iterable(section.items() for section in SECTIONS.values()):
    with plot_style.left_out(name):
      if picture := draw(run):
        drawn[name] = picture
  return drawn
