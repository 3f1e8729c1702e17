"""The style of pictures: ticks as numbers that are not rounded, labels that do not overlap."""

import numpy as np
import pytest

from dipaco_jax.reports import plot_style


@pytest.mark.parametrize(
  ('ticks', 'words'),
  [
    ([40, 42.5, 45, 47.5], ['40.0', '42.5', '45.0', '47.5']),
    ([0, 500, 1000], ['0', '500', '1,000']),
    ([0, 0.0005, 0.001], ['0.0000', '0.0005', '0.0010']),
    ([0, 250_000, 500_000], ['0', '250 K', '500 K']),
    ([1e6, 1.5e6], ['1.0 M', '1.5 M']),
    ([7.5e5, 1e6, 1.25e6], ['0.75 M', '1.00 M', '1.25 M']),
    ([2e7, 2.5e7], ['20 M', '25 M']),
    ([3.0], ['3']),
    ([], []),
  ],
)
def test_ticks_neither_repeat_nor_round(ticks, words):
  assert plot_style.tick_words(ticks) == words


def test_labels_do_not_overlap():
  places = plot_style._spread([1.0, 1.01, 5.0, 1.02], 0.5)
  assert np.diff(np.sort(places)).min() > 0.499 and np.argsort(places).tolist() == [0, 1, 3, 2]


def test_a_label_is_joined_to_a_line_that_ends_early():
  _, ax = plot_style.axes(4, 3)
  ax.plot([0, 10], [1, 3])
  ends = plot_style.End(2.0, 'early', '#000000', 3.0), plot_style.End(3.0, 'last', '#000000')
  plot_style.label_ends(ax, ends)
  level = [line.get_xdata() for line in ax.lines if tuple(line.get_ydata()) == (2.0, 2.0)]
  assert (3.0, ax.get_xlim()[1]) in [tuple(x) for x in level]
