"""The transformer once more, in numpy and float64, for one sequence: what transformer.py is held against."""

import math

import numpy as np


def norm(x_LD, scale_D, epsilon):
  return x_LD / np.sqrt((x_LD**2).mean(-1, keepdims=True) + epsilon) * scale_D


def turn(x_LHK, base):
  """Rotary embedding: pair (i, i + K/2) of the token at place p turns by p * base^(-2i/K)."""
  out = x_LHK.copy()
  K = x_LHK.shape[-1]
  for i in range(K // 2):
    angle = np.arange(len(x_LHK)) * base ** (-2 * i / K)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x_LHK[..., i], x_LHK[..., i + K // 2]
    out[..., i], out[..., i + K // 2] = a * cos - b * sin, a * sin + b * cos
  return out


def attention(h_LD, p, name, config):
  L = len(h_LD)
  q, k, v = (np.einsum('LD,DHK->LHK', h_LD, p[f'{name}/{n}']) for n in 'qkv')
  q, k = turn(q, config.rope_base), turn(k, config.rope_base)
  out = np.zeros_like(q)
  for head in range(config.num_heads):
    scores = q[:, head] @ k[:, head].T / math.sqrt(config.head_dim)
    scores[np.triu_indices(L, 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head]
  return np.einsum('LHK,HKD->LD', out, p[f'{name}/o'])


def hidden(params, tokens, config):
  """The last block's output, [L, D]."""
  p = {name: np.asarray(x, np.float64) for name, x in params.items()}
  x_LD = p['embed/tokens'][tokens]
  for n in range(config.num_layers):
    block = f'block_{n}'
    h_LD = norm(x_LD, p[f'{block}/attention_norm/scale'], config.norm_epsilon)
    x_LD = x_LD + attention(h_LD, p, f'{block}/attention', config)
    h_LD = norm(x_LD, p[f'{block}/mlp_norm/scale'], config.norm_epsilon)
    gate = h_LD @ p[f'{block}/mlp/gate']
    x_LD = x_LD + (gate / (1 + np.exp(-gate)) * (h_LD @ p[f'{block}/mlp/up'])) @ p[f'{block}/mlp/down']
  return x_LD


def nll(params, tokens, config):
  """-log p of every token but the first, given those before it: [L - 1] nats, from whole logits."""
  x_LD = norm(hidden(params, tokens, config), np.asarray(params['final_norm/scale'], np.float64), config.norm_epsilon)
  head = params['embed/tokens'].T if config.tied else params['head/kernel']
  logits_LV = x_LD @ np.asarray(head, np.float64)
  top_L1 = logits_LV.max(-1, keepdims=True)
  log_z_L = np.log(np.exp(logits_LV - top_L1).sum(-1)) + top_L1[:, 0]
  return np.array([log_z_L[i] - logits_LV[i, tokens[i + 1]] for i in range(len(tokens) - 1)])
