"""Rows and columns for paths, stages and kinds of text."""

import numpy as np

from dipaco_jax.reports import category_plots, plot_style


def test_bars_of_nothing_can_be_drawn():
  assert plot_style.to_png(category_plots.bars('Nothing', [('a', [(0.0, 'red')], '0')])).startswith(b'\x89PNG')


def test_kinds_of_text_are_sorted_and_tell_the_change():
  drawn = category_plots.by_domain({'a': 10.0, 'b': 8.0, 'c': None}, {'a': 5.0, 'b': 4.0, 'c': 3.0, 'd': None})
  ax = drawn.axes[0]
  assert [text.get_text() for text in ax.get_yticklabels()] == ['b', 'a']
  assert [text.get_text() for text in ax.texts] == ['-50%', '-50%']


def test_kinds_of_text_tell_the_paths_change_against_the_dense_control():
  drawn = category_plots.by_domain({'a': 10.0, 'b': 8.0}, {'a': 5.0, 'b': 4.0}, {'a': 4.0, 'b': 5.0})
  assert [text.get_text() for text in drawn.axes[0].texts] == ['-20%', '+25%']
  assert drawn.axes[0].get_xlabel().endswith('paths against dense control')


def test_owners_are_called_owners():
  drawn = category_plots.by_domain({'a': 10.0}, {'a': 5.0}, what='owner')
  assert drawn.axes[0].get_title(loc='left') == 'By owner'


def test_many_paths_are_a_histogram_of_early_stopping():
  few = category_plots.early_stopping([1, 3], 3, ['0', '1'])
  many = category_plots.early_stopping([1, 3] * 40, 3, [str(i) for i in range(80)])
  assert few.axes[0].get_xlabel() == 'path' and many.axes[0].get_ylabel() == 'paths'
  assert [bar.get_height() for bar in many.axes[0].patches] == [0, 40, 0, 40]


def words(figure) -> list[str]:
  return [text.get_text() for text in figure.axes[0].texts]


def test_losses_are_above_those_of_the_shards_own_path():
  drawn = category_plots.loss_matrix(np.array([[1.0, 2.5], [1.25, 2.0]]), ['0', '1'])
  assert words(drawn) == ['+0.50', '+0.25']  # the diagonal is 0, which is not written


def test_a_loss_that_is_not_known_has_no_cell():
  drawn = category_plots.loss_matrix(np.array([[1.0, np.nan], [2.0, 1.0]]), ['0', '1'])
  assert words(drawn) == ['+1.00'] and len(drawn.axes[0].collections[0].get_paths()) == 3


def test_kinds_without_room_are_summed():
  drawn = category_plots.kinds_by_paths(
    np.arange(300).reshape(3, 100), [f'kind {i}' for i in range(100)], ['0', '1', '2']
  )
  names = [text.get_text() for text in drawn.axes[0].get_yticklabels()]
  assert len(names) == 25 and names[0] == 'kind 99' and names[-1] == '76 others'
