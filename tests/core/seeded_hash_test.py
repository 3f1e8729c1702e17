"""Hashes for draws: known values, which files on disk depend on."""

import numpy as np

from dipaco_jax.core import seeded_hash


def test_integers_hash_to_the_outputs_of_splitmix64():
  # The first output from seed 0, as in the reference implementation; and that of its state after the second step.
  assert seeded_hash.of_integers(0)[0] == 0xE220A8397B1DCDAF
  with np.errstate(over='ignore'):
    assert seeded_hash.mix(2 * np.uint64([0x9E3779B97F4A7C15]))[0] == 0x6E789E6AA1B965F4


def test_arrays_hash_elementwise_and_order_matters():
  found = seeded_hash.of_integers(1, np.arange(3))
  assert found.tolist() == [seeded_hash.of_integers(1, i)[0] for i in range(3)]
  assert found[2] == 13608149317741381227 != seeded_hash.of_integers(2, 1)[0]


def test_names_hash_alike_everywhere_also_with_half_a_character():
  assert seeded_hash.of_name('a') == 0x40F89E395B66422F
  assert seeded_hash.of_name('a', 'little') == 0x2F42665B399EF840
  assert seeded_hash.of_name('é\ud800') == 3091290305334428539
