"""For tests beside Hugging Face's transformers: models with random weights, and how far two implementations may be."""

import numpy as np
import small

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.models import transformer as model_lib


def tolerance(model: settings_lib.Model, length: int, logits: np.ndarray) -> float:
  """Of a logit, float32: a sum of n products is off by n eps at most, and a logit lies behind these sums in a row."""
  heads = model.num_heads * model.head_dim
  block = 2 * model.width + model.head_dim + length + heads + model.width + model.mlp_dim
  return small.EPS * (model.num_layers * block + 2 * model.width) * float(np.abs(logits).max())


def logits(made: model_lib.Transformer, params, tokens_BL: np.ndarray) -> np.ndarray:
  """Ours, of whole rows."""
  x_BLD, head_DV = model_lib.logit_factors(made, params, tokens_BL, np.ones_like(tokens_BL))
  return np.einsum('BLD,DV->BLV', np.asarray(x_BLD), np.asarray(head_DV))
