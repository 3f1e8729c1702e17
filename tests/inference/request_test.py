"""What a request may ask for."""

import dataclasses

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.inference.request import Request, check_request


@pytest.mark.parametrize(
  'change, words',
  [
    ({'tokens': ()}, 'prompt is empty'),
    ({'max_tokens': 0}, 'max_tokens=0'),
    ({'max_tokens': 94}, 'set max_tokens to 93 or less'),
    ({'tokens': (5,) * 96, 'max_tokens': 1}, 'shorten the prompt to 95 tokens or fewer'),
    ({'temperature': -1.0}, 'temperature=-1.0'),
    ({'temperature': float('nan')}, 'temperature=nan'),
    ({'temperature': 10**400}, 'temperature=1000'),
    ({'top_k': -1}, 'top_k=-1'),
    ({'top_k': 2**31}, 'top_k=2147483648'),
    ({'top_p': 0.0}, 'top_p=0.0'),
    ({'top_p': 1.1}, 'top_p=1.1'),
    ({'seed': -1}, 'seed=-1'),
    ({'seed': 2**32}, 'seed=4294967296'),
    ({'reroute_every': -1}, 'reroute_every=-1'),
    ({'path': 1, 'reroute_every': 4}, 'reroute_every=4'),
  ],
)
def test_a_field_out_of_bounds_is_named(change, words):
  with pytest.raises(InputError, match=words):
    check_request(dataclasses.replace(Request((5, 6, 7), 20), **change), 96)


@pytest.mark.parametrize(
  'change',
  [
    {'max_tokens': 93},
    {'temperature': 0.0, 'top_k': 2**31 - 1, 'top_p': 1.0, 'seed': 2**32 - 1},
    {'stop': ('x' * 9999,) * 999},
    {'reroute_every': 1},
    {'path': 0},
  ],
)
def test_bounds_themselves_are_allowed(change):
  check_request(dataclasses.replace(Request((5, 6, 7), 20), **change), 96)
