"""A run as a model of the LM Evaluation Harness: texts are scored and continued, each by one path.

    lm_eval.simple_evaluate(model='dipaco', model_args={'workdir': 'runs/tiny'}, tasks=[...])

once this file is imported. A request's first tokens choose its path, those of the context before those of what is
scored, so that all answers to a question are scored by one path; or `path` is the one for all.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval.models  # the harness' own, which it names only where no other is there before them
import lm_eval.utils
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from dipaco_jax.core.errors import InputError
from dipaco_jax.inference import generation, trained_run
from dipaco_jax.inference.request import Request
from dipaco_jax.models import loss
from dipaco_jax.models import transformer as model_lib

NEW_TOKENS = 256  # where a task does not say how many, as in the harness' own models


@register_model('dipaco')
class Dipaco(TemplateLM):
  """See above. No token goes before a text: where the harness wants one, the tokenizer's first special one serves."""

  def __init__(
    self,
    workdir: str,
    path: int | Sequence[int] | None = None,
    version: int | None = None,
    batch_size: int | str = 8,
    **others: Any,
  ):
    """Takes `device` and the like from the harness, and ignores them: JAX chooses the device.

    Raises:
      InputError: there is no run, path or version; or no router, and `path` is not given.
    """
    super().__init__()
    del others
    self.batch_size = int(batch_size)
    if self.batch_size < 1:
      raise InputError(f'batch_size={batch_size} should be 1 or more')
    self.run, self.version = trained_run.Trained(workdir), version
    self.only = None if path is None else self.run.number(path)
    if self.only is None and self.run.layout.grid.num_paths == 1:
      self.only = 0
    if self.only is None:
      self.run.router  # noqa: B018  # that there is one

  @property
  def tokenizer_name(self) -> str:
    return self.run.storage.url

  @property
  def eot_token_id(self) -> int:
    return self.run.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    return self.run.tokenizer.special_ids.get('bos', self.eot_token_id)

  @property
  def max_length(self) -> int:
    """Tokens of a row of training."""
    return self.run.settings.model.seq_len

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    return self.run.tokenizer.encode(string, eos=False).tolist()

  def path_of(self, tokens: Sequence[int]) -> int:
    """Whose text begins so."""
    return self.run.router.path(tokens) if self.only is None else self.only

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
    """Of (texts, ids of the context, ids of the continuation)."""
    rows = []
    for (context, _), before, scored in requests:
      path = self.path_of(before if context and before else scored)
      rows.append((path, before or [self.prefix_token_id], scored))
    found = [(-float(nll.sum()), bool(likeliest.all())) for nll, likeliest in self.score(rows)]
    for (texts, _, _), answer in zip(requests, found, strict=True):
      self.cache_hook.add_partial('loglikelihood', texts, answer)
    return found

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    rows, owners = [], []
    for i, request in enumerate(requests):
      tokens = self.tok_encode(request.args[0])
      windows = lm_eval.utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
      for window in windows:
        rows.append((self.path_of(tokens), *lm_eval.utils.make_disjoint_window(window)))
        owners.append(i)
    sums = np.zeros(len(requests))
    np.add.at(sums, owners, [-nll.sum() for nll, _ in self.score(rows)])
    for request, answer in zip(requests, sums.tolist(), strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', request.args, answer)
    return sums.tolist()

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """By the engine that `generate` has; contexts that leave no room lose their beginning."""
    engine = generation.Engine(self.run, max_batch=self.batch_size, version=self.version)
    texts = engine.generate([self.request(*request.args) for request in requests])
    for request, text in zip(requests, texts, strict=True):
      self.cache_hook.add_partial('generate_until', request.args, text.transcript.text)
    return [text.transcript.text for text in texts]

  def request(self, context: str, how: dict[str, Any]) -> Request:
    """What the harness' words mean; greedy unless they ask for samples."""
    until, tokens = how.get('until') or [], self.tok_encode(context)
    tokens = tokens or [self.prefix_token_id]
    most = min(int(how.get('max_gen_toks', NEW_TOKENS)), self.max_length // 2)
    sampled = how.get('do_sample', float(how.get('temperature', 0)) > 0)
    return Request(
      tuple(tokens[-(self.max_length - most) :]), most, self.path_of(tokens),
      float(how.get('temperature', 1)) if sampled else 0.0, int(how.get('top_k', 0)), float(how.get('top_p', 1)),
      int(how.get('seed', 0)), (until,) if isinstance(until, str) else tuple(until),
    )  # fmt: skip

  def score(self, rows: Sequence[tuple[int, list[int], list[int]]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Nats of every token of what is scored, and whether none was likelier, of (path, ids before, ids scored).

    What is too long loses its beginning. Rows of a path and of about one length go together: compilations are few.
    """
    groups = collections.defaultdict(list)
    for i, (path, before, scored) in enumerate(rows):
      if len(scored) > self.max_length:
        raise InputError(f'{len(scored)} tokens to score at one time; rows of training had {self.max_length}')
      length = min(len(before) + len(scored) - 1, self.max_length)
      groups[path, min(generation.bucket(length), self.max_length)].append(i)
    answers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for path, length in sorted(groups):
      members, loaded = groups[path, length], self.run.path(path, self.version)
      for start in range(0, len(members), self.batch_size):
        answers |= self._batch(loaded, rows, members[start : start + self.batch_size], length)
    return [answers[i] for i in range(len(rows))]

  def _batch(self, path: trained_run.Path, rows, members: list[int], length: int):
    """Of the rows `members`, {member: (nats, whether likeliest)}."""
    tokens_BL = np.zeros((self.batch_size, length + 1), np.int32)
    ends = []
    for row, i in zip(tokens_BL, members, strict=False):
      whole = (rows[i][1] + rows[i][2])[-(self.max_length + 1) :]
      row[: len(whole)] = whole
      ends.append(len(whole) - 1)
    nll_BL, likeliest_BL = map(np.asarray, _scores(path.model, path.params, tokens_BL))
    starts = [end - len(rows[i][2]) for i, end in zip(members, ends, strict=True)]
    return {
      i: (nll_L[start:end].astype(np.float64), likeliest_L[start:end])
      for i, nll_L, likeliest_L, start, end in zip(members, nll_BL, likeliest_BL, starts, ends, strict=False)
    }


@functools.partial(jax.jit, static_argnums=0)
def _scores(made: model_lib.Transformer, params: model_lib.Params, tokens_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(nats, whether likeliest) of every token but the first, [B, L - 1] each."""
  read_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
  x_BLD, head_DV = model_lib.normed_and_head(made, params, read_BL, jnp.ones_like(read_BL))
  x_ND = x_BLD.reshape(-1, x_BLD.shape[-1])
  found = loss.token_scores(x_ND, head_DV, targets_BL.reshape(-1), made.config.loss_chunk)
  return jax.tree.map(lambda x_N: x_N.reshape(targets_BL.shape), found)
