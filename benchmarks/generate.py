"""What using a path costs: loading it, its first token, each token behind it, a change of path.

    pip install -e '.[benchmarks,hf]'
    python benchmarks/generate.py [--width=896 --num_layers=12 ...]

On a run of two paths with random parameters, that share the lower half of their blocks:

    bytes               read by a load, over the bytes of the path's parameters
    first_token         from a request to its first token, over a bare forward pass of the prompt to its last logits;
                        the path is named, or routed (the base reads the first 32 tokens)
    token               one text at a time, over `generate` of transformers on the same weights, where it is installed
    change              of a text's path, over reading the text anew, beside the share of blocks that differ

Prints a table and, as the last line, one JSON object. Both sides take turns, after one that is not counted; medians.
"""

import functools
import importlib.util
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dipaco_jax.huggingface import model_folder
from dipaco_jax.inference import trained_run
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.models import transformer

common.define_sizes(width=896, num_layers=12, num_heads=16, mlp_dim=2432, vocab_size=8192, seq_len=1024, batch_size=1)
PROMPTS = flags.DEFINE_multi_integer('prompt', [100, 300, 700], 'tokens of a prompt')
TOKENS = flags.DEFINE_integer('tokens', 64, 'that are added to a prompt, where tokens are timed')
REPEATS = flags.DEFINE_integer('repeats', 5, 'of which medians are reported')


def in_turns(*actions: Callable[[], Any]) -> list[float]:
  """Median seconds of each, after one that is not counted."""
  for action in actions:
    jax.block_until_ready(action())
  return common.in_turns(actions, REPEATS.value)


def prompt(length: int) -> tuple[int, ...]:
  return tuple(np.random.default_rng(length).integers(3, flags.FLAGS.vocab_size, length).tolist())


@functools.partial(jax.jit, static_argnums=0)
def forward(made: transformer.Transformer, params: transformer.Params, tokens_1L):
  """A bare one: the logits behind the last token."""
  x_1LD, head_DV = transformer.logit_factors(made, params, tokens_1L, jnp.ones_like(tokens_1L))
  return x_1LD[:, -1] @ head_DV


def first_tokens(run: trained_run.TrainedRun, length: int) -> dict[str, float]:
  path, engine = run.path(1), Engine(run)
  tokens_1L = np.array([prompt(length)], np.int32)

  def first(number: int | None):
    (text,) = engine.generate([Request(prompt(length), 1, number, temperature=0.0, until_eos=False)])
    return len(text.tokens)

  bare, named, routed = in_turns(
    lambda: forward(path.model, path.params, tokens_1L), lambda: first(1), lambda: first(None)
  )
  return {'forward_s': bare, 'first_token_ratio': named / bare, 'routed_first_token_ratio': routed / bare}


def tokens_of_transformers(folder: pathlib.Path) -> Callable[[int, int], Any] | None:
  """`generate(length, num_tokens)` of the exported path; None where transformers is not installed."""
  if not (importlib.util.find_spec('transformers') and importlib.util.find_spec('torch')):
    return None
  import torch
  import transformers

  loaded = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

  def generate(length: int, num_tokens: int):
    with torch.inference_mode():
      loaded.generate(
        torch.tensor([prompt(length)]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
      )

  return generate


def per_token(run: trained_run.TrainedRun, length: int, theirs) -> dict[str, float]:
  """Seconds of a token: those of many less that of the first one."""
  engine = Engine(run)

  def ours(num_tokens: int):
    engine.generate([Request(prompt(length), num_tokens, 1, temperature=0.0, until_eos=False)])

  one, many = 1, 1 + TOKENS.value
  actions = [lambda: ours(one), lambda: ours(many)]
  if theirs:
    actions += [lambda: theirs(length, one), lambda: theirs(length, many)]
  found = in_turns(*actions)
  seconds = [(b - a) / TOKENS.value for a, b in zip(found[::2], found[1::2], strict=True)]
  return {'token_s': seconds[0]} | ({'token_ratio': seconds[0] / seconds[1]} if theirs else {})


def change(run: trained_run.TrainedRun, length: int) -> dict[str, float]:
  """A text of path 0 that becomes one of path 1, beside reading all of it under path 1."""
  engine, (old, new) = Engine(run), (run.path(number) for number in (0, 1))
  text = engine.start(Request(prompt(length), 8, 0, temperature=0.0, until_eos=False))
  row = engine.prefill(text, old)
  text.tokens.append(3)  # the newest token is not in the cache
  moved, read = in_turns(lambda: engine.change_path(text, row, old.marks, new), lambda: engine.prefill(text, new))
  N = flags.FLAGS.num_layers
  return {'change_ratio': moved / read, 'blocks_that_differ': (N - old.first_difference(new.marks)) / N}


def measure(run: trained_run.TrainedRun, theirs) -> dict[str, Any]:
  before = run.files.storage.bytes_in
  path = run.path(1)
  size = sum(x.nbytes for x in path.params.values())
  result: dict[str, Any] = {'parameters': size // 4, 'bytes_ratio': (run.files.storage.bytes_in - before) / size}
  for length in PROMPTS.value:
    figures = first_tokens(run, length) | per_token(run, length, theirs) | change(run, length)
    result |= {f'{name}_{length}': value for name, value in figures.items()}
  return result


def main(argv):
  del argv
  half = flags.FLAGS.num_layers // 2
  upper = '|'.join(f'block_{n}/' for n in range(half, flags.FLAGS.num_layers))
  s = common.make_settings({'a': 2}, (('shared', rf'^(?!{upper})', ()), ('upper', rf'^({upper})', ('a',))))
  with tempfile.TemporaryDirectory() as folder:
    common.write_run(pathlib.Path(folder), s)
    run, exported = trained_run.TrainedRun(folder), pathlib.Path(folder) / 'exported'
    exported.mkdir()
    params = {name: np.asarray(x) for name, x in run.path(1).params.items()}
    for name, data in model_folder.make_files(params, s.model, run.tokenizer, 'float32', None).items():
      (exported / name).write_bytes(data)
    common.report('using one of two paths', measure(run, tokens_of_transformers(exported)))


if __name__ == '__main__':
  app.run(main)
