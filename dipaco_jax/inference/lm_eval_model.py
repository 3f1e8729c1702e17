"""A run as a model of the LM Evaluation Harness: texts are scored and continued, each by one path.

    lm_eval.simple_evaluate(model='dipaco', model_args={'workdir': 'runs/tiny'}, tasks=[...])

after this file is imported. Each request's first tokens choose its path: those of the context, or where there is none
those of the answer, so that all answers to a question are scored by one path. `path` fixes it for all texts.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval.models  # registers the harness' own models: it does so itself only before any other is registered
import lm_eval.utils
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing
from dipaco_jax.inference.engine import Engine, bucket_length
from dipaco_jax.inference.request import Request
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.models import loss, transformer
from dipaco_jax.routing import chunk_losses

NEW_TOKENS = 256  # if a task does not say how many, as in the harness' own models


@register_model('dipaco')
class Dipaco(TemplateLM):
  """A run as lm_eval's model. Where the harness needs a token in front of a text it is bos, or else eos."""

  def __init__(
    self, workdir: str, path: int | Sequence[int] | None = None, version: int | None = None, batch_size=8, **others
  ):
    """Ignores the harness' `device` and the like. Raises InputError where there is no run, path, or needed router."""
    super().__init__()
    del others
    self.batch_size = int(batch_size)
    if self.batch_size < 1:
      raise InputError(f'batch_size={batch_size} should be 1 or more')
    self.run, self.version = TrainedRun(workdir), version
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
    return self.run.tokenizer.special_ids.get('bos', self.eot_token_id)

  @property
  def max_length(self) -> int:
    """The tokens in a row of training."""
    return self.run.settings.model.seq_len

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    tokens = self.run.tokenizer.encode(string, eos=False).tolist()
    return self._text_alone(tokens) if add_special_tokens is False else tokens

  def _text_alone(self, tokens: list[int]) -> list[int]:
    """Returns a text's tokens without the one that its tokenizer puts in front."""
    return tokens[1:] if tokens[:1] == [self.run.tokenizer.bos_id] else tokens

  def choose_path(self, tokens: Sequence[int]) -> int:
    """Returns the path of a text by its first tokens."""
    return self.run.router.path(tokens) if self.fixed_path is None else self.fixed_path

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
    """Returns (log p, whether greedy) of each continuation; a request is (texts, context ids, continuation ids)."""
    rows = []
    for (context, _), before, scored in requests:
      has_context = context and self._text_alone(before)  # which may be but spaces, that go to the continuation
      path = self.choose_path(before if has_context else self.tok_encode('') + scored)
      rows.append((path, before or [self.prefix_token_id], scored))
    found = [(-float(nll.sum()), bool(likeliest.all())) for nll, likeliest in self.score(rows)]
    for (texts, _, _), answer in zip(requests, found, strict=True):
      self.cache_hook.add_partial('loglikelihood', texts, answer)
    return found

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Returns log p of whole texts, which are scored window by window where they are too long for one."""
    rows, owners = [], []
    for i, request in enumerate(requests):
      tokens = self.tok_encode(request.args[0])
      alone = self._text_alone(tokens)  # the harness puts a token in front itself
      windows = lm_eval.utils.get_rolling_token_windows(alone, self.prefix_token_id, self.max_length, 1)
      for window in windows:
        rows.append((self.choose_path(tokens), *lm_eval.utils.make_disjoint_window(window)))
        owners.append(i)
    sums = np.zeros(len(requests))
    np.add.at(sums, owners, [-nll.sum() for nll, _ in self.score(rows)])
    for request, answer in zip(requests, sums.tolist(), strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', request.args, answer)
    return sums.tolist()

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Continues contexts; a context that leaves no room is cut at its beginning."""
    engine = Engine(self.run, max_batch=self.batch_size, version=self.version)
    texts = engine.generate([self.request(*request.args) for request in requests])
    for request, text in zip(requests, texts, strict=True):
      self.cache_hook.add_partial('generate_until', request.args, text.transcript.text)
    return [text.transcript.text for text in texts]

  def request(self, context: str, how: dict[str, Any]) -> Request:
    """Turns the harness' options into a request; greedy unless they ask for samples."""
    until, tokens = how.get('until') or [], self.tok_encode(context)
    tokens = tokens or [self.prefix_token_id]
    most = min(int(how.get('max_gen_toks', NEW_TOKENS)), self.max_length // 2)
    sampled = how.get('do_sample', float(how.get('temperature', 0)) > 0)
    temperature = float(how.get('temperature', 1)) if sampled else 0.0
    kinds = (('top_k', int, 0), ('top_p', float, 1), ('seed', int, 0))
    numbers: Any = {name: kind(how.get(name, usual)) for name, kind, usual in kinds}
    stop, prompt = (until,) if isinstance(until, str) else tuple(until), tuple(tokens[-(self.max_length - most) :])
    return Request(prompt, most, self.choose_path(tokens), temperature=temperature, stop=stop, **numbers)

  def score(self, rows: Sequence[tuple[int, list[int], list[int]]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (nats, whether it was the likeliest) of every scored token; rows are (path, ids before, ids scored).

    A row that is too long loses its beginning. Rows of a path and of about one length share a batch: few compilations.
    """
    texts = [np.asarray((before + scored)[-(self.max_length + 1) :]) for _, before, scored in rows]
    groups = collections.defaultdict(list)
    for i, (number, _, scored) in enumerate(rows):
      if len(scored) > self.max_length:
        raise InputError(f'{len(scored)} tokens to score at one time; rows of training had {self.max_length}')
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


@functools.partial(jax.jit, static_argnums=0)
def _scores(
  model: transformer.Transformer, params: transformer.Params, tokens_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns (nats, whether likeliest) of every token but the first, [B, L - 1] each."""
  read_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
  x_BLD, head_DV = transformer.logit_factors(model, params, read_BL, jnp.ones_like(read_BL))
  x_ND = x_BLD.reshape(-1, x_BLD.shape[-1])
  found = loss.token_scores(x_ND, head_DV, targets_BL.reshape(-1), model.config.loss_chunk)
  return jax.tree.map(lambda x_N: x_N.reshape(targets_BL.shape), found)
