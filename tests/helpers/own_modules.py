"""Modules of a user's own, written into a folder; each test gives them a name that no other has imported."""

import re

import repository

from dipaco_jax.storage import user_modules

PAGE = repository.ROOT / 'docs' / 'extend.md'
# A recurrence, whose cache is a state: h <- a h + (1 - a) w x with a learned a, within a segment.
RECURRENT = """
import flax.linen as nn
import jax
import jax.numpy as jnp
from dipaco_jax.models import layers

class Block(nn.Module):
  config: object

  @nn.compact
  def __call__(self, x, positions, segments, cache=None):
    D = self.config.width
    a = nn.sigmoid(self.param('decay', nn.initializers.constant(1.0), (D,)))
    w = self.param('w', layers.scaled_normal(1, D), (D, D)).astype(x.dtype)
    new = ((1 - a) * (layers.RMSNorm(1e-6, name='norm')(x) @ w)).astype(jnp.float32)
    kept = jnp.where(positions[..., None] > 0, a, 0.0)
    if cache is None:
      is_text = segments[..., None] > 0
      kept, new = jnp.where(is_text, kept, 1.0), jnp.where(is_text, new, 0.0)
      _, h = jax.lax.associative_scan(lambda f, g: (f[0] * g[0], g[0] * f[1] + g[1]), (kept, new), axis=1)
    else:
      h = kept * cache['h'][:, None] + new
    return x + h.astype(x.dtype), {'h': h[:, -1]}

def make(config, n):
  return Block(config)
"""


def examples() -> dict[str, str]:
  """{file: source} of the examples of docs/extend.md."""
  blocks = re.findall(r'^```python\n(# (\w+\.py): .*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
  return {file: source for source, file in blocks}


def write(folder, monkeypatch, source: str) -> str:
  """Writes a module that can be imported and is trusted, of a name of the folder's own; returns the name."""
  name = 'own_' + re.sub(r'\W', '_', folder.name)
  (folder / f'{name}.py').write_text(source)
  monkeypatch.syspath_prepend(folder)  # after the file: Python remembers what a folder holds
  user_modules.trust([name])
  return name
