"""A run as a model of the LM Evaluation Harness: texts are scored and continued, each by one path.

    lm_eval.simple_evaluate(model='dipaco', model_args={'workdir': 'runs/tiny'}, tasks=[...])

after this file is imported. Each request's first tokens choose its path: those of the context, or where there is none
those of the answer, so that all answers to a question are scored by one path. `path` fixes it for all texts.

Texts begin with a begin-of-text token only if those of training did. If the first token of a text is scored and
training put none in front, it is predicted from the end-of-text token, as in the harness' own models.
"""

import collections
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval.models  # noqa: F401  # registers the harness' own models, which it does only before any other
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing
from dipaco_jax.data.tokenizer import replace_surrogates
from dipaco_jax.inference.batch import Text
from dipaco_jax.inference.engine import Engine, bucket_length
from dipaco_jax.inference.request import Request
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.models import loss, transformer
from dipaco_jax.routing import chunk_losses

Row = tuple[int, list[int], list[int]]  # path, ids before, ids that are scored
NEW_TOKENS = 256  # if a task does not say how many, as in the harness' own models


@register_model('dipaco')
class Dipaco(TemplateLM):
  """A run as lm_eval's model."""

  def __init__(
    self, workdir: str, path: int | Sequence[int] | None = None, version: int | None = None, batch_size=8,
    trust_modules: str | Sequence[str] = (), **others,
  ):  # fmt: skip
    """`trust_modules` are as for dipaco_jax.load; in lm_eval's --model_args, names with plus signs between them.

    Ignores the harness' `device` and the like. Raises InputError if there is no run, path, or needed router."""
    super().__init__()
    del others
    names = trust_modules.replace('+', ',') if isinstance(trust_modules, str) else trust_modules
    self.batch_size = int(batch_size)
    if self.batch_size < 1:
      raise InputError(f'batch_size={batch_size} should be 1 or more')
    self.run, self.version = TrainedRun(workdir, names), version
    self.fixed_path = None if path is None else self.run.number(path)
    if self.fixed_path is None and self.run.layout.grid.num_paths == 1:
      self.fixed_path = 0
    if self.fixed_path is None:
      self.run.router  # noqa: B018  # raises where there is none

  @property
  def tokenizer_name(self) -> str:
    """The name under which the harness caches rendered prompts."""
    return self.run.files.storage.url

  @property
  def eot_token_id(self) -> int:
    return self.run.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The token that predicts the first token of a text: bos if training had it in front, otherwise eos."""
    bos_id = self.run.tokenizer.bos_id
    return bos_id if bos_id >= 0 else self.eot_token_id

  @property
  def max_length(self) -> int:
    """The tokens in a row of training."""
    return self.run.settings.model.seq_len

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    tokens = self.run.tokenizer.encode(replace_surrogates(string), eos=False).tolist()
    return self._text_alone(tokens) if add_special_tokens is False else tokens

  def _text_alone(self, tokens: list[int]) -> list[int]:
    """Returns a text's tokens without the one that its tokenizer puts in front."""
    return tokens[1:] if tokens[:1] == [self.run.tokenizer.bos_id] else tokens

  def choose_path(self, tokens: Sequence[int]) -> int:
    """Returns the path of a text by its first tokens."""
    return self.run.router.path(tokens) if self.fixed_path is None else self.fixed_path

  def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """Returns (log p, whether greedy) of each continuation; see `split_answer` for the tokens that are scored."""
    rows = []
    for request in requests:
      context = request.args[0].rstrip()
      before, scored = self.split_answer(*request.args)
      alone = self.tok_encode(context)
      beginning = alone if self._text_alone(alone) else before + scored
      rows.append((self.choose_path(beginning), before or [self.prefix_token_id], scored))
    answers = self._score_answers(rows)
    for request, answer in zip(requests, answers, strict=True):
      self.cache_hook.add_partial('loglikelihood', request.args, answer)
    return answers

  def split_answer(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Returns the tokens before, perhaps none, and those that are scored: one at least.

    Both texts are encoded together. What is scored begins with the first token that the context alone does not have:
    a token that reaches from the context into the continuation is scored. Spaces at the end of the context belong to
    the continuation. A continuation that adds no token is scored as the end of the text.
    """
    all_tokens, alone = self.tok_encode(context + continuation), self.tok_encode(context.rstrip())
    num_shared = len(os.path.commonprefix([all_tokens, alone]))  # noqa: RUF071  # of lists
    return all_tokens[:num_shared], all_tokens[num_shared:] or [self.eot_token_id]

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
    """Returns (log p, whether greedy) of each continuation; a request is (texts, context ids, continuation ids)."""
    return self._score_answers(
      [(self.choose_path(before or scored), before or [self.prefix_token_id], scored) for _, before, scored in requests]
    )

  def _score_answers(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
    return [(0.0 - float(nll.sum()), bool(likeliest.all())) for nll, likeliest in self.score(rows)]

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Returns log p of whole texts."""
    rows = []
    for request in requests:
      tokens = self.tok_encode(request.args[0])
      scored = self._text_alone(tokens)
      rows.append((self.choose_path(tokens) if scored else 0, [self.prefix_token_id], scored))
    answers = [total for total, _ in self._score_answers(rows)]
    for request, answer in zip(requests, answers, strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', request.args, answer)
    return answers

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Continues contexts; if one leaves no room for its answer, it is cut at its beginning, to half a row at most.

    A request that fails is logged and gets an empty text.
    """
    engine = Engine(self.run, max_batch=self.batch_size, version=self.version)
    texts: list[Text | None] = []
    for i, (context, options) in enumerate(request.args for request in requests):
      try:
        texts.append(engine.start(self.request(context, options, i)) if _max_tokens(options) > 0 else None)
      except InputError as e:
        logging.warning('a request of the harness gets an empty answer: %s', e)
        texts.append(None)
    while engine.busy:
      engine.step()
    answers = [text.transcript.text if text else '' for text in texts]
    for request, answer in zip(requests, answers, strict=True):
      self.cache_hook.add_partial('generate_until', request.args, answer)
    return answers

  def request(self, context: str, how: dict[str, Any], index: int = 0) -> Request:
    """Turns the harness' options into a request; greedy unless they ask for samples, which differ by `index`."""
    options = {name: value for name, value in how.items() if value is not None}
    tokens = self.tok_encode(context) or [self.prefix_token_id]
    most = min(_max_tokens(options), max(self.max_length - len(tokens), self.max_length // 2))
    sampled = options.get('do_sample', float(options.get('temperature', 0)) > 0)
    temperature = float(options.get('temperature', 1)) if sampled else 0.0
    seed = (int(options.get('seed', 0)) + index) % 2**32
    kinds = (('top_k', int, 0), ('top_p', float, 1))
    numbers: Any = {name: kind(options.get(name, usual)) for name, kind, usual in kinds}
    until = options.get('until', [])
    stop = (until,) if isinstance(until, str) else tuple(until)
    prompt = tuple(tokens[-(self.max_length - most) :])
    return Request(prompt, most, self.choose_path(tokens), temperature=temperature, seed=seed, stop=stop, **numbers)

  def score(self, rows: Sequence[Row]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (nats, whether it was the likeliest) of every scored token of each row.

    Each row has a token before them. Tokens that do not fit into a row of training are scored in windows, each after as
    many tokens as there is room for.
    """
    windows = [(i, window) for i, row in enumerate(rows) for window in self._windows(row)]
    parts = [[(np.zeros(0), np.zeros(0, bool))] for _ in rows]
    for (i, _), scores in zip(windows, self._score_windows([window for _, window in windows]), strict=True):
      parts[i].append(scores)
    return [(np.concatenate([nll for nll, _ in part]), np.concatenate([best for _, best in part])) for part in parts]

  def _windows(self, row: Row) -> Iterator[Row]:
    path, before, scored = row
    for start in range(0, len(scored), self.max_length):
      window = scored[start : start + self.max_length]
      yield path, (before + scored[:start])[-(self.max_length + 1 - len(window)) :], window

  def _score_windows(self, rows: Sequence[Row]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores rows that are short enough. Those of a path and of about one length share a batch: few compilations."""
    texts = [np.asarray(before + scored) for _, before, scored in rows]
    groups = collections.defaultdict(list)
    for i, (number, _, _) in enumerate(rows):
      groups[number, min(bucket_length(len(texts[i]) - 1), self.max_length)].append(i)
    answers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for (number, length), members in sorted(groups.items()):
      path = self.run.path(number, self.version)
      tokens_NL, _ = packing.pad([texts[i] for i in members], length + 1)
      score_batch = functools.partial(_scores, path.model, path.params)
      nll_NL, likeliest_NL = chunk_losses.in_batches(score_batch, self.batch_size, tokens_NL)
      for i, nll_L, likeliest_L in zip(members, nll_NL, likeliest_NL, strict=True):
        end = len(texts[i]) - 1
        scored_tokens = slice(end - len(rows[i][2]), end)
        answers[i] = nll_L[scored_tokens].astype(np.float64), likeliest_L[scored_tokens]
    return [answers[i] for i in range(len(rows))]


def _max_tokens(options: dict[str, Any]) -> int:
  """Returns how many tokens the harness asks for, under the names that its tasks use."""
  names = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
  return int(next((options[name] for name in names if options.get(name) is not None), NEW_TOKENS))


@functools.partial(jax.jit, static_argnums=0)
def _scores(
  model: transformer.Transformer, params: transformer.Params, tokens_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns (nats, whether likeliest) of every token but the first, [B, L - 1] each."""
  read_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
  x_BLD, head_DV = transformer.logit_factors(model, params, read_BL, jnp.ones_like(read_BL))
  x_ND = x_BLD.reshape(-1, x_BLD.shape[-1])
  scores = loss.token_scores(x_ND, head_DV, targets_BL.reshape(-1), model.config.loss_chunk)
  return jax.tree.map(lambda x_N: x_N.reshape(targets_BL.shape), scores)
