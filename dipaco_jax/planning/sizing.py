"""The size of a model, a grid and a run that suit a text, a machine and a time.

Rules (docs/own_text.md has the reasons):

    tokens   a path trains on TOKENS_PER_PARAMETER for each of its parameters, a half of them as the base, which is the
             same for all paths; its shard is repeated at most EPOCHS times for that
    size     the largest of SIZES with which four paths fit in the text and the time
    paths    16 if their shards hold enough text without repetition and the time allows it, else 4

If not even the smallest size fits, it is trained on fewer tokens. FLOPs are 6 for each token and parameter.
"""

import dataclasses
from typing import Any, NamedTuple

TOKENS_PER_PARAMETER = 20  # arXiv 2203.15556
EPOCHS = 4  # arXiv 2305.16264: up to four times repeated, text is worth almost as much as new text
BASE_SHARE = 0.5
BYTES_PER_TOKEN = 4  # as in mixtures
ENOUGH = 0.5  # of TOKENS_PER_PARAMETER: with fewer, paths have not been ahead of dense training in experiments/
FEW, MANY = 4, 16  # paths


class Size(NamedTuple):
  """The shape of a path, and of its steps."""

  width: int
  num_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  seq_len: int
  vocab_size: int
  rows: int
  tau: int
  learning_rate: float
  microbatch: int = 0  # rows whose gradient is computed at one time; 0: all

  @property
  def parameters(self) -> int:
    inner = self.num_heads * self.head_dim
    block = 4 * self.width * inner + 3 * self.width * self.mlp_dim + 2 * self.width
    return self.vocab_size * self.width + self.num_layers * block + self.width

  @property
  def step_tokens(self) -> int:
    return self.rows * self.seq_len


# The first is text:small, the second text, the last the paper's path. Rates in between follow a power of the width.
SIZES = (
  Size(96, 4, 3, 32, 256, 128, 2048, 8, 16, 1e-2),
  Size(128, 6, 4, 32, 344, 256, 4096, 8, 24, 1e-2),
  Size(256, 8, 4, 64, 688, 256, 8192, 16, 24, 3e-3),
  Size(512, 8, 8, 64, 1376, 512, 16_384, 32, 50, 1e-3),
  Size(896, 12, 16, 64, 2432, 1024, 32_000, 128, 150, 4e-4, microbatch=4),
)
PAPER = SIZES[-1]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run: a base of `base_steps`, then `phases` phases of `size.tau` steps for each of `num_paths` paths."""

  size: Size
  num_paths: int
  base_steps: int
  phases: int

  @property
  def path_steps(self) -> int:
    return self.phases * self.size.tau

  @property
  def trained_tokens(self) -> int:
    """Tokens of one path, the base's included."""
    return (self.base_steps + self.path_steps) * self.size.step_tokens

  @property
  def flops(self) -> float:
    """FLOPs of the base, of all paths, and of the dense control, which trains as long as a path."""
    steps = self.base_steps + (self.num_paths + 1) * self.path_steps
    return 6.0 * self.size.parameters * steps * self.size.step_tokens

  @property
  def has_enough_tokens(self) -> bool:
    return self.trained_tokens >= ENOUGH * TOKENS_PER_PARAMETER * self.size.parameters

  @property
  def levels(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Lower blocks over one axis, and path-specific upper blocks, which gained most in experiments/ (README.md, 1)."""
    n = self.size.num_layers
    low, own = blocks_pattern(0, n // 2), blocks_pattern(n // 2, n)
    return ('shared', 'embed|final_norm', ()), ('low', low, ('a',)), ('own', own, ('a', 'b'))

  @property
  def parameters_total(self) -> int:
    """Parameters of all modules."""
    z, side = self.size, round(self.num_paths**0.5)
    block = (z.parameters - self.parameters_shared) // z.num_layers
    low = z.num_layers // 2
    return self.parameters_shared + block * (low * side + (z.num_layers - low) * self.num_paths)

  @property
  def parameters_shared(self) -> int:
    """Parameters that all paths share: embedding and last norm."""
    return (self.size.vocab_size + 1) * self.size.width

  def fields(self) -> dict[str, Any]:
    """Returns the fields of a config that the plan sets."""
    z, side = self.size, round(self.num_paths**0.5)
    shape = ('width', 'num_layers', 'num_heads', 'head_dim', 'mlp_dim', 'seq_len')
    values: dict[str, Any] = {f'model.{name}': getattr(z, name) for name in shape}
    values |= {'tokenizer.vocab_size': z.vocab_size, 'grid': {'a': side, 'b': side}, 'levels': self.levels}
    values |= {'pretrain.steps': self.base_steps, 'pretrain.batch_size': z.rows, 'train.batch_size': z.rows}
    values |= {'train.phases': self.phases, 'train.steps_per_phase': z.tau, 'inner.learning_rate': z.learning_rate}
    values |= {'inner.warmup_steps': max(1, self.base_steps // 10), 'train.microbatch': z.microbatch}
    if z is PAPER:  # docs/averaging.md
      values |= {
        'outer.optimizer': 'nesterov',
        'outer.learning_rate': 0.7,
        'outer.rescale': True,
        'model.remat': 'dots',
      }
    return values


def blocks_pattern(first: int, end: int) -> str:
  """Returns the pattern of blocks `first` to `end` - 1."""
  return f'block_[{first}-{end - 1}]/' if end <= 10 else f'block_({"|".join(map(str, range(first, end)))})/'


def make_plan(text_tokens: float, max_flops: float) -> Plan:
  """Returns the plan for a number of tokens of text, and a number of FLOPs."""
  for size in reversed(SIZES):
    few = _ideal(size, FEW)
    if _fits(few, text_tokens, EPOCHS, max_flops):
      many = _ideal(size, MANY)
      return many if _fits(many, text_tokens, 1, max_flops) else few
  return _shortened(_ideal(SIZES[0], FEW), text_tokens, max_flops)


def _ideal(size: Size, num_paths: int) -> Plan:
  steps = TOKENS_PER_PARAMETER * size.parameters / size.step_tokens
  base = max(1, round(BASE_SHARE * steps))
  return Plan(size, num_paths, base, max(4, round((steps - base) / size.tau)))


def _fits(plan: Plan, text_tokens: float, epochs: float, max_flops: float) -> bool:
  own_tokens = plan.path_steps * plan.size.step_tokens
  return own_tokens <= epochs * text_tokens / plan.num_paths and plan.flops <= max_flops


def _shortened(plan: Plan, text_tokens: float, max_flops: float) -> Plan:
  """Returns the plan with fewer steps, so that it fits."""
  own_tokens = plan.path_steps * plan.size.step_tokens
  share = min(EPOCHS * text_tokens / plan.num_paths / own_tokens, max_flops / plan.flops, 1.0)
  phases = max(4, round(share * plan.phases))
  return dataclasses.replace(plan, base_steps=max(1, round(share * plan.base_steps)), phases=phases)


class Device(NamedTuple):
  """A kind of device: peak FLOP/s in bfloat16, and its memory."""

  flops_per_s: float
  memory_bytes: float


GPUS = {'a100': Device(312e12, 80e9), 'h100': Device(989e12, 80e9), 'h200': Device(989e12, 141e9)}
# The part of the peak that inner steps reach, by parameters of a path: from docs/gpu.md at 17M and 150M parameters of
# one H200, and less for small models, whose steps are too short to fill a device. For TPUs nothing is measured.
EFFICIENCY = ((100e6, 0.4), (10e6, 0.2), (5e6, 0.1), (0, 0.02))


def efficiency(parameters: int) -> float:
  """Returns the part of an accelerator's peak that a path with this number of parameters reaches."""
  return next(part for least, part in EFFICIENCY if parameters >= least)
