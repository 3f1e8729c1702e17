"""Tables of seconds: rows and columns add up, and a line names the largest causes."""

from dipaco_jax.processes import time_use
from dipaco_jax.reports import time_table

SECONDS = {'tokenize': {'start': 2.0, 'stages': 8.0}, 'train': {'inner': 80.0, 'outer': 4.0, 'wait': 6.0}}


def test_every_cause_has_a_name():
  assert set(time_table.WORDS) == set(time_use.CAUSES)


def test_rows_are_causes_and_columns_stages():
  rows, head = time_table.by_stage(SECONDS)
  assert head == ('seconds', 'tokenize', 'train', 'in all')
  assert rows[0] == ('inner steps', '', '80.0', '80.0') and rows[-1] == ('sum', '10.0', '90.0', '100.0')
  assert len(rows) == 1 + 5


def test_the_dense_control_has_its_full_name():
  assert time_table.by_stage({'control': {'inner': 1.0}})[1] == ('seconds', 'dense control')


def test_of_one_stage_there_is_no_sum_of_stages():
  assert time_table.by_stage({'train': {'inner': 1.0}}) == (
    [('inner steps', '1.0'), ('sum', '1.0')], ('seconds', 'train'),
  )  # fmt: skip


def test_paths_have_rows_and_add_up_with_what_they_spent_together():
  rows, head = time_table.by_path([{'inner': 2.0, 'wait': 1.0}, {}], {'inner': 2.0, 'wait': 1.0, 'outer': 3.0})
  assert head == ('path', 'inner steps', 'outer steps', 'waiting for others', 'sum')
  assert rows == [
    ('0', '2.0', '', '1.0', '3.0'),
    ('1', '', '', '', ''),
    ('together', '', '3.0', '', '3.0'),
    ('in all', '2.0', '3.0', '1.0', '6.0'),
  ]


def test_a_line_names_the_largest_and_the_rest():
  words = 'time 1 min 40 s: inner steps 80%, text, router, shards 8%, waiting for others 6%, outer steps 4%, start 2%'
  assert time_table.in_words(SECONDS) == f'{words}; goodput of training 93%'
  more = SECONDS | {'evaluate': {'evaluate': 1.0, 'compile': 99.0}}
  assert time_table.in_words(more).endswith('outer steps 2%, the rest 2%; goodput of training 93%')
  assert time_table.in_words({}) == time_table.in_words({'train': {}}) == ''
