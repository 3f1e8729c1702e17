"""Text and tables of the examples: four kinds of text that every Python has, in bytes.

English (the language reference), tables (encodings), and two libraries. Each path trains on one kind, its shard.
"""

import importlib.resources
import pydoc_data.topics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ('english', 'encodings', 'asyncio', 'email')
MAX_BYTES = 400_000  # of a kind
LENGTH, BATCH = 96, 16
HELD_OUT = 0.1


def read_kind(kind: str) -> np.ndarray:
  """Returns the text of one kind, uint8 below 128."""
  if kind == 'english':
    text = '\n'.join(pydoc_data.topics.topics.values())
  else:
    files = sorted(importlib.resources.files(kind).iterdir(), key=lambda file: file.name)
    text = '\n'.join(file.read_bytes().decode('utf-8', 'ignore') for file in files if file.name.endswith('.py'))
  return np.frombuffer(text.encode('ascii', 'ignore')[:MAX_BYTES], np.uint8)


def load_shards() -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the training text and the held-out text of each kind."""
  texts = [read_kind(kind) for kind in KINDS]
  borders = [int(len(text) * (1 - HELD_OUT)) for text in texts]
  parts = [np.split(text, [border]) for text, border in zip(texts, borders, strict=True)]
  return [train for train, _ in parts], [held_out for _, held_out in parts]


def draw(shards: list[np.ndarray], steps: int, rng: np.random.Generator) -> np.ndarray:
  """Draws batches for one path, int32 [steps, BATCH, LENGTH + 1]: each row from one of the shards."""
  rows = []
  for shard in rng.integers(len(shards), size=steps * BATCH):
    begin = rng.integers(len(shards[shard]) - LENGTH)
    rows.append(shards[shard][begin : begin + LENGTH + 1])
  return np.stack(rows).reshape(steps, BATCH, LENGTH + 1).astype(np.int32)


def windows(x: jax.Array, size: int) -> jax.Array:
  """Returns the last `size` vectors of each position, side by side: [..., L, D] to [..., L, size * D]."""
  padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(size - 1, 0), (0, 0)])
  return jnp.concatenate([padded[..., k : k + x.shape[-2], :] for k in range(size)], -1)


def perplexity(loss_of_kind: Callable[[int, np.ndarray], float], held_out: list[np.ndarray]) -> float:
  """Returns the perplexity per byte, the mean over kinds; `loss_of_kind(kind, tokens [N, LENGTH + 1])` is in nats."""
  losses = []
  for kind, text in enumerate(held_out):
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[:64]
    losses.append(float(loss_of_kind(kind, rows.astype(np.int32))))
  return float(np.exp(np.mean(losses)))


def print_table(curves: dict[str, list[float]], steps: int) -> None:
  """Prints the perplexity of each method after its last phase."""
  print(f'perplexity per byte after {steps} steps of each path')
  for name, values in curves.items():
    print(f'  {name:8s} {values[-1]:.3f}')


def save_picture(curves: dict[str, list[float]], tau: int, file: str) -> None:
  """Draws perplexity over the steps of each path."""
  import matplotlib.pyplot as plt

  for name, values in curves.items():
    plt.plot(np.arange(len(values)) * tau, values, label=name)
  plt.xlabel('steps of each path after pretraining')
  plt.ylabel('perplexity per byte')
  plt.legend()
  plt.savefig(file)
  plt.close()
