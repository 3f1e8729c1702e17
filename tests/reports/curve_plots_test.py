"""Curves over steps, including those of runs without steps."""

import numpy as np

from dipaco_jax.reports import curve_plots, plot_style


def test_ticks_of_phases_and_steps_are_integers():
  curve = plot_style.Curve(np.array([100, 101]), np.array([[3.0], [2.0]]))
  ax = curve_plots.holdout(curve, ['path']).axes[0]
  ax.figure.canvas.draw()
  shown = [t.get_text() for t in ax.get_xticklabels()]
  assert len({*shown}) == len(shown) and all(word.isdigit() for word in shown) and {'100', '101'} <= {*shown}


def test_a_run_without_steps_can_be_drawn():
  no_steps = plot_style.Curve(np.zeros(0, int), np.zeros(0))
  no_steps_of_paths = plot_style.Curve(np.zeros(0, int), np.zeros((0, 2)))
  plot_style.to_png(
    curve_plots.training(plot_style.Labels('Loss', 'nats'), plot_style.Curves(no_steps, no_steps_of_paths), ['0', '1'])
  )
  drawn = curve_plots.perplexity_curves({'a': no_steps}, {'a': None})
  assert not [line for line in drawn.axes[0].lines if len(line.get_xdata())]
