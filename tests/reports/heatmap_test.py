"""Tables as cells."""

import numpy as np

from dipaco_jax.reports import heatmap


def words(figure) -> list[str]:
  return [text.get_text() for text in figure.axes[0].texts]


def test_losses_are_above_those_of_the_shards_own_path():
  drawn = heatmap.loss_matrix(np.array([[1.0, 2.5], [1.25, 2.0]]), ['0', '1'])
  assert words(drawn) == ['+0.50', '+0.25']  # the diagonal is 0, which is not written


def test_a_loss_that_is_not_known_has_no_cell():
  drawn = heatmap.loss_matrix(np.array([[1.0, np.nan], [2.0, 1.0]]), ['0', '1'])
  assert words(drawn) == ['+1.00'] and len(drawn.axes[0].collections[0].get_paths()) == 3


def test_kinds_without_room_are_summed():
  drawn = heatmap.kinds_by_paths(np.arange(300).reshape(3, 100), [f'kind {i}' for i in range(100)], ['0', '1', '2'])
  names = [text.get_text() for text in drawn.axes[0].get_yticklabels()]
  assert len(names) == 25 and names[0] == 'kind 99' and names[-1] == '76 others'
