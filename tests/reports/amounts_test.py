"""Numbers and bytes in words."""

import pytest

from dipaco_jax.reports import amounts


@pytest.mark.parametrize(('n', 'words'), [(812, '812'), (1.049e6, '1.05 M'), (5.3e9, '5.3 B'), (None, 'not known')])
def test_large_numbers_have_three_digits(n, words):
  assert amounts.count(n) == words


@pytest.mark.parametrize(('n', 'words'), [(812, '812 bytes'), (5_300, '5.3 kB'), (2e9, '2 GB'), (1.5e12, '1.5 TB')])
def test_bytes_are_in_decimal_units(n, words):
  assert amounts.size(n) == words
