"""The learned chooser: which path is best for what follows, at every token [2.4.3, 7.2.2]. Pure.

A transformer fine-tuned from the base language model, with a head of P classes on the normed hidden state:

    T[n, j] = argmin_p sum_{k = j}^{j + H - 1} nll[n, p, k]       loss = -mean_{n, j} log softmax(x[n, j] head)[T[n, j]]

with nll[n, p, k] the nats of token k + 1 under path p, so that T is the paper's argmax_p of summed log-likelihoods S,
with nll = -S: the label of token j depends on the H tokens after it, and the chooser's input is the tokens up to it. A
token without finite losses has the label NONE and no part in training. The paper's W' is H; H to the end of the
sequence works about as well as H = W, and serves every W.

Parameters are the base model's, without the language model's head, and `chooser/kernel` [D, P].

Dimensions: N sequences, B batch, L length, D width, P paths.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.algorithm import inner
from dipaco_jax.config import choices, settings
from dipaco_jax.models import loss as loss_lib
from dipaco_jax.models.transformer import Params, Transformer as Model, variables
from dipaco_jax.routing import chunk_policies
from dipaco_jax.routing.path_labels import NONE

KERNEL = 'chooser/kernel'
Rows = jax.Array | np.ndarray  # [B, L] integers


def init_params(base: Mapping[str, Any], num_paths: int) -> Params:
  """Returns the chooser's parameters before training: the base model's, and a head of zeros (uniform over paths)."""
  width = base['final_norm/scale'].shape[0]
  kept = {name: jnp.asarray(x) for name, x in base.items() if name != 'head/kernel'}
  return dict(sorted((kept | {KERNEL: jnp.zeros((width, num_paths), jnp.float32)}).items()))


def labels(nll: Sequence[np.ndarray], horizon: int = 0) -> np.ndarray:
  """Returns T, the best path for the tokens after each token, ties to the lower: int32 [N, L].

  A path with a loss among these that is not finite is never the best; NONE if that is so for all paths.

  Args:
    nll: nats of every target inside a sequence, including the prefix; P arrays [N, L] that may be memory maps.
    horizon: H, the targets that decide a label; 0 for all to the sequence's end.
  """
  L = nll[0].shape[1]
  found_NL = np.zeros(nll[0].shape, np.int32)
  ends_L = np.minimum(np.arange(L) + (horizon or L), L)
  for rows, nll_BPL in chunk_policies.blocks(nll):
    failed_BPL = np.isinf(nll_BPL)
    nats_BPL = _following(np.where(failed_BPL, 0, nll_BPL), ends_L, np.float64)
    nats_BPL[_following(failed_BPL, ends_L, np.int32) > 0] = np.inf
    found_NL[rows] = np.where(nats_BPL.min(axis=1) < np.inf, nats_BPL.argmin(axis=1), NONE)
  return found_NL


def _following(x_BPL: np.ndarray, ends_L: np.ndarray, dtype: type) -> np.ndarray:
  """Returns the sums over targets from each index up to its end, exclusive."""
  upto_BPL = np.pad(x_BPL.cumsum(axis=-1, dtype=dtype), ((0, 0), (0, 0), (1, 0)))
  return upto_BPL[..., ends_L] - upto_BPL[..., :-1]


def logits(model: Model, params: Params, tokens_BL: Rows, segments_BL: Rows) -> jax.Array:
  """Returns the logits of the best path for the tokens after each token, float32 [B, L, P]."""
  trunk = variables({name: x for name, x in params.items() if name != KERNEL})
  x_BLD: Any = model.apply(trunk, tokens_BL, segments_BL, method=lambda m, *rows: m.final_norm(m(*rows)))
  return jnp.einsum('BLD,DP->BLP', x_BLD, params[KERNEL].astype(x_BLD.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames='model')
def choose(model: Model, params: Params, tokens_BL: Rows, segments_BL: Rows) -> jax.Array:
  """Returns the preferred path for the tokens after each token, ties to the lower: int32 [B, L]."""
  return logits(model, params, tokens_BL, segments_BL).argmax(axis=-1).astype(jnp.int32)


def loss(
  model: Model, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array, labels_BL: jax.Array
) -> tuple[Any, Any]:
  """Returns (summed cross-entropy in nats, number of tokens that have a label and a next token in their sequence)."""
  followed_BL = loss_lib.targets(tokens_BL, segments_BL, 0)[1] * (labels_BL != NONE)
  log_p_BLP = jax.nn.log_softmax(logits(model, params, tokens_BL, segments_BL))
  nats_BL = -jnp.take_along_axis(log_p_BLP, labels_BL[..., None], axis=-1)[..., 0]
  return jnp.sum(nats_BL * followed_BL), followed_BL.sum()


def of_chooser(config: settings.Inner) -> settings.Inner:
  """Returns the settings of the chooser's optimizer: those of paths, AdamW's at least; no warm-up, nothing frozen."""
  optimizer = 'sgd' if config.optimizer == 'sgd' else 'adamw'
  return dataclasses.replace(config, optimizer=optimizer, schedule='cosine', warmup_steps=0, rewarm_steps=0, frozen='')


def train(
  model: Model, params: Params, batch: Callable[[int], tuple[Rows, Rows, Rows]], num_steps: int, config: settings.Inner
) -> tuple[Params, np.ndarray]:
  """Trains the chooser with AdamW, as a path's inner steps but without warm-up; the cosine ends with the last step.

  Equal arguments give equal bits, so that a run that was stopped can train again from the start.

  Args:
    model: the base model.
    params: initial parameters, see `init_params`; not donated.
    batch: maps a step to tokens, segment ids and labels, on the host or laid out over devices.
    num_steps: about 2,000 in the paper.
    config: AdamW's settings, see `of_chooser`.

  Returns:
    The parameters, and the mean loss before each step in nats, [num_steps].
  """
  optimizer = choices.make_inner(of_chooser(config), num_steps, 0, 0.0)
  compute = functools.partial(inner.gradient, functools.partial(loss, model), 0)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Params, state: inner.InnerState, batch: tuple[Rows, Rows, Rows], i: jax.Array) -> inner.Stepped:
    return inner.step(optimizer, compute, params, state, batch, i)

  params = jax.tree.map(jnp.copy, params)
  state = optimizer.init(params)
  losses: list[jax.Array] = []
  for i in range(num_steps):
    params, state, metrics = step(params, state, batch(i), jnp.int32(i))
    losses.append(metrics['loss'])
    jax.block_until_ready(losses[-2:][0])  # wait for the step before, so that batches do not pile up on the device
  return params, np.array(losses)
