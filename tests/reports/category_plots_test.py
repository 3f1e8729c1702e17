"""Rows and columns for paths, stages and kinds of text."""

from dipaco_jax.reports import category_plots, plot_style


def test_bars_of_nothing_can_be_drawn():
  assert plot_style.to_png(category_plots.bars('Nothing', [('a', [(0.0, 'red')], '0')])).startswith(b'\x89PNG')


def test_kinds_of_text_are_sorted_and_tell_the_change():
  drawn = category_plots.by_domain({'a': 10.0, 'b': 8.0, 'c': None}, {'a': 5.0, 'b': 4.0, 'c': 3.0, 'd': None})
  ax = drawn.axes[0]
  assert [text.get_text() for text in ax.get_yticklabels()] == ['b', 'a']
  assert [text.get_text() for text in ax.texts] == ['-50%', '-50%']


def test_many_paths_are_a_histogram_of_early_stopping():
  few = category_plots.early_stopping([1, 3], 3, ['0', '1'])
  many = category_plots.early_stopping([1, 3] * 40, 3, [str(i) for i in range(80)])
  assert few.axes[0].get_xlabel() == 'path' and many.axes[0].get_ylabel() == 'paths'
  assert [bar.get_height() for bar in many.axes[0].patches] == [0, 40, 0, 40]
