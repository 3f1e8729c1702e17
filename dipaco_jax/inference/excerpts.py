"""Excerpts of any text: which path reads what, and what that gains on the base model; `inspect` shows them."""

from typing import Any

import jax

from dipaco_jax.core.errors import InputError
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import excerpt_choice
from dipaco_jax.pipeline.excerpt_choice import Reader, Text
from dipaco_jax.routing import chunk_losses


def of_text(run: TrainedRun, text: str, W: int, path: int | None, version: int | None) -> chunk_losses.Excerpts:
  """Reads any text, cut into sequences as training text is, each routed by its own first tokens, in chunks of W tokens.

  A `path` that is not None reads all of it; version None is the one that early stopping chose. Raises InputError where
  the text is empty; there is no such path or version; or there is no router, and no path is given.
  """
  if not text:
    raise InputError('the text is empty: give some text')
  if path is None and run.layout.grid.num_paths == 1:
    path = 0
  _ = run.best_versions  # raises if there are no paths yet
  base: Any = run.router.base if path is None else jax.device_put(run.base)
  model = transformer.make_model(run.settings.model, len(base['embed/tokens']))
  fitted, chooser = (run.router.fitted, run.chooser) if path is None else (None, None)
  prefix = run.settings.routing.prefix_tokens
  reader = Reader(model, base, lambda path: run.path(path, version).params, fitted, chooser, run.tokenizer, prefix)
  longest = run.settings.model.seq_len
  tokens = reader.tokenizer.encode(text, eos=False)
  if not len(tokens):
    raise InputError('the text has no tokens: give some text')
  name = 'from token {}' if len(tokens) > longest else ''
  texts = [Text(name.format(i), tokens[i : i + longest], i > 0, len(tokens)) for i in range(0, len(tokens), longest)]
  needed = max(min(len(tokens), longest), reader.prefix_tokens)
  length = min(longest, -(-needed // excerpt_choice.LENGTH_STEP) * excerpt_choice.LENGTH_STEP)
  return excerpt_choice.read(reader, texts, W, length, None if path is None else [path] * len(texts))
