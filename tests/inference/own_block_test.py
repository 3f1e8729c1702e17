"""Texts that grow in batches, with caches of the user's blocks, against the whole text at every token."""

import made_run
import numpy as np
import own_modules
import pytest
import slow

from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.inference.trained_run import TrainedRun


@pytest.fixture(params=slow.but(['my_block', 'recurrent'], 'recurrent'))
def run(request, tmp_path, monkeypatch):
  source = own_modules.RECURRENT if request.param == 'recurrent' else own_modules.examples()['my_block.py']
  name = own_modules.write(tmp_path, monkeypatch, source)
  return TrainedRun(made_run.write(tmp_path / 'run', made_run.settings(model={'block': f'{name}:make'})))


def plainly(run, r: Request) -> list[int]:
  """The likeliest tokens, each from the whole text, by the path that its chunk has."""
  tokens, prefix, path = list(r.tokens), run.settings.routing.prefix_tokens, None
  for _ in range(r.max_tokens):
    known = len(tokens) // r.reroute_every * r.reroute_every if r.reroute_every else 0
    if path is None or (r.reroute_every and len(tokens) == known):
      seen = tokens[max(0, known - prefix) : known] if known else tokens[:prefix]
      path = run.path(run.router.path(seen) if r.path is None else r.path)
    tokens.append(int(np.argmax(path.logits(tokens)[-1])))
  return tokens


@pytest.mark.slow
def test_texts_grow_as_without_a_cache(run):
  rng = np.random.default_rng(0)
  prompts = [tuple(map(int, rng.integers(10, 300, n))) for n in (3, 17, 9)]
  asked = [Request(p, 12, path=i % 2, temperature=0.0, until_eos=False) for i, p in enumerate(prompts)]
  asked += [Request(p, 12, temperature=0.0, until_eos=False, reroute_every=8) for p in prompts]
  for text, request in zip(Engine(run).generate(asked), asked, strict=True):
    assert text.tokens == plainly(run, request)
