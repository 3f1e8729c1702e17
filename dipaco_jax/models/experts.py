"""A mixture of experts in place of a block's MLP: each token passes through k of E MLPs, which its router chooses.

    p = softmax(x R)                             over E experts, in float32
    y = sum over the k experts of largest p:  g_e MLP_e(x)  (+ MLP_shared(x))

g_e is p_e, or p_e divided by the sum over the k (`model.normalize_gates`) (arXiv 2401.04088, 2409.02060). No token is
dropped (expert_groups.py). Each expert's matrices are parameters of their own, so that a level of the grid may contain
some experts alone.

Two losses of the router are added in training, with f_re the share of a row's pairs that chose e, over its tokens n:

    model.balance_loss * E sum_e f_re mean_n p_rne      model.router_z_loss * mean_n (logsumexp x_rn R)^2

(arXiv 2412.19437, sequence-wise; 2202.08906). As each row has its own, they do not depend on how rows are spread over
devices or microbatches. They count as often as the row has targets, and only in the gradient: the loss that is reported
is the cross-entropy alone.

Dimensions: B rows, L length, D width, E experts, K experts of a token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dipaco_jax.config import settings
from dipaco_jax.models.expert_groups import apply_experts
from dipaco_jax.models.layers import MLP, Weights, is_wide, mlp_weights, scaled_normal

# Collection of Flax in which blocks put what training adds to the mean cross-entropy of each row.
LOSSES = 'router_losses'


def choose(logits_BLE: jax.Array, num_chosen: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
  """Returns the gates, float32, and the numbers of each token's experts, [B, L, K] each, the largest gate first."""
  gates_BLK, experts_BLK = jax.lax.top_k(jax.nn.softmax(logits_BLE), num_chosen)
  return gates_BLK / gates_BLK.sum(-1, keepdims=True) if normalize else gates_BLK, experts_BLK


def balance(logits_BLE: jax.Array, experts_BLK: jax.Array, counts_BL: jax.Array) -> jax.Array:
  """Returns E sum_e f_e mean_n p_ne of each row, [B], over its tokens that count: 1 if experts are chosen equally."""
  E = logits_BLE.shape[-1]
  shares_BL1 = (counts_BL / jnp.maximum(counts_BL.sum(-1, keepdims=True), 1))[..., None]
  chosen_BE = (jax.nn.one_hot(experts_BLK, E).mean(2) * shares_BL1).sum(1)
  return E * jnp.sum(chosen_BE * (jax.nn.softmax(logits_BLE) * shares_BL1).sum(1), -1)


def square_z(logits_BLE: jax.Array, counts_BL: jax.Array) -> jax.Array:
  """Returns the mean of (logsumexp of a token's logits)^2 of each row, [B], over its tokens that count."""
  squares_BL = jax.nn.logsumexp(logits_BLE, axis=-1) ** 2
  return (squares_BL * counts_BL).sum(-1) / jnp.maximum(counts_BL.sum(-1), 1)


def sow(module: nn.Module, losses_B: jax.Array) -> None:
  """Adds to what training minimizes beside the mean cross-entropy of each row, in nats."""
  if not module.is_initializing():
    module.sow(LOSSES, 'rows', losses_B, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros((), jnp.float32))


def total(sown: Any) -> jax.Array | None:
  """Returns the sum of what was sown by blocks, [B], or None if that is nothing."""
  losses = jax.tree.leaves(sown)
  return functools.reduce(jnp.add, losses) if losses else None


class Expert(nn.Module):
  """The parameters of one expert."""

  config: settings.Model

  @nn.compact
  def __call__(self) -> Weights:
    return mlp_weights(self, self.config, self.config.mlp_dim)


class Mixture(nn.Module):
  """The router, the experts, and the shared expert if there is one."""

  config: settings.Model

  def setup(self) -> None:
    c = self.config
    self.router = self.param('router', scaled_normal(1, c.width), (c.width, c.num_experts))
    self.experts = [Expert(c, name=f'expert_{e}') for e in range(c.num_experts)]
    self.shared = MLP(c, c.shared_expert_dim) if c.shared_expert_dim else None

  def __call__(self, x_BLD: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Returns the sum of the experts' outputs, [B, L, D]; tokens of segment 0 are in no loss of the router."""
    c, (*_, D) = self.config, x_BLD.shape
    logits_BLE = jnp.matmul(x_BLD.astype(jnp.float32), self.router.astype(jnp.float32), precision='highest')
    gates_BLK, experts_BLK = choose(logits_BLE, c.experts_per_token, c.normalize_gates)
    if c.balance_loss or c.router_z_loss:
      counts_BL = (segments_BL > 0).astype(jnp.float32)
      losses_B = c.balance_loss * balance(logits_BLE, experts_BLK, counts_BL)
      sow(self, losses_B + c.router_z_loss * square_z(logits_BLE, counts_BL))
    x_MD = jnp.repeat(x_BLD.reshape(-1, D), c.experts_per_token, axis=0)
    weights = [expert() for expert in self.experts]
    y_MD = apply_experts(x_MD, experts_BLK.reshape(-1), weights, c.activation, c.experts, is_wide(c))
    y_BLKD = y_MD.reshape(*experts_BLK.shape, D)
    y_BLD = jnp.einsum('BLKD,BLK->BLD', y_BLKD, gates_BLK, preferred_element_type=jnp.float32).astype(x_BLD.dtype)
    return y_BLD + self.shared(x_BLD) if self.shared else y_BLD
