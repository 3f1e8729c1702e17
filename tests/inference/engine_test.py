"""Generation in batches with a cache and changing paths, compared with one text at a time without a cache."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import made_run
import numpy as np
import pytest
import slow
from hypothesis import HealthCheck, given, settings, strategies as st

from dipaco_jax.inference import trained_run
from dipaco_jax.inference.engine import Engine, bucket_length
from dipaco_jax.inference.request import Request
from dipaco_jax.models import decoding
from dipaco_jax.routing import chunk_router


@pytest.fixture(scope='module', params=slow.but([False, True], True), ids=['router', 'chooser'])
def run(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp('made')
  return trained_run.TrainedRun(made_run.write(folder, made_run.settings(), chooser=request.param))


@functools.partial(jax.jit, static_argnums=0)
def next_token(made, params, tokens_1L, length, sampling):
  x_1LD, head_DV = trained_run.transformer.logit_factors(made, params, tokens_1L, jnp.ones_like(tokens_1L))
  logits_1V = jnp.einsum('BLD,DV->BLV', x_1LD, head_DV)[:, length - 1]
  return decoding.sample(logits_1V, sampling, length[None])[0]


def padded(run, tokens):
  return np.pad(np.asarray(tokens, np.int32), (0, run.settings.model.seq_len - len(tokens)))[None]


def choice(run, tokens, W: int) -> int:
  """Returns the path of the token after these, r_i."""
  known, prefix = len(tokens) // W * W if W else 0, run.settings.routing.prefix_tokens
  if known and run.chooser is not None:
    rows = padded(run, tokens[:known])
    return int(chunk_router.choose(run.router.model, run.chooser, rows, np.ones_like(rows))[0, known - 1])
  return run.router.path(tokens[max(0, known - prefix) : known] if known else tokens[:prefix])


def generate_plainly(run, r: Request) -> tuple[list[int], list[int]]:
  """Returns tokens, prompt included, and paths. The path of its chunk reads the whole text for every token."""
  tokens, paths = list(r.tokens), []
  sampling = decoding.SamplingParams(
    *(np.asarray([x]) for x in (np.uint32(r.seed), np.float32(r.temperature), r.top_k, r.top_p))
  )
  for _ in range(r.max_tokens):
    if not paths or (r.reroute_every and len(tokens) % r.reroute_every == 0):
      number = r.path if r.path is not None else choice(run, tokens, r.reroute_every)
      paths += [number] if paths[-1:] != [number] else []
    path = run.path(paths[-1])
    token = int(next_token(path.model, path.params, padded(run, tokens), np.int32(len(tokens)), sampling))
    if r.until_eos and token == run.tokenizer.eos_id:
      break
    tokens.append(token)
  return tokens, paths


MIXED = (0, 1.0), (0.8, 0.7), (1, 1), (0.0, 1.0)  # temperature, top_p
PROMPTS = st.builds(
  lambda seed, length: tuple(np.random.default_rng(seed).integers(3, 330, length).tolist()),
  st.integers(0, 99),
  st.integers(1, 60),
)
REQUESTS = st.builds(
  Request, PROMPTS, max_tokens=st.integers(1, 30), path=st.none(), temperature=st.sampled_from([0.0, 0.8]),
  top_k=st.sampled_from([0, 5]), top_p=st.sampled_from([0.7, 1.0]), seed=st.integers(0, 9),
  until_eos=st.booleans(), reroute_every=st.sampled_from([0, 0, 1, 3, 16]),
)  # fmt: skip
# Sampled and most likely tokens are equal unless two logits or sums differ by no more than rounding.
QUIETLY = dict(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(max_examples=2, **QUIETLY)
@given(st.lists(REQUESTS, min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 3))
def test_texts_are_the_same_with_the_cache_as_without(run, requests, max_batch, max_paths):
  engine = Engine(run, max_paths, max_batch)
  for request, text in zip(requests, engine.generate(requests), strict=True):
    assert (text.tokens, text.paths) == generate_plainly(run, request)
    assert text.finished == ('length' if len(text.tokens) == text.end else 'stop')
  assert not engine.batches and len(engine.paths) <= max_paths


def test_other_tokens_than_the_prompts_may_choose_the_path(run):
  prompt, engine = (40, 41, 42), Engine(run)
  paths = {i: run.router.path((i, i + 1, i + 2)) for i in range(3, 300, 7)}
  others = [i for i, path in paths.items() if path != run.router.path(prompt)]
  [text] = engine.generate([Request(prompt, 2, routed_by=(others[0], others[0] + 1, others[0] + 2))])
  assert text.paths == [paths[others[0]]] and tuple(text.tokens[:3]) == prompt


def test_a_change_of_path_recomputes_only_what_differs(run):
  engine = Engine(run)
  request = Request(tuple(range(40, 60)), 60, temperature=0.9, until_eos=False, reroute_every=4)
  (text,) = engine.generate([request])
  assert len(set(text.paths)) > 1 and 0 < engine.recomputed < engine.recomputed_without_cache


@pytest.mark.slow
@pytest.mark.parametrize(
  'levels',
  [
    (('shared', 'embed|head', ()), ('low', 'block_0', ('a',)), ('high', 'block_[12]|final_norm', ('b',))),
    (('shared', 'block|head', ()), ('ends', 'embed', ('a',)), ('last', 'final_norm', ('b',))),
  ],
)
def test_levels_may_be_of_any_parameters(levels, tmp_path):
  run = trained_run.TrainedRun(made_run.write(tmp_path, made_run.settings(levels)))
  request = Request((5, 6, 8), 20, temperature=0.9, seed=1, until_eos=False, reroute_every=4)
  (text,) = Engine(run).generate([request])
  assert {path // 2 for path in text.paths} == {path % 2 for path in text.paths} == {0, 1}  # both axes' modules change
  assert (text.tokens, text.paths) == generate_plainly(run, request)


@pytest.mark.slow
def test_temperatures_may_differ_within_a_batch(run):
  ask = Request((5, 6, 7), 12, path=1, until_eos=False)
  requests = [dataclasses.replace(ask, seed=i, temperature=t, top_p=p) for i, (t, p) in enumerate(MIXED)]
  for request, text in zip(requests, Engine(run).generate(requests), strict=True):
    assert text.tokens == generate_plainly(run, request)[0]


def test_at_most_max_paths_are_kept(run):
  gc.freeze()  # leaves out objects older than the paths, to be quick
  engine = Engine(run, max_paths=1)
  for seed in range(4):
    engine.start(Request((5 + seed, 6, 7), 16, temperature=0.9, seed=seed, until_eos=False, reroute_every=8))
  kept = {number: weakref.ref(path) for number, path in engine.paths.items()}
  while engine.busy:
    engine.step()
    kept |= {number: weakref.ref(path) for number, path in engine.paths.items() if number not in kept}
    gc.collect()
    assert sum(ref() is not None for ref in kept.values()) <= 1
    kept = {number: ref for number, ref in kept.items() if ref() is not None}
  gc.unfreeze()


@pytest.mark.slow
def test_a_batch_gets_smaller_again(run):
  ask = Request((5, 6, 7), 80, path=1, until_eos=False)
  engine = Engine(run)
  texts = [engine.start(dataclasses.replace(ask, max_tokens=8, seed=seed)) for seed in range(7)]
  texts.append(engine.start(ask))
  engine.step()
  assert len(engine.batches[1].members) == 8
  for _ in range(3):
    engine.step()
  assert len(engine.batches[1].members) == 1
  while engine.busy:
    engine.step()
  assert [text.tokens for text in texts] == [generate_plainly(run, text.request)[0] for text in texts]


def test_a_named_path_generates_the_whole_text(run):
  request = Request((5, 6, 7), 10, path=2, until_eos=False)
  (text,) = Engine(run).generate([request])
  assert text.paths == [2] and text.tokens == generate_plainly(run, request)[0]


def test_a_cancelled_text_frees_its_slot_and_does_not_affect_others(run):
  ask = Request((5, 6, 7), 40, path=1, until_eos=False)
  others = [dataclasses.replace(ask, seed=seed) for seed in (1, 2)]
  engine = Engine(run, max_batch=2)
  doomed = engine.start(ask)
  texts = [engine.start(other) for other in others]
  for _ in range(3):
    engine.step()
  assert engine.waiting == [texts[1]]
  engine.cancel(doomed)
  while engine.busy:
    engine.step()
  assert doomed.finished == 'cancelled' and len(doomed.tokens) < doomed.end
  assert [text.tokens for text in texts] == [generate_plainly(run, other)[0] for other in others]


def test_every_path_gets_memory_in_turn(run):
  """New texts for the path in memory keep arriving, but the older text for another path gets its turn."""
  ask = Request((5, 6, 7), 20, path=1, until_eos=False)
  engine = Engine(run, max_paths=1, max_batch=2)
  engine.start(ask)
  engine.step()
  old = engine.start(dataclasses.replace(ask, path=2))
  for _ in range(20):
    engine.start(ask)
    engine.step()
  assert old.finished == 'length' and old.tokens == generate_plainly(run, old.request)[0]


def test_a_missing_module_ends_only_its_own_texts(tmp_path):
  workdir = made_run.write(tmp_path, made_run.settings())
  ask = Request((5, 6, 7), 20, path=1, until_eos=False)
  for module in (tmp_path / 'modules' / '2' / 'low').glob('1*'):
    module.unlink()  # that paths 2 and 3 need
  engine = Engine(trained_run.TrainedRun(workdir))
  texts = [engine.start(dataclasses.replace(ask, path=path)) for path in (0, 2, 1)]
  with pytest.raises(OSError):
    engine.generate([])
  while engine.busy:
    engine.step()
  assert [text.finished for text in texts] == ['length', 'error', 'length']
  assert not engine.waiting and [text.tokens for text in texts if text.paths != [2]] == [
    generate_plainly(engine.run, text.request)[0] for text in texts if text.paths != [2]
  ]


def test_a_failing_batch_ends_only_its_own_texts(run):
  ask = Request((5, 6, 7), 20, path=1, until_eos=False)
  engine = Engine(run)
  texts = [engine.start(dataclasses.replace(ask, path=path)) for path in (1, 2)]
  assert engine.admit() and engine.admit() and not engine.admit()
  engine.batches[1].state.token.delete()
  with pytest.raises(RuntimeError, match='deleted'):
    engine.generate([])
  while engine.busy:
    engine.step()
  assert [text.finished for text in texts] == ['error', 'length']


def test_without_a_router_a_path_has_to_be_named(tmp_path):
  s = made_run.settings(routing={'method': 'random'})
  engine = Engine(trained_run.TrainedRun(made_run.write(tmp_path, s)))
  (tmp_path / 'routing' / '0' / 'router.safetensors').unlink()
  with pytest.raises(ValueError, match='has no router: name a path'):
    engine.start(Request((5, 6, 7), 5))
  assert engine.generate([Request((5, 6, 7), 5, path=1)])[0].paths == [1]


def test_text_ends_before_a_stop_string(run):
  ask = Request((5, 6, 7), 60, path=1, until_eos=False)
  whole = Engine(run).generate([ask])[0].transcript.text
  stop = whole[len(whole) // 2 :][:3]
  (text,) = Engine(run).generate([dataclasses.replace(ask, stop=('not in it', stop))])
  assert text.finished == 'stop' and text.transcript.text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
  'change, message',
  [
    ({'path': 4}, 'the paths are 0 to 3'),
    ({'tokens': (330,)}, 'given are 330 to 330'),
    ({'tokens': (-1, 5)}, 'given are -1 to'),
    ({'tokens': (5, 2**70)}, 'given are 5 to 1180591620717411303424'),
  ],
)
def test_requests_for_paths_or_tokens_that_do_not_exist_are_rejected(run, change, message):
  with pytest.raises(ValueError, match=message):
    Engine(run).start(dataclasses.replace(Request((5, 6, 7), 20), **change))


def test_bucket_lengths_are_few_and_at_most_an_eighth_too_long():
  lengths = {bucket_length(length) for length in range(1, 1025)}
  assert len(lengths) == 32 and all(length <= bucket_length(length) for length in range(1, 1025))
  assert max(bucket_length(length) / length for length in range(128, 1025)) < 1.125
