"""The transformer once more, in numpy and float64, for one sequence: what transformer.py is held against."""

import math

import numpy as np


def norm(x_LD, scale_D, config):
  return x_LD / np.sqrt((x_LD**2).mean(-1, keepdims=True) + config.norm_epsilon) * (config.norm_from_one + scale_D)


def frequency(i, config, base):
  """Of pair i; scaled as rotary.py says."""
  f = base ** (-2 * i / config.head_dim)
  s, original, low, high = config.rope_factor, config.rope_original_len, config.rope_low, config.rope_high
  if config.rope_scaling == 'none':
    return f
  if config.rope_scaling == 'linear':
    return f / s
  if config.rope_scaling == 'llama3':
    turns = original * f / (2 * math.pi)
    kept = min(1, max(0, (turns - low) / (high - low)))
  else:
    which = lambda turns: math.log(original / (2 * math.pi * turns)) / math.log(base) * config.head_dim / 2  # noqa: E731
    begin, end = max(0, math.floor(which(high))), min(config.head_dim - 1, math.ceil(which(low)))
    kept = 1 - min(1, max(0, (i - begin) / max(end - begin, 0.001)))
  return kept * f + (1 - kept) * f / s


def turn(x_LHK, frequencies, gain=1.0):
  """Rotary embedding: pair (i, i + K/2) of the token at place p turns by p times its frequency."""
  out = x_LHK.copy()
  for i, f in enumerate(frequencies):
    angle = np.arange(len(x_LHK)) * f
    cos, sin = gain * np.cos(angle)[:, None], gain * np.sin(angle)[:, None]
    a, b = x_LHK[..., i], x_LHK[..., i + len(frequencies)]
    out[..., i], out[..., i + len(frequencies)] = a * cos - b * sin, a * sin + b * cos
  return out


def attention(h_LD, p, n, config):
  L, K, name = len(h_LD), config.head_dim, f'block_{n}/attention'
  found = {x: np.einsum('LD,DHK->LHK', h_LD, p[f'{name}/{x}']) for x in 'qkv'}
  for x in 'qkv' if config.qkv_bias else '':
    found[x] += p[f'{name}/{x}_bias'].reshape(-1, K)
  for x in 'qk':
    scale = p.get(f'{name}/{x}_norm/scale')
    if config.qk_norm == 'head':
      found[x] = norm(found[x], scale, config)
    elif config.qk_norm == 'all':
      found[x] = norm(found[x].reshape(L, -1), scale, config).reshape(found[x].shape)
  is_full = config.full_every and (n + 1) % config.full_every == 0
  window = L if is_full or not config.window else config.window
  if not (config.no_rope_every and (n + 1) % config.no_rope_every == 0):
    frequencies, gain = [frequency(i, config, config.rope_base) for i in range(K // 2)], 1.0
    if config.rope_scaling == 'yarn':
      gain = config.rope_attention or 0.1 * math.log(config.rope_factor) + 1
    if config.rope_local_base and config.window and not is_full:
      frequencies, gain = [config.rope_local_base ** (-2 * i / K) for i in range(K // 2)], 1.0
    found |= {x: turn(found[x], frequencies, gain) for x in 'qk'}
  out = np.zeros_like(found['q'])
  for head in range(config.num_heads):
    shared = head * found['k'].shape[1] // config.num_heads
    scores = found['q'][:, head] @ found['k'][:, shared].T / math.sqrt(config.query_scale or K)
    if config.attention_cap:
      scores = config.attention_cap * np.tanh(scores / config.attention_cap)
    for i in range(L):
      seen = range(max(0, i - window + 1), i + 1)
      odds = np.exp(scores[i, seen] - scores[i, seen].max())
      out[i, head] = odds / odds.sum() @ found['v'][seen, shared]
  return np.einsum('LHK,HKD->LD', out, p[f'{name}/o'])


def mlp(h_LD, p, name, config):
  gate = h_LD @ p[f'{name}/gate']
  bent = gate / (1 + np.exp(-gate))
  if config.activation == 'gelu':
    bent = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
  return (bent * (h_LD @ p[f'{name}/up'])) @ p[f'{name}/down']


def mixture(h_LD, p, name, config):
  """Each token's MLPs of the largest probabilities, times these; one token after the other."""
  out_LD = mlp(h_LD, p, f'{name}/shared', config) if config.shared_expert_dim else np.zeros_like(h_LD)
  for i, h_D in enumerate(h_LD):
    odds = np.exp(h_D @ p[f'{name}/router'])
    odds /= odds.sum()
    chosen = np.argsort(-odds)[: config.experts_per_token]
    whole = odds[chosen].sum() if config.normalize_gates else 1
    out_LD[i] += sum(odds[e] / whole * mlp(h_D, p, f'{name}/expert_{e}', config) for e in chosen)
  return out_LD


def hidden(params, tokens, config):
  """The last block's output, [L, D]."""
  p = {name: np.asarray(x, np.float64) for name, x in params.items()}
  x_LD = p['embed/tokens'][tokens] * (math.sqrt(config.width) if config.embed_scale else 1)
  for n in range(config.num_layers):
    for part, added in (
      ('attention', lambda h_LD, n=n: attention(h_LD, p, n, config)),
      ('mlp', lambda h_LD, n=n: (mixture if config.num_experts else mlp)(h_LD, p, f'block_{n}/mlp', config)),
    ):
      h_LD = x_LD if config.norms == 'after' else norm(x_LD, p[f'block_{n}/{part}_norm/scale'], config)
      h_LD = added(h_LD)
      x_LD = x_LD + (h_LD if config.norms == 'before' else norm(h_LD, p[f'block_{n}/{part}_post_norm/scale'], config))
  return x_LD


def nll(params, tokens, config):
  """-log p of every token but the first, given those before it: [L - 1] nats, from whole logits."""
  x_LD = norm(hidden(params, tokens, config), np.asarray(params['final_norm/scale'], np.float64), config)
  head = params['embed/tokens'].T if config.tied else params['head/kernel']
  logits_LV = x_LD @ np.asarray(head, np.float64)
  top_L1 = logits_LV.max(-1, keepdims=True)
  log_z_L = np.log(np.exp(logits_LV - top_L1).sum(-1)) + top_L1[:, 0]
  return np.array([log_z_L[i] - logits_LV[i, tokens[i + 1]] for i in range(len(tokens) - 1)])
