"""(viii) What DiLoCo claims: workers against a larger batch, shards, pools of workers, outer optimizers."""

import common
import config
import pictures
from common import Column
from runs import Row

from dipaco_jax import drawing

MOST = 8  # workers


def pool(sizes: list[int]) -> dict[str, tuple]:
  """The changes that make the first so many workers train in each phase."""
  if min(sizes) == MOST:
    return {}
  firsts = [t for t in range(len(sizes)) if not t or sizes[t] != sizes[t - 1]]
  return {'train.schedule': tuple((t, tuple(range(sizes[t]))) for t in firsts)}


def pools(phases: int) -> dict[str, list[int]]:
  """Workers in every phase."""
  early, ramp = phases // 2, [1 + round((MOST - 1) * t / max(1, phases - 1)) for t in range(phases)]
  half = MOST // 2
  return {
    'constant 1': [1] * phases, f'constant {MOST}': [MOST] * phases,
    'doubling': [half] * early + [MOST] * (phases - early), 'halving': [MOST] * early + [half] * (phases - early),
    'ramp up': ramp, 'ramp down': ramp[::-1],
  }  # fmt: skip


def rows(size: str) -> list[Row]:
  other = {'routing.method': 'kmeans', 'outer.reweigh': True}
  found = [Row('dense', 'dense', 'dense')]
  found += [Row(f'batch_{k}', f'{k}x batch', f'batch,{k}') for k in (4, MOST)]
  found += [Row(f'k_{k}', f'{k} worker{"s" * (k > 1)}, i.i.d. shards', f'diloco,{k}') for k in (1, 4, MOST)]
  found += [Row(f'k_{k}_kmeans', f'{k} workers, k-means shards', f'diloco,{k}', other) for k in (4, MOST)]
  schedules = pools(config.SIZES[size].config['train']['phases'])
  found += [
    Row(f'pool_{name.replace(" ", "_")}', f'pool of workers: {name}', f'diloco,{MOST}', pool(sizes))
    for name, sizes in schedules.items()
  ]
  found += [
    Row(f'lost_{p}', f'{MOST} workers, {p}% of outer gradients lost', f'diloco,{MOST}', {'outer.lost': p / 100})
    for p in (10, 30, 50)
  ]
  optimizers = {'sgd': 1.0, 'momentum': 0.3, 'adam': 0.3}
  found += [
    Row(f'outer_{name}', f'{MOST} workers, outer {name}, learning rate {rate}', f'diloco,{MOST}',
        {'outer.optimizer': name, 'outer.learning_rate': rate})
    for name, rate in optimizers.items()
  ]  # fmt: skip
  return found


COLUMNS = (
  Column('perplexity, last phase', 'perplexity_final'),
  Column('less dense, by seed', 'perplexity_final', '+.2f', 'dense'),
  Column('early stopping', 'perplexity'),
  Column('tokens', 'train_tokens', '.2g'),
  Column('bytes sent', 'sent_bytes', '.2g'),
)


@drawing.styled
def picture(table, rows, results):
  """Perplexities, and the cosine between workers' outer gradients."""
  made, (left, right) = drawing.axes(drawing.WIDE * 1.3, 1.0 + 0.32 * len(rows), 2)
  pictures.draw_dots(left, table, rows, results)
  lines = {}
  for row in rows:
    cosines = [r['cosine'].get('all') for (name, _), r in sorted(results.items()) if name == row.name]
    if row.name.startswith('k_') and cosines and cosines[0]:
      lines[row.title] = [(t + 1, c) for t, c in enumerate(cosines[0]) if c is not None]
  pictures.draw_lines(right, lines)
  right.set_xlabel('phase')
  right.set_ylabel("mean cosine between workers' outer gradients, first seed")
  return made


TABLE = common.Table('diloco', "(viii) DiLoCo's claims", rows, COLUMNS, picture)

if __name__ == '__main__':
  common.main(TABLE)
