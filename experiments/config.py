"""Every method of the tables, at every size: the baselines are configs of one base.

    python -m dipaco_jax.main --config=experiments/config.py:micro,dipaco --workdir=DIR \\
      --config.data.source=files --config.data.train=TRAIN.jsonl --config.data.validation=VALIDATION.jsonl

The variant is SIZE,METHOD or SIZE,METHOD,NUMBERS. Without the three data flags the text is that of the running Python.

    METHOD        NUMBERS           what it is
    dense         steps, 1          one path, AdamW alone, with a multiple of the steps
    larger                          one larger path of a base of its own, the FLOPs of all P paths and their base
    diloco        P                 P workers on one model, documents dealt out at random
    fragments     P                 the same, its one level cut in three: embedding, lower and upper blocks
    flat          P or AxB          P models that share nothing, k-means
    dipaco        AxB               a lower level over axis a, an upper one over b, all else shared; k-means
    upper         AxB               the same with the embedding in the upper level, as in the paper
    ends          AxB               the same with path-specific embedding, first and last blocks [4]
    own           AxB               the lower half of the blocks over axis a, the upper half path-specific
    blocks_own    AxB               all blocks path-specific, the embedding shared
    mlps          AxB               all MLPs path-specific, attention over axis a in the lower half, over b in the upper
    third         AxB               the upper third of the blocks path-specific, the rest halved between axes a and b
    owners        none              a path for each kind of text, its owner; all share one model
    owners_mlps, owners_upper, owners_blocks, owners_alone
                  none              the same; MLPs, the upper half of the blocks, all blocks, or all are an owner's own
    rerouted      AxB               dipaco, re-routed every W tokens while evaluating
    discriminative  AxB             the same, with discriminative re-sharding

Without NUMBERS, they are those of the size's own grid.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FrozenConfigDict

from dipaco_jax import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.telemetry import performance

Numbers = tuple[int, ...]
UNLIKE = 'law_de'  # the kind of text that is least like the rest
UNREAD = (UNLIKE, 'code')  # text that the base of table (5) has not read
MEANS = {'others': (UNLIKE,), 'read': UNREAD, 'each': ()}  # geometric means over the kinds of text but these
KINDS = (
  'books_en',
  'code',
  'gov_news_blog',
  'law_de',
  'law_en',
  'science_abstracts',
  'tech_docs',
  'wiki_en',
)  # of text
LAST = {'train.early_stopping': False}  # the change of rows that are measured at their last version


class Size(NamedTuple):
  """How large the runs are; `config` holds what differs from the defaults of settings.py, by section."""

  grid: Numbers
  alone: int  # steps of a phase where nothing is exchanged
  config: dict[str, dict[str, Any]]
  larger: dict[str, int] = {}  # of the larger dense model: fields of settings.Model
  larger_rate: float = 0.0  # its learning rate
  chooser_steps: int = 0  # to train the learned chooser of re-routing for
  owners: tuple[str, ...] = KINDS  # each of a kind of text


SIZES = {
  # For tests: figures mean nothing.
  'test': Size(
    grid=(2, 2),
    larger=dict(width=24, num_layers=2, num_heads=3, head_dim=8, mlp_dim=32),
    larger_rate=2.5e-3,
    alone=2,
    chooser_steps=4,
    owners=('consonants', 'vowels'),
    config=dict(
      data=dict(holdout_fraction=0.1, validation_fraction=0.2, max_validation_documents=0),
      tokenizer=dict(vocab_size=300),
      model=dict(width=16, num_layers=2, num_heads=2, head_dim=8, mlp_dim=24, seq_len=64),
      pretrain=dict(steps=8, batch_size=4),
      train=dict(phases=4, steps_per_phase=2, batch_size=4, max_holdout_rows=8),
      inner=dict(learning_rate=1e-2, warmup_steps=4),
      outer=dict(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True),
      routing=dict(router_fraction=0.1, phases_per_round=1),
      evaluate=dict(batch_size=4),
      checkpoint=dict(every_steps=4),
    ),
  ),
  # Do the scripts work? Five minutes for two tables on two cores; figures mean little.
  'smoke': Size(
    grid=(2, 2),
    larger=dict(width=96, num_layers=4, num_heads=3, head_dim=32, mlp_dim=256),
    larger_rate=1e-3,
    alone=8,
    chooser_steps=16,
    config=dict(
      data=dict(max_documents=900, validation_fraction=0.2, max_validation_documents=100),
      tokenizer=dict(vocab_size=1024, sample_bytes=3_000_000),
      model=dict(width=64, num_layers=4, num_heads=2, head_dim=32, mlp_dim=172, seq_len=128),
      pretrain=dict(steps=64, batch_size=16),
      train=dict(phases=4, steps_per_phase=8, batch_size=4, max_holdout_rows=8),
      inner=dict(learning_rate=4e-3, warmup_steps=16),
      outer=dict(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True),
      routing=dict(router_fraction=0.1, phases_per_round=1),
      evaluate=dict(batch_size=16),
      checkpoint=dict(every_steps=500),
    ),
  ),
  # Two cores, ten minutes of one for a run of 4 paths: 213 tokens a parameter for each, 1.1 times the text.
  'micro': Size(
    grid=(2, 2),
    larger=dict(width=64, num_layers=3, num_heads=4, head_dim=16, mlp_dim=200),
    larger_rate=2e-2,
    alone=25,
    chooser_steps=200,
    config=dict(
      data=dict(max_documents=0, max_validation_documents=0),
      tokenizer=dict(vocab_size=1024),
      model=dict(width=32, num_layers=2, num_heads=2, head_dim=16, mlp_dim=86, seq_len=128),
      pretrain=dict(steps=600, batch_size=32),
      train=dict(phases=600, steps_per_phase=5, batch_size=32, max_holdout_rows=64, steps_per_dispatch=25),
      inner=dict(learning_rate=4e-2, warmup_steps=100),  # see tune.py
      outer=dict(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True),  # see tau.py
      routing=dict(sample=20_000, router_fraction=0.015, phases_per_round=200),
      evaluate=dict(batch_size=64),
      checkpoint=dict(every_steps=2000),
    ),
  ),
  # One GPU: paths of 17 million parameters, thousands of steps.
  'medium': Size(
    grid=(4, 4),
    larger=dict(width=768, num_layers=12, num_heads=12, head_dim=64, mlp_dim=2048),
    larger_rate=2.5e-4,
    alone=100,
    chooser_steps=2000,
    config=dict(
      data=dict(max_validation_documents=0),
      tokenizer=dict(vocab_size=8192),
      model=dict(width=384, num_layers=8, num_heads=6, head_dim=64, mlp_dim=1024, seq_len=256),
      pretrain=dict(steps=2000, batch_size=64),
      train=dict(phases=20, steps_per_phase=100, batch_size=16, max_holdout_rows=64),
      inner=dict(learning_rate=1e-3, warmup_steps=200),
      routing=dict(router_fraction=0.03, phases_per_round=5),
      evaluate=dict(batch_size=64),
      checkpoint=dict(every_steps=8000),
    ),
  ),
}


def published(
  tau: int, batch_size: int, evaluate: int, documents: int, dispatch: int, every_steps: int, **model: int
) -> Size:
  """A size whose paths start from a model of 30 blocks, SmolLM2-135M, whose folder says the rest of its shape."""
  phases = 12
  return Size(
    grid=(2, 2),
    alone=phases * tau,
    config=dict(
      data=dict(max_validation_documents=documents),
      model=dict(num_layers=30, seq_len=512, **model),
      pretrain=dict(steps=0, batch_size=batch_size),
      train=dict(phases=phases, steps_per_phase=tau, batch_size=batch_size, steps_per_dispatch=dispatch),
      inner=dict(learning_rate=3e-4, warmup_steps=0, final_fraction=0.0),
      outer=dict(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True),
      routing=dict(sample=10_000, router_fraction=0.02),
      evaluate=dict(batch_size=evaluate, samples=0),
      checkpoint=dict(every_steps=every_steps, keep=1),
      metrics=dict(sinks=()),
    ),
  )


# Sizes of upcycle_gpu.py alone. Four paths read 15.7 million tokens on a GPU, a tenth of that on a CPU. On a GPU a
# checkpoint takes as long as many steps: one is written at the end of a row, or when it is stopped.
PUBLISHED = {
  'cpu': published(tau=16, batch_size=4, evaluate=8, documents=800, dispatch=4, every_steps=64),
  'gpu': published(tau=40, batch_size=16, evaluate=64, documents=0, dispatch=20, every_steps=100_000, loss_chunk=8192),
}


def get_config(variant: str = 'micro,dipaco') -> ConfigDict:
  """variant: SIZE,METHOD or SIZE,METHOD,NUMBERS, as above."""
  name, method, numbers = f'{variant},,'.split(',')[:3]
  sizes = SIZES | PUBLISHED
  if name not in sizes or method not in METHODS:
    raise InputError(f'variant {variant!r}: it is SIZE,METHOD of {", ".join(sizes)} and {", ".join(METHODS)}')
  size = sizes[name]
  c = ConfigDict(settings.Settings().to_dict())
  c.evaluate.every_phases = 0
  for section, values in size.config.items():
    c[section].update(values)
  METHODS[method](c, size, tuple(map(int, numbers.split('x'))) if numbers else ())
  # Stated, so that the base has the schedule of the whole run, with any number of phases.
  c.inner.decay_steps = c.pretrain.steps + c.train.phases * c.train.steps_per_phase
  return c


@functools.cache
def fixed(variant: str) -> FrozenConfigDict:
  """get_config's, to be read by those who make rows: made once."""
  return FrozenConfigDict(get_config(variant))


def lasting(size: str, steps: int, tau: int, base: int = 0) -> dict[str, int]:
  """The changes that make training so many steps of a path in phases of tau; the cosine ends with the last.

  With another base, of so many steps, all steps together are as many, and the paths train for what it leaves.
  """
  usual = SIZES[size].config['pretrain']['steps']
  phases = (usual + steps - (base or usual)) // tau
  changes = {'train.phases': phases, 'train.steps_per_phase': tau, 'inner.decay_steps': (base or usual) + phases * tau}
  return changes | ({'pretrain.steps': base} if base else {})


def lasting_larger(size: str, steps: int) -> dict[str, int]:
  """As `lasting`, for the larger dense model: its steps are fewer in proportion, as each costs more."""
  larger, small = fixed(f'{size},larger'), fixed(f'{size},dense').train
  of_small = steps // small.steps_per_phase
  phases = max(1, round(larger.train.phases * of_small / small.phases))
  return {'train.phases': phases, 'inner.decay_steps': larger.pretrain.steps + phases * larger.train.steps_per_phase}


# -- one path


def dense(c: ConfigDict, size: Size, numbers: Numbers):
  """AdamW alone; the cosine ends with the last step, so that a longer run has a base of its own."""
  c.routing.method = 'single'
  c.train.phases *= math.prod(numbers)
  exchange_nothing(c, size)


def exchange_nothing(c: ConfigDict, size: Size):
  """Phases are only where hold-outs are looked at, and the outer step leaves paths where they are."""
  c.outer.update(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=False)
  c.train.phases = max(1, c.train.phases * c.train.steps_per_phase // size.alone)
  c.train.steps_per_phase = size.alone


def larger(c: ConfigDict, size: Size, numbers: Numbers):
  """Its base and its training take the FLOPs that the small base and all P paths take, at equal rows in a step."""
  dense(c, size, ())
  small = flops_per_token(c)
  c.model.update(size.larger)
  ratio = flops_per_token(c) / small
  c.pretrain.steps = round(c.pretrain.steps / ratio)
  c.train.phases = max(1, round(c.train.phases * math.prod(size.grid) / ratio))
  c.inner.learning_rate = size.larger_rate


def flops_per_token(c: ConfigDict) -> int:
  model = settings.from_dict(c.to_dict()).model
  return performance.flops_per_token(model, c.tokenizer.vocab_size, c.model.seq_len)


# -- many paths


def diloco(c: ConfigDict, size: Size, numbers: Numbers):
  """An axis that no level varies over; the average is uniform and not rescaled, as in the DiLoCo paper."""
  c.grid = ConfigDict({'worker': math.prod(numbers or size.grid)})
  c.routing.method = 'random'
  nesterov = dict(optimizer='nesterov', learning_rate=0.7, momentum=0.9)
  c.outer.update(**nesterov, rescale=False, reweigh=False, row_weights=False)


def fragments(c: ConfigDict, size: Size, numbers: Numbers):
  """Levels over no axis, so that streaming has places for three of them; without it they change nothing."""
  diloco(c, size, numbers)
  low, high = halves(c.model.num_layers)
  c.levels = (('shared', 'embed|final_norm', ()), ('low', blocks(low), ()), ('high', blocks(high), ()))


def flat(c: ConfigDict, size: Size, numbers: Numbers):
  """Every level over all axes."""
  c.grid = ConfigDict({'expert': math.prod(numbers or size.grid)})
  c.levels = (('all', '.*', ('expert',)),)
  c.routing.method = 'kmeans'
  exchange_nothing(c, size)


def dipaco(c: ConfigDict, size: Size, numbers: Numbers):
  """Two levels of half the blocks each."""
  a, b = numbers or size.grid
  c.grid = ConfigDict({'a': a, 'b': b})
  low, high = halves(c.model.num_layers)
  c.levels = (('shared', 'embed|final_norm', ()), ('low', blocks(low), ('a',)), ('high', blocks(high), ('b',)))


def upper(c: ConfigDict, size: Size, numbers: Numbers):
  """No level over no axis: the embedding, which is the head too, and the last norm vary with the upper half."""
  dipaco(c, size, numbers)
  low, high = halves(c.model.num_layers)
  c.levels = (('low', blocks(low), ('a',)), ('high', f'embed|final_norm|{blocks(high)}', ('b',)))


def ends(c: ConfigDict, size: Size, numbers: Numbers):
  """Path-specific: the embedding, and the first and the last block of each level [4]."""
  dipaco(c, size, numbers)
  own = own_blocks(c.model.num_layers)
  low, high = ([i for i in half if i not in own] for half in halves(c.model.num_layers))
  pattern = '|'.join(['embed|final_norm', *([blocks(own)] if own else [])])
  c.levels = (('ends', pattern, ('a', 'b')), ('low', blocks(low), ('a',)), ('high', blocks(high), ('b',)))


def ends_title(size: str) -> str:
  """Of two blocks none is path-specific."""
  blocks = own_blocks(fixed(f'{size},ends').model.num_layers)
  return 'path-specific embedding' + (' and outer blocks' if blocks else '')


def own(c: ConfigDict, size: Size, numbers: Numbers):
  """Path-specific: the upper half of the blocks."""
  dipaco(c, size, numbers)
  low, high = halves(c.model.num_layers)
  c.levels = (('shared', 'embed|final_norm', ()), ('low', blocks(low), ('a',)), ('own', blocks(high), ('a', 'b')))


def blocks_own(c: ConfigDict, size: Size, numbers: Numbers):
  """Path-specific: all blocks."""
  dipaco(c, size, numbers)
  c.levels = (('shared', 'embed|final_norm', ()), ('own', 'block_', ('a', 'b')))


def mlps(c: ConfigDict, size: Size, numbers: Numbers):
  """Path-specific: the MLPs of all blocks, with their norms; attention is as in `dipaco`."""
  dipaco(c, size, numbers)
  low, high = (f'{blocks(half)}attention' for half in halves(c.model.num_layers))
  own = ('own', 'block_[0-9]+/mlp', ('a', 'b'))
  c.levels = (('shared', 'embed|final_norm', ()), ('low', low, ('a',)), ('high', high, ('b',)), own)


def third(c: ConfigDict, size: Size, numbers: Numbers):
  """Path-specific: the upper third of the blocks. The lower ones are halved between the axes."""
  dipaco(c, size, numbers)
  num_layers = c.model.num_layers
  num_shared = num_layers - max(1, num_layers // 3)
  low, high = halves(num_shared)
  by_level = {'low': (low, ('a',)), 'high': (high, ('b',)), 'own': ([*range(num_shared, num_layers)], ('a', 'b'))}
  levels = [(name, blocks(of_level), axes) for name, (of_level, axes) in by_level.items() if of_level]
  c.levels = (('shared', 'embed|final_norm', ()), *levels)


def owners(c: ConfigDict, size: Size, numbers: Numbers):
  """A path for each owner of text; all share one model."""
  c.grid = ConfigDict({'owner': size.owners})
  c.routing.method = 'owner'


def owners_mlps(c: ConfigDict, size: Size, numbers: Numbers):
  """An owner's own: the MLPs of all blocks, with their norms."""
  owners(c, size, numbers)
  c.levels = (('shared', 'embed|final_norm|attention', ()), ('own', 'block_[0-9]+/mlp', ('owner',)))


def owners_upper(c: ConfigDict, size: Size, numbers: Numbers):
  """An owner's own: the upper half of the blocks."""
  owners(c, size, numbers)
  low, high = halves(c.model.num_layers)
  c.levels = (('shared', f'embed|final_norm|{blocks(low)}', ()), ('own', blocks(high), ('owner',)))


def owners_blocks(c: ConfigDict, size: Size, numbers: Numbers):
  """An owner's own: all blocks."""
  owners(c, size, numbers)
  c.levels = (('shared', 'embed|final_norm', ()), ('own', 'block_', ('owner',)))


def owners_alone(c: ConfigDict, size: Size, numbers: Numbers):
  """All is an owner's own."""
  owners(c, size, numbers)
  c.levels = (('all', '.*', ('owner',)),)


def rerouted(c: ConfigDict, size: Size, numbers: Numbers):
  """Costs an evaluation of all router data and validation documents under all paths."""
  dipaco(c, size, numbers)
  c.evaluate.update(reroute_every=(16, 32, 64, 128), chunk_router_steps=size.chooser_steps)


def discriminative(c: ConfigDict, size: Size, numbers: Numbers):
  """A round after every `phases_per_round` phases, one of them if nothing else is said."""
  rerouted(c, size, numbers)
  c.routing.method = 'discriminative'


def halves(num_layers: int) -> tuple[list[int], list[int]]:
  """The blocks of the lower and of the upper level."""
  return list(range(num_layers // 2)), list(range(num_layers // 2, num_layers))


def own_blocks(num_layers: int) -> list[int]:
  """The path-specific ones; a level keeps at least one of its blocks."""
  low, high = halves(num_layers)
  own = [low[0], high[-1]] if len(low) > 1 else []
  return sorted(own + ([low[-1], high[0]] if len(low) > 2 else []))


def blocks(numbers: list[int]) -> str:
  """The pattern of their parameters."""
  return f'block_({"|".join(map(str, numbers))})/'


METHODS: dict[str, Callable[[ConfigDict, Size, Numbers], None]] = {
  f.__name__: f
  for f in (
    dense, larger, diloco, fragments, flat, dipaco, upper, ends, own, blocks_own, mlps, third,
    owners, owners_mlps, owners_upper, owners_blocks, owners_alone, rerouted, discriminative,
  )
}  # fmt: skip
