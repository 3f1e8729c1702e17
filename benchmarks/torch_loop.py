"""The inner loop as a careful engineer writes it in PyTorch: the other thing that the product is measured against.

The same model and optimizer as bare.py: compiled by torch.compile or eager, attention by FlexAttention with a block
mask of the documents on a GPU and by scaled_dot_product_attention with a mask elsewhere, the fused AdamW.
"""

from collections.abc import Callable

import bare
import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def tensors(tree, device: str):
  """A tree of arrays as parameters."""
  if isinstance(tree, dict):
    return {name: tensors(x, device) for name, x in tree.items()}
  if isinstance(tree, list):
    return [tensors(x, device) for x in tree]
  return torch.nn.Parameter(torch.from_numpy(np.array(tree)).to(device))


def leaves(tree) -> list[torch.Tensor]:
  if isinstance(tree, torch.Tensor):
    return [tree]
  return [leaf for x in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(x)]


def rms_norm(x, scale, epsilon):
  x32 = x.float()
  return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon) * scale).to(x.dtype)


def rope(x, sin, cos):
  a, b = x.float().chunk(2, -1)
  return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def block(config, dtype, p, x, sin, cos, mask):
  p = {name: w.to(dtype) if w.ndim > 1 else w for name, w in p.items()}
  h = rms_norm(x, p['attention_norm'], config.epsilon)
  q, k, v = (torch.einsum('bld,dhk->bhlk', h, p[name]) for name in 'qkv')
  q, k = rope(q, sin, cos), rope(k, sin, cos)
  kernel, how = (flex_attention, 'block_mask') if x.is_cuda else (F.scaled_dot_product_attention, 'attn_mask')
  h = kernel(q, k, v, **{how: mask})
  x = x + torch.einsum('bhlk,hkd->bld', h, p['o'])
  h = rms_norm(x, p['mlp_norm'], config.epsilon)
  return x + (F.silu(h @ p['gate']) * (h @ p['up'])) @ p['down']


def mean_loss(config, dtype, params, tokens, sin, cos, mask, counts):
  x = params['embed'][tokens].to(dtype)
  for p in params['blocks']:
    x = block(config, dtype, p, x, sin, cos, mask)
  x = rms_norm(x, params['norm'], config.epsilon)
  head = params['head'] if 'head' in params else params['embed'].T
  logits = (x[:, :-1] @ head.to(dtype)).float()
  losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction='none').view(counts.shape)
  return (losses * counts).sum() / counts.sum().clamp(min=1)


class Loop:
  """Parameters, their AdamW, and rows [k, B, L] on the device; `run` trains a step on each and returns k losses.

  `inner` has AdamW's constants (settings.Inner), `rates` its learning rate at every step.
  """

  def __init__(self, config: bare.Config, inner, rates, flat, rows, compiled: bool):
    self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
    self.config, self.rates, self.clip_norm, self.first = config, rates, inner.clip_norm, 0
    self.params = tensors(bare.from_flat(flat), self.device)
    matrices, vectors = ([x for x in leaves(self.params) if (x.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{'params': matrices, 'weight_decay': inner.weight_decay}, {'params': vectors, 'weight_decay': 0.0}]
    self.adamw = torch.optim.AdamW(groups, 0.0, (inner.b1, inner.b2), inner.epsilon, fused=True)
    self.all = matrices + vectors
    self.loss: Callable = torch.compile(mean_loss) if compiled else mean_loss
    self.dtype = getattr(torch, config.dtype.name)
    self.rows = [
      self.inputs(*(torch.from_numpy(np.array(x)).to(self.device) for x in row)) for row in zip(*rows, strict=True)
    ]

  def inputs(self, tokens, segments):
    """What a step needs of its rows; made once, as another trainer's loader would, beside the steps."""
    length, head_dim = tokens.shape[1], self.params['blocks'][0]['q'].shape[-1]
    index = torch.arange(length, device=self.device)
    first = torch.cat([torch.ones_like(segments[:, :1]).bool(), segments[:, 1:] != segments[:, :-1]], 1)
    place = index - torch.where(first, index, 0).cummax(1).values
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=self.device) / head_dim
    angles = place[:, None, :, None] * self.config.rope_base**-exponents
    if self.device == 'cuda':
      seen = lambda b, h, q, k: (segments[b, q] == segments[b, k]) & (q >= k)  # noqa: E731
      mask = create_block_mask(seen, tokens.shape[0], None, length, length, device=self.device)
    else:
      mask = ((segments[:, :, None] == segments[:, None]) & (index[:, None] >= index))[:, None]
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & (place[:, :-1] + 1 >= self.config.prefix)
    return tokens.long(), angles.sin(), angles.cos(), mask, counts.float()

  def run(self) -> np.ndarray:
    losses = []
    for row in self.rows:
      for group in self.adamw.param_groups:
        group['lr'] = float(self.rates[self.first])
      loss = self.loss(self.config, self.dtype, self.params, *row)
      self.adamw.zero_grad()
      loss.backward()
      torch.nn.utils.clip_grad_norm_(self.all, self.clip_norm)
      self.adamw.step()
      losses.append(loss.detach())
      self.first += 1
    return torch.stack(losses).cpu().numpy()  # waits
