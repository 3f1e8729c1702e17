"""One token at a time, against the whole text at one time; how tokens are drawn, against numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import own_modules
import pytest
import shapes_of_families
import slow
import small
from hypothesis import given, settings, strategies as st

from dipaco_jax.models import decoding, transformer

S, LAYERS = 48, 3
CONFIG = small.settings(model={'width': 16, 'num_layers': LAYERS, 'num_heads': 2, 'head_dim': 8, 'mlp_dim': 24}).model
# Sums of up to 64 float32 products, a dozen of them in a row, of values below 10.
CLOSE = 2 * 10 * 64 * small.EPS
PROMPTS = (3, 17, 32)


@pytest.fixture(scope='module')
def made():
  return transformer.make_model(CONFIG, small.VOCAB)


ALL = shapes_of_families.FAMILIES | shapes_of_families.MORE


@pytest.fixture(scope='module', params=slow.all_but(ALL, 'llama3', 'gemma3'))
def of_a_family(request):
  changes = ALL[request.param]
  return transformer.make_model(dataclasses.replace(CONFIG, **changes), small.VOCAB)


drawn = jax.jit(decoding.sample)
step = jax.jit(decoding.step, static_argnums=0)
advance = jax.jit(decoding.advance, static_argnums=(0, 3))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(made, params, tokens_1L):
  x_1LD, head_DV = transformer.logit_factors(made, params, tokens_1L, jnp.ones_like(tokens_1L))
  return (x_1LD @ head_DV)[0]


@functools.partial(jax.jit, static_argnums=(0, 4, 6))
def reread(made, params, tokens_1L, length, first=0, below=decoding.EMPTY, keep=()):
  x_1LD = below.entering[first] if first else decoding.embed(made, params, tokens_1L)
  return decoding.prefill(made, params, decoding.Entry(x_1LD, first, below), length, keep)


def padded(tokens) -> np.ndarray:
  return np.pad(np.asarray(tokens, np.int32), (0, S - len(tokens)))[None]


def whole(made, params, tokens) -> np.ndarray:
  """Logits behind every token."""
  return np.asarray(logits_of(made, params, padded(tokens)))[: len(tokens)]


def begun(made, params, tokens, keep=()) -> tuple[decoding.Cache, np.ndarray]:
  cache, logits = reread(made, params, padded(tokens), np.int32(len(tokens)), 0, decoding.EMPTY, keep)
  return cache, np.asarray(logits)[0]


def texts_of(caches, tokens, places) -> decoding.Texts:
  cache = jax.tree.map(lambda *rows: jnp.concatenate(rows), *caches)
  B = len(tokens)
  draw = decoding.SamplingParams(jnp.zeros(B, jnp.uint32), jnp.zeros(B), jnp.zeros(B, jnp.int32), jnp.ones(B))
  return decoding.Texts(cache, jnp.asarray(tokens), jnp.asarray(places), jnp.full(B, S), draw)


def test_steps_give_the_logits_of_the_whole_text(of_a_family):
  made = of_a_family
  params = small.base(made)
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, small.VOCAB, length + 8).astype(np.int32) for length in PROMPTS]
  parts = [begun(made, params, text[:length]) for text, length in zip(texts, PROMPTS, strict=True)]
  expected = [whole(made, params, text) for text in texts]
  for (_, logits), full, length in zip(parts, expected, PROMPTS, strict=True):
    np.testing.assert_allclose(logits, full[length - 1], atol=CLOSE)
  state = texts_of([cache for cache, _ in parts], [t[n] for t, n in zip(texts, PROMPTS, strict=True)], list(PROMPTS))
  for i in range(7):
    cache, logits = step(made, params, state)
    for row, (full, length) in enumerate(zip(expected, PROMPTS, strict=True)):
      np.testing.assert_allclose(logits[row], full[length + i], atol=CLOSE)
    following = jnp.asarray([t[n + i + 1] for t, n in zip(texts, PROMPTS, strict=True)])
    state = state._replace(cache=cache, token=following, position=state.position + 1)


@pytest.mark.parametrize('first', range(LAYERS))
def test_another_path_s_cache_from_the_block_that_differs(made, first):
  """The blocks below are not computed again: what they are in the other parameters is not even looked at."""
  old, new = small.base(made, 0), small.base(made, 1)
  blocks = [f'block_{n}/' for n in range(first, LAYERS)]
  changed = {name: (new if name.startswith(tuple(blocks)) or not first else old)[name] for name in old}
  below = [f'block_{n}/' for n in range(first)]
  broken = {name: np.nan * x if name.startswith(tuple(below)) else x for name, x in changed.items()}
  tokens = np.random.default_rng(0).integers(0, small.VOCAB, 20).astype(np.int32)
  expected, logits = begun(made, changed, tokens, (1, 2))
  cache, _ = begun(made, old, tokens, (1, 2))
  found, again = reread(made, broken, padded(tokens), np.int32(20), first, cache if first else decoding.EMPTY, (1, 2))
  np.testing.assert_array_equal(again[0], logits)
  jax.tree.map(np.testing.assert_array_equal, decoding.resize(made, found, 20), decoding.resize(made, expected, 20))


def test_a_text_stays_as_it_is_at_its_end(made):
  params, tokens = small.base(made), np.arange(5, dtype=np.int32)
  cache, logits = begun(made, params, tokens)
  state = texts_of([cache, cache], [int(logits.argmax())] * 2, [5, 5])._replace(end=jnp.asarray([7, S]))
  state, found = advance(made, params, state, 6)
  assert state.position.tolist() == [6, 11] and len(set(found[1:, 0].tolist())) == 1
  assert found[0, 0] == found[0, 1]


def test_a_state_stays_as_it_is_at_the_end(tmp_path, monkeypatch):
  """Of a recurrence, which would read the last token again."""
  own = own_modules.write(tmp_path, monkeypatch, own_modules.RECURRENT)
  made = transformer.make_model(dataclasses.replace(CONFIG, block=f'{own}:make'), small.VOCAB)
  params, tokens = small.base(made), np.arange(5, dtype=np.int32)
  cache, logits = begun(made, params, tokens)
  state, _ = advance(made, params, texts_of([cache], [int(logits.argmax())], [5])._replace(end=jnp.asarray([7])), 6)
  expected, _ = begun(made, params, [*tokens, int(logits.argmax())])
  small.assert_close(state.cache, expected, CLOSE)


def allowed(logits, temperature, top_k, top_p) -> np.ndarray:
  """Probabilities of what may be drawn."""
  p = np.exp((logits - logits.max()) / temperature)
  p /= p.sum()
  order = np.argsort(-p, kind='stable')
  kept = order[: top_k or None]
  before = np.concatenate([[0], p[order].cumsum()[:-1]])[: len(kept)]
  kept = kept[(before < top_p) | (np.arange(len(kept)) == 0)]
  q = np.where(np.isin(np.arange(len(p)), kept), p, 0)
  return q / q.sum()


@settings(max_examples=20, deadline=None)  # the first one compiles
@given(st.sampled_from([0.3, 1.0, 2.0]), st.sampled_from([0, 1, 3, 8]), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_tokens_are_drawn_as_often_as_they_should(temperature, top_k, top_p):
  n, logits = 4000, np.random.default_rng(0).normal(size=8).astype('f')
  draw = decoding.SamplingParams(
    jnp.arange(n, dtype=jnp.uint32), jnp.full(n, temperature), jnp.full(n, top_k), jnp.full(n, top_p)
  )
  found = np.bincount(drawn(jnp.tile(logits, (n, 1)), draw, jnp.zeros(n, jnp.int32)), minlength=8)
  expected = allowed(logits.astype('d'), temperature, top_k, top_p)
  assert not found[expected == 0].any()
  deviation = np.sqrt(n * expected * (1 - expected))
  assert (abs(found - n * expected) <= 5 * deviation + 1e-9).all()  # 1 in 10^6 for each of some hundred counts


def test_a_sample_depends_on_seed_and_position_only():
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)), jnp.float32)
  one = decoding.SamplingParams(jnp.full(1, 7, jnp.uint32), jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1))
  three = decoding.SamplingParams(*(jnp.concatenate([x, x, x]) for x in one))._replace(
    seed=jnp.asarray([1, 7, 2], jnp.uint32)
  )
  places = [int(drawn(logits[1:2], one, jnp.full(1, place))[0]) for place in range(20)]
  assert places == [int(drawn(logits, three, jnp.full(3, place))[1]) for place in range(20)]
  assert len(set(places)) > 5
