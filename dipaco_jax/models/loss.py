"""Cross-entropy in chunks, so that the [B, L, V] logits never exist; and which targets count [2.4].

Only targets after a sequence's first `prefix_tokens` (the paper: 32) count, for every method: the prefix is for the
router. With `train.loss_on_prefix`, training counts all targets, and evaluation those alone.
"""

import functools

import jax
import jax.numpy as jnp

from dipaco_jax.algorithm.grid import largest_divisor
from dipaco_jax.models import transformer
from dipaco_jax.models.products import into_float32, transposed_product
from dipaco_jax.models.transformer import Params, Transformer


def targets(tokens_BL: jax.Array, segments_BL: jax.Array, prefix_tokens: int) -> tuple[jax.Array, jax.Array]:
  """Returns the next token of each token, [B, L], and whether it counts, float32 [B, L].

  It counts if it is in the same segment, is no padding, is not given (of a negative segment id, as what a user says in
  a conversation), and is at position `prefix_tokens` or later of its sequence.
  """
  follow_BL, next_segment_BL = (jnp.pad(x_BL, ((0, 0), (0, 1)))[:, 1:] for x_BL in (tokens_BL, segments_BL))
  late_BL = transformer.positions(jnp.abs(segments_BL)) + 1 >= prefix_tokens
  counts_BL = (next_segment_BL == jnp.abs(segments_BL)) & (next_segment_BL > 0) & late_BL
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def summed_nll(
  x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, weights_N: jax.Array, chunk: int, vocab_chunk: int = 0
) -> jax.Array:
  """Returns sum_n weights_n * -log p(target_n).

  The gradients are computed chunk by chunk along with the loss, from the same logits:

      dx = w (softmax - onehot) head^T        dhead = x^T w (softmax - onehot)

  The head is rounded to the dtype of x; its gradient has its own. With `vocab_chunk`, the logits of a part of the
  vocabulary are in memory at one time: the largest divisor of its size up to that, or all if that is less than half.
  """
  return jnp.sum(token_nll(x_ND, head_DV.astype(x_ND.dtype), targets_N, chunk) * weights_N)


def _forward(
  x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, weights_N: jax.Array, chunk: int, vocab_chunk: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  V, rounded_DV = head_DV.shape[1], head_DV.astype(x_ND.dtype)
  part = largest_divisor(V, vocab_chunk or V)
  is_whole = part == V or 2 * part < vocab_chunk
  of_chunk = _of_chunk if is_whole else functools.partial(_of_chunk_by_parts, part)

  def one(carry: tuple, xs: tuple) -> tuple[tuple, jax.Array]:
    loss, dhead_DV = carry
    x_CD, targets_C, weights_C = xs
    nll_C, dx_CD, more_DV = of_chunk(x_CD, rounded_DV, targets_C, weights_C)
    return (loss + jnp.sum(nll_C * weights_C), dhead_DV + more_DV), dx_CD.astype(x_CD.dtype)

  start = (jnp.zeros((), jnp.float32), jnp.zeros(head_DV.shape, jnp.float32))
  pieces = tuple(into_chunks(a, chunk) for a in (x_ND, targets_N, weights_N))
  (loss, dhead_DV), dx = jax.lax.scan(one, start, pieces)
  return loss, (dx.reshape(x_ND.shape), dhead_DV.astype(head_DV.dtype))


def _of_chunk(
  x_CD: jax.Array, head_DV: jax.Array, targets_C: jax.Array, weights_C: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns -log p of the targets, [C], and the gradients of x and the head, float32 [C, D] and [D, V]."""
  nll_C, logits_CV, log_z_C = _chunk_nll(x_CD, head_DV, targets_C)
  dlogits_CV = _dlogits(logits_CV, log_z_C, targets_C, weights_C).astype(x_CD.dtype)
  return nll_C, into_float32('CV,DV->CD', dlogits_CV, head_DV), transposed_product(x_CD, dlogits_CV)


def _dlogits(logits_CM: jax.Array, log_z_C: jax.Array, targets_C: jax.Array, weights_C: jax.Array) -> jax.Array:
  """Returns w (softmax - onehot); for targets outside of 0 to M - 1, onehot is 0."""
  onehot_CM = jax.nn.one_hot(targets_C, logits_CM.shape[1], dtype=jnp.float32)
  return (jnp.exp(logits_CM - log_z_C[:, None]) - onehot_CM) * weights_C[:, None]


def _of_chunk_by_parts(
  part: int, x_CD: jax.Array, head_DV: jax.Array, targets_C: jax.Array, weights_C: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the results of `_of_chunk`, computed from logits of `part` tokens at one time: P parts of M tokens.

  A first pass computes the logits and sums their exponentials, a second one computes the gradients. In between, the
  logits are kept in the dtype of x, minus the maximum of their part, because only values near 0 have to be exact.
  """
  D, V = head_DV.shape
  head_PMD, first_P = head_DV.T.reshape(-1, part, D), jnp.arange(0, V, part)

  def add_up(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
    max_C, sum_C, target_C = carry
    head_MD, first = xs
    logits_CM = into_float32('CD,MD->CM', x_CD, head_MD)
    mine_C = logits_CM.max(-1)
    new_C = jnp.maximum(max_C, mine_C)
    sum_C = sum_C * jnp.exp(max_C - new_C) + jnp.exp(logits_CM - new_C[:, None]).sum(-1)
    is_target_CM = (targets_C - first)[:, None] == jnp.arange(part)
    target_C += jnp.where(is_target_CM, logits_CM, 0).sum(-1)
    return (new_C, sum_C, target_C), ((logits_CM - mine_C[:, None]).astype(x_CD.dtype), mine_C)

  def differentiate(dx_CD: jax.Array, xs: tuple) -> tuple[jax.Array, jax.Array]:
    head_MD, first, kept_CM, max_C = xs
    logits_CM = kept_CM.astype(jnp.float32) + max_C[:, None]
    dlogits_CM = _dlogits(logits_CM, log_z_C, targets_C - first, weights_C).astype(x_CD.dtype)
    return dx_CD + into_float32('CM,MD->CD', dlogits_CM, head_MD), transposed_product(dlogits_CM, x_CD)

  zeros_C = jnp.zeros(x_CD.shape[0], jnp.float32)
  start = (zeros_C - jnp.inf, zeros_C, zeros_C)
  (max_C, sum_C, target_C), kept = jax.lax.scan(add_up, start, (head_PMD, first_P))
  log_z_C = max_C + jnp.log(sum_C)
  start_CD = jnp.zeros(x_CD.shape, jnp.float32)
  dx_CD, dhead_PMD = jax.lax.scan(differentiate, start_CD, (head_PMD, first_P, *kept))
  return log_z_C - target_C, dx_CD, dhead_PMD.reshape(V, D).T


def _backward(chunk: int, vocab_chunk: int, gradients: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple:
  dx_ND, dhead_DV = gradients
  return dx_ND * g.astype(dx_ND.dtype), dhead_DV * g.astype(dhead_DV.dtype), None, None


summed_nll.defvjp(_forward, _backward)


def path_loss(
  model: Transformer, prefix_tokens: int, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the summed nll in nats, and the number of targets that count.

  The gradient of the former is that of nll + sum over rows of targets * (losses of routers), see `experts`.
  """
  (x_BLD, head_DV), added_B = transformer.logit_factors_and_losses(model, params, tokens_BL, segments_BL)
  targets_BL, counts_BL = targets(tokens_BL, segments_BL, prefix_tokens)
  x_ND = x_BLD.reshape(-1, x_BLD.shape[-1])
  chunks = model.config.loss_chunk, model.config.vocab_chunk
  nll = summed_nll(x_ND, head_DV, targets_BL.reshape(-1), counts_BL.reshape(-1), *chunks)
  if added_B is not None:
    nll += jnp.sum(counts_BL.sum(1) * (added_B - jax.lax.stop_gradient(added_B)))
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
