"""Cross-entropy in chunks of tokens, so that the [B, L, V] logits never exist; and which targets count [2.4].

Only targets after a sequence's first `prefix_tokens` (the paper: 32) count, for every method: the prefix is for the
router.
"""

import functools

import jax
import jax.numpy as jnp

from dipaco_jax.core.grid import largest_divisor
from dipaco_jax.models import transformer
from dipaco_jax.models.products import into_float32, transposed_product
from dipaco_jax.models.transformer import Params, Transformer


def targets(tokens_BL: jax.Array, segments_BL: jax.Array, prefix_tokens: int) -> tuple[jax.Array, jax.Array]:
  """Returns the next token of each token, [B, L], and whether it counts, float32 [B, L].

  It counts if it is in the same segment, is no padding, and is at position `prefix_tokens` or later of its sequence.
  """
  follow_BL, next_segment_BL = (jnp.pad(x_BL, ((0, 0), (0, 1)))[:, 1:] for x_BL in (tokens_BL, segments_BL))
  late_BL = transformer.positions(segments_BL) + 1 >= prefix_tokens
  counts_BL = (next_segment_BL == segments_BL) & (segments_BL > 0) & late_BL
  return follow_BL, counts_BL.astype(jnp.float32)


def into_chunks(x: jax.Array, chunk: int) -> jax.Array:
  """Reshapes [N, ...] to [N / c, c, ...], c being the largest divisor of N that is at most `chunk`."""
  return x.reshape(-1, largest_divisor(x.shape[0], chunk), *x.shape[1:])


def _chunk_nll(x_CD: jax.Array, head_DV: jax.Array, targets_C: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  logits_CV = into_float32('CD,DV->CV', x_CD, head_DV)
  log_z_C = jax.nn.logsumexp(logits_CV, axis=-1)
  return log_z_C - jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0], logits_CV, log_z_C


def token_nll(x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, chunk: int) -> jax.Array:
  """Returns -log p(target) of every token, float32 nats [N]."""
  pieces = into_chunks(x_ND, chunk), into_chunks(targets_N, chunk)
  return jax.lax.map(lambda xt: _chunk_nll(xt[0], head_DV, xt[1])[0], pieces).reshape(-1)


def token_scores(x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
  """Returns -log p(target) of every token, float32 nats [N], and whether it is the argmax, bool [N].

  Ties go to the lower id.
  """

  def one(xt: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    nll_C, logits_CV, _ = _chunk_nll(xt[0], head_DV, xt[1])
    return nll_C, logits_CV.argmax(-1) == xt[1]

  return jax.tree.map(jnp.ravel, jax.lax.map(one, (into_chunks(x_ND, chunk), into_chunks(targets_N, chunk))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def summed_nll(
  x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, weights_N: jax.Array, chunk: int
) -> jax.Array:
  """Returns sum_n weights_n * -log p(target_n).

  The gradients are computed chunk by chunk along with the loss, from the same logits:

      dx = w (softmax - onehot) head^T        dhead = x^T w (softmax - onehot)
  """
  return jnp.sum(token_nll(x_ND, head_DV, targets_N, chunk) * weights_N)


def _forward(
  x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, weights_N: jax.Array, chunk: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  def one(carry: tuple, xs: tuple) -> tuple[tuple, jax.Array]:
    loss, dhead_DV = carry
    x_CD, targets_C, weights_C = xs
    nll_C, logits_CV, log_z_C = _chunk_nll(x_CD, head_DV, targets_C)
    onehot_CV = jax.nn.one_hot(targets_C, head_DV.shape[1], dtype=jnp.float32)
    dlogits_CV = ((jnp.exp(logits_CV - log_z_C[:, None]) - onehot_CV) * weights_C[:, None]).astype(x_CD.dtype)
    dx_CD = into_float32('CV,DV->CD', dlogits_CV, head_DV).astype(x_CD.dtype)
    dhead_DV += transposed_product(x_CD, dlogits_CV)
    return (loss + jnp.sum(nll_C * weights_C), dhead_DV), dx_CD

  start = (jnp.zeros((), jnp.float32), jnp.zeros(head_DV.shape, jnp.float32))
  pieces = tuple(into_chunks(a, chunk) for a in (x_ND, targets_N, weights_N))
  (loss, dhead_DV), dx = jax.lax.scan(one, start, pieces)
  return loss, (dx.reshape(x_ND.shape), dhead_DV.astype(head_DV.dtype))


def _backward(chunk: int, gradients: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple:
  dx_ND, dhead_DV = gradients
  return dx_ND * g.astype(dx_ND.dtype), dhead_DV * g.astype(dhead_DV.dtype), None, None


summed_nll.defvjp(_forward, _backward)


def path_loss(
  model: Transformer, prefix_tokens: int, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the summed nll in nats, and the number of targets that count."""
  x_BLD, head_DV = transformer.logit_factors(model, params, tokens_BL, segments_BL)
  targets_BL, counts_BL = targets(tokens_BL, segments_BL, prefix_tokens)
  x_ND = x_BLD.reshape(-1, x_BLD.shape[-1])
  nll = summed_nll(x_ND, head_DV, targets_BL.reshape(-1), counts_BL.reshape(-1), model.config.loss_chunk)
  return nll, counts_BL.sum()


def token_losses(model: Transformer, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
  """Returns the nats of the token that follows each token, [B, L], see `following_nll`."""
  x_BLD, head_DV = transformer.logit_factors(model, params, tokens_BL, segments_BL)
  return following_nll(x_BLD, head_DV, tokens_BL, segments_BL, model.config.loss_chunk)


def following_nll(
  x_BLD: jax.Array, head_DV: jax.Array, tokens_BL: jax.Array, segments_BL: jax.Array, chunk: int
) -> jax.Array:
  """Returns -log p of the token that follows each token in its segment, else 0: float32 nats [B, L]."""
  targets_BL, inside_BL = targets(tokens_BL, segments_BL, 0)
  nll_N = token_nll(x_BLD.reshape(-1, x_BLD.shape[-1]), head_DV, targets_BL.reshape(-1), chunk)
  return nll_N.reshape(tokens_BL.shape) * inside_BL


def row_losses(
  model: Transformer, prefix_tokens: int, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the nats of each row over the targets that count, and their number, [B] each."""
  _, counts_BL = targets(tokens_BL, segments_BL, prefix_tokens)
  return (token_losses(model, params, tokens_BL, segments_BL) * counts_BL).sum(1), counts_BL.sum(1)
