"""Numbers and bytes in words."""

import pytest

from dipaco_jax.reports import amounts


@pytest.mark.parametrize(
  ('n', 'words'), [(812, '812'), (1.049e6, '1.05 M'), (5.3e9, '5.3 B'), (2.5e21, '2.5 Z'), (None, 'not known')]
)
def test_large_numbers_have_three_digits(n, words):
  assert amounts.count(n) == words


@pytest.mark.parametrize(('n', 'words'), [(999_499, '999 K'), (999_500, '1 M'), (999_600, '1 M'), (-999_600, '-1 M')])
def test_a_number_that_rounds_to_a_thousand_takes_the_next_unit(n, words):
  assert amounts.count(n) == words
  assert amounts.size(abs(n)) == f'{words.removeprefix("-").replace("K", "k")}B'


@pytest.mark.parametrize(('n', 'words'), [(812, '812 bytes'), (5_300, '5.3 kB'), (2e9, '2 GB'), (1.5e12, '1.5 TB')])
def test_bytes_are_in_decimal_units(n, words):
  assert amounts.size(n) == words


def test_bytes_per_token_are_those_of_both_losses():
  assert amounts.bytes_per_token(2**6, 1.5) == 4.0
  assert amounts.bytes_per_token(None, 1.5) is None and amounts.bytes_per_token(8.0, None) is None
  assert amounts.bytes_per_token(float('inf'), float('inf')) is None
