"""FLOPs, MFU and memory against figures by hand."""

import numpy as np

from dipaco_jax.config import settings
from dipaco_jax.telemetry import performance


def test_flops_per_token_by_hand():
  # Width 8, 2 heads of 3, MLP 5, 2 blocks, vocabulary 11, 7 tokens. A block: 4 * 8 * 6 + 3 * 8 * 5 = 312 products.
  model = settings.Model(width=8, num_layers=2, num_heads=2, head_dim=3, mlp_dim=5)
  assert performance.flops_per_token(model, 11, 7) == 6 * (2 * 312 + 8 * 11) + 12 * 2 * 7 * 6


def test_shared_keys_and_windows_cost_less():
  model = settings.Model(
    width=8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=3, mlp_dim=5, window=4, full_every=3
  )
  block = 2 * 8 * (12 + 6) + 3 * 8 * 5
  assert performance.flops_per_token(model, 11, 7) == 6 * (3 * block + 8 * 11) + 12 * 12 * (4 + 4 + 7)


def test_mfu():
  assert performance.mfu(197e12, 'TPU v5 lite', 'bfloat16', 2) == 0.5
  assert performance.mfu(459e12, 'TPU v5p', 'bfloat16', 1) == 1
  assert performance.mfu(275e12, 'TPU v4', 'float32', 1) == 1
  assert performance.mfu(989e12, 'NVIDIA H200', 'float32', 1) == 2
  assert performance.mfu(756e12, 'NVIDIA H100 PCIe', 'bfloat16', 1) == 1
  assert performance.mfu(1e12, 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'bfloat16', 1) is None
  assert performance.mfu(1e12, 'cpu', 'float32', 1) is None


def test_peak_memory():
  import jax

  block = np.ones(200_000_000, np.uint8)
  assert performance.process_peak_bytes() > len(block)
  assert performance.device_peak_bytes(jax.devices('cpu')) is None
