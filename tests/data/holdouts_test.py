"""Hold-outs are whole documents, of longer texts neighbouring pieces, and begin with every document."""

import tracemalloc

import numbered
import numpy as np
from numbered import SEQ_LEN

from dipaco_jax.data import holdouts


def test_hold_outs_follow_the_fraction_and_the_seed():
  documents = np.arange(100_000) // 2
  held, _ = holdouts.held_out(documents, documents % 7, 7, 0, 0.05)
  assert 0.045 < held.mean() < 0.055
  assert (held[::2] == held[1::2]).all()
  assert (held != holdouts.held_out(documents, documents % 7, 7, 1, 0.05)[0]).any()
  assert (held == holdouts.held_out(documents, documents % 7, 7, 0, 0.05)[0]).all()
  assert not holdouts.held_out(documents, documents % 7, 7, 0, 0.0)[0].any()


def test_small_paths_have_a_hold_out_and_tiny_ones_do_not():
  documents = np.concatenate([np.arange(1000), np.arange(1000, 1000 + holdouts.MIN_DOCUMENTS), [5000, 5001]])
  first = np.repeat([0, 1, 2], [1000, holdouts.MIN_DOCUMENTS, 2])
  held, undrawn = holdouts.held_out(documents, first, 3, 0, 1e-9)
  assert undrawn == [0, 1]
  assert [held[first == p].sum() for p in range(3)] == [1, 1, 0]


def test_a_document_of_two_paths_is_enough_for_both():
  few = np.arange(holdouts.MIN_DOCUMENTS)
  alone, _ = holdouts.held_out(few, np.zeros(len(few), int), 1, 0, 1e-9)
  both = few[alone]  # lower draws than its own are among the others of the second path
  documents = np.concatenate([few, np.arange(100, 1100), both])
  held, undrawn = holdouts.held_out(documents, np.repeat([0, 1], [len(few), 1001]), 2, 0, 1e-9)
  assert undrawn == [0, 1] and documents[held].tolist() == [both[0]] * 2


def test_what_is_not_used_is_not_held_back():
  """Nor does a draw that hits it count as a path's."""
  everything = np.arange(5000)
  hit, _ = holdouts.held_out(everything, np.zeros(5000, int), 1, 0, 0.01)
  documents = np.concatenate([everything[hit], everything[~hit][: holdouts.MIN_DOCUMENTS]])
  first = np.repeat([-1, 1], [hit.sum(), holdouts.MIN_DOCUMENTS])
  held, _ = holdouts.held_out(documents, first, 2, 0, 0.01)
  assert [held[first == p].sum() for p in (-1, 1)] == [0, 1]


def test_dealing_out_takes_few_bytes_a_sequence():
  """One for what is held back; what is computed on the way is of a block."""
  documents = np.arange(1 << 23, dtype=np.uint32)
  first = (documents % 5).astype(np.int32)
  first[-100:] = 5  # a path that no draw hits
  tracemalloc.start()
  held, _ = holdouts.held_out(documents, first, 6, 0, 1e-3)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert held[-100:].sum() == 1
  assert peak < 4 * len(documents)


def test_a_hold_out_begins_with_every_document(tmp_path):
  """In the order of the text, its first rows are of few: 20 documents of 30 sequences each."""
  sequences = numbered.make_sequences(tmp_path / 'sequences', [30 * SEQ_LEN] * 20)
  documents, _ = sequences.columns()
  order = np.concatenate([*holdouts.spread_out(documents, iter([np.arange(200), np.arange(200, 600)]), 0)])
  assert sorted(order) == list(range(600))
  for turn in range(30):
    assert sorted(documents[order[20 * turn : 20 * turn + 20]]) == list(range(20))
  firsts = order[:20]
  assert (firsts % 30).std() > 5, 'of a document not its beginning'
  assert (order != np.concatenate([*holdouts.spread_out(documents, iter([np.arange(600)]), 1)])).any()
  assert (order == np.concatenate([*holdouts.spread_out(documents, iter([np.arange(600)]), 0)])).all()
  assert list(holdouts.spread_out(documents, iter([]), 0)) == []


def texts(count, pieces):
  """Documents, and draws of texts of so many pieces: the share of a text behind the middle of each."""
  documents = np.repeat(np.arange(count * pieces), 3)
  return documents, np.tile(np.repeat(1 - (np.arange(pieces) + 0.5) / pieces, 3), count).astype(np.float32)


def test_of_longer_texts_the_ends_are_held_back():
  documents, draws = texts(4, 500)
  held, _ = holdouts.held_out(documents, documents % 5, 5, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01))
  assert np.flatnonzero(held[::3]).tolist() == [500 * i + n for i in range(4) for n in range(495, 500)]
  router = holdouts.draw_pieces(documents, draws, 0.02)
  after, _ = holdouts.held_out(
    documents, documents % 5, 5, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01, router.end)
  )
  assert np.flatnonzero(holdouts.draw_documents(documents, 0, 0.02, 'x', router)[:1500:3]).tolist() == [
    *range(490, 500)
  ]
  assert np.flatnonzero(after[:1500:3]).tolist() == [*range(485, 490)], 'next to what is held back already'


def test_copies_of_what_is_held_back_are_held_back_wherever_they_are():
  """The last piece of a text, in the middle of another one, and as a document that is no piece."""
  documents, draws = texts(4, 500)
  copies, last = slice(2250, 2253), documents[1497]
  documents[copies] = last
  documents, draws = np.append(documents, last), np.append(draws, np.float32(-1))
  pieces = holdouts.draw_pieces(documents, draws, 0.01)
  assert pieces.inside(slice(1497, 1500)).all() and not pieces.inside(copies).any()
  held, _ = holdouts.held_out(documents, documents % 5, 5, 0, 0.01, pieces)
  drawn = holdouts.draw_documents(documents, 0, 0.01, 'x', pieces)
  for found in held, drawn:
    assert found[1497:1500].all() and found[copies].all() and found[-1] and found.sum() == 64


def test_of_little_text_more_is_held_back_up_to_a_bound():
  documents, draws = texts(2, 100)
  held = holdouts.draw_pieces(documents, draws, 0.01)
  assert len(np.unique(documents[held.inside(slice(None))])) == holdouts.LEAST_PIECES
  documents, draws = texts(2, 20)
  held = holdouts.draw_pieces(documents, draws, 0.01)
  assert len(np.unique(documents[held.inside(slice(None))])) == 4  # a tenth
  assert not holdouts.draw_pieces(documents, draws, 0.0).inside(slice(None)).any()


def test_of_texts_that_are_drawn_whole_all_pieces_are_held_back():
  documents, draws = np.arange(2000), np.repeat(np.arange(20) / 20, 100).astype(np.float32)
  held, _ = holdouts.held_out(documents, documents % 3, 3, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01))
  assert np.flatnonzero(held).tolist() == list(range(100))
  first = np.where(documents < 100, 0, 1 + documents % 2)  # no piece of it is another path's
  held, _ = holdouts.held_out(documents, first, 3, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01))
  assert np.flatnonzero(held).tolist() == list(range(200)), 'those paths get the next text, whole'


def test_documents_and_pieces_are_drawn_side_by_side():
  documents, draws = texts(1, 1000)
  documents = np.concatenate([documents, np.arange(10_000, 60_000)])
  draws = np.concatenate([draws, np.full(50_000, -1, np.float32)])
  first = np.zeros(len(documents), int)
  held, _ = holdouts.held_out(documents, first, 1, 0, 0.05, holdouts.draw_pieces(documents, draws, 0.05))
  assert held[:2850].sum() == 0 and held[2850:3000].all() and 0.045 < held[3000:].mean() < 0.055
