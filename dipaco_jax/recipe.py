"""How often paths should exchange, how, and at what learning rate: found by short runs of a config.

    python -m dipaco_jax.recipe --config=configs/text.py --workdir=runs/recipe --config.data.train='books/*.txt'

Trains a base, and from it a few phases of each candidate, in folders of their own inside --workdir: first the outer
step of the config against averages by row (outer.py), then shorter phases, then a third of the learning rate; beside
them the base alone, trained on as one dense path. The cosine ends with each: what a large step costs at once, and gains
later, is then known. Candidates are judged by the loss on the paths' hold-outs after the last outer step, weighted by
their shards' tokens. Prints the options that did best. The same command again goes on.
"""

import json
import math
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from dipaco_jax import averaging, checkpoint, command, config_file, metrics, seals, settings

PHASES, SHARE = 4, 0.05  # of the config: a short run has so many phases at least, and such a part of them
TOLERANCE = 0.01  # nats a token that longer phases may cost, for what they save in exchanges
FIRST = 'the-config'
SHORTER = (4, 16)  # times, than the config's phases
PLAIN = {'outer.optimizer': 'sgd', 'outer.learning_rate': 1.0, 'outer.rescale': False, 'outer.row_weights': True}
ALONE = {'grid': {}, 'levels': (('all', '.*', ()),), 'routing.method': 'single', 'outer.row_weights': False}
# Nothing but training, and one validation at the end, which cannot be left out.
BARE: dict[str, Any] = {
  'evaluate.every_phases': 0, 'evaluate.control': False, 'evaluate.matrix': False, 'evaluate.reroute_every': (),
  'evaluate.chunk_router_steps': 0, 'evaluate.mixture': 0, 'train.schedule': (),
}  # fmt: skip


class Found(NamedTuple):
  """What a candidate came to."""

  name: str
  changes: dict[str, Any]  # fields of the config
  loss: float  # nats a token, on hold-outs after the last outer step; inf where it diverged
  gap: float | None  # of averaging, in the mean of the phases
  tau: int


def base_changes(s: settings.Settings, steps: int) -> dict[str, Any]:
  """What all candidates have: a few phases, with whose last step the cosine ends, and no rounds of re-sharding."""
  first = {'routing.method': s.routing.first} if s.routing.method == 'discriminative' else {}
  return BARE | first | {'inner.decay_steps': s.pretrain.steps + steps, **lasting(steps, s.train.steps_per_phase)}


def lasting(steps: int, tau: int) -> dict[str, int]:
  return {'train.steps_per_phase': tau, 'train.phases': steps // tau}


def taus(tau: int) -> list[int]:
  """Shorter phases that divide the config's, longest first."""
  found = [max(d for d in range(1, tau + 1) if tau % d == 0 and d <= max(1, tau / times)) for times in SHORTER]
  return sorted({d for d in found if d < tau}, reverse=True)


def longest_good(found: Iterable[Found]) -> Found:
  """Of candidates that differ in tau: the longest phases that cost less than `TOLERANCE`."""
  candidates = list(found)
  least = min(one.loss for one in candidates)
  return max((one for one in candidates if one.loss <= least + TOLERANCE), key=lambda one: one.tau)


def read(workdir: pathlib.Path, name: str, changes: Mapping[str, Any]) -> Found:
  """Of a run that is finished, or has diverged."""
  rows = [row for row in metrics.read_rows(workdir) if (row['kind'], row['stage']) == ('phase', 'train')]
  tau = json.loads((workdir / 'config.json').read_text())['train']['steps_per_phase']
  tokens = seals.read_json(workdir / 'shards' / '0' / 'meta.json', 'shard_tokens')['shard_tokens']
  losses = rows[-1]['holdout_loss_by_path'] if rows else []
  known = [(loss, n) for loss, n in zip(losses, tokens, strict=False) if loss is not None and n]
  total = sum(n for _, n in known)
  loss = math.fsum(loss * n for loss, n in known) / total if known else math.inf
  return Found(
    name, dict(changes), loss if math.isfinite(loss) else math.inf,
    averaging.mean([row.get('averaging_gap') for row in rows]), tau,
  )  # fmt: skip


def table(found: Sequence[Found], dense: Found | None) -> str:
  """For a person."""
  lines = [('', 'loss', 'less dense', 'averaging gap')]
  for one in [*([dense] if dense else []), *found]:
    less = f'{one.loss - dense.loss:+.3f}' if dense and one is not dense else ''
    gap = f'{one.gap:+.3f}' if one.gap is not None and one is not dense else ''
    lines.append((one.name, f'{one.loss:.3f}' if math.isfinite(one.loss) else 'diverged', less, gap))
  widths = [max(len(line[i]) for line in lines) for i in range(4)]
  padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
  return '\n'.join('  '.join(cells).rstrip() for cells in padded)


class Search:
  """Runs candidates one after another, each once."""

  def __init__(self, workdir: pathlib.Path, options: Sequence[str], reuse: str, steps: int, common: dict[str, Any]):
    self.workdir, self.options, self.reuse, self.steps, self.common = workdir, list(options), reuse, steps, common
    self.done: list[pathlib.Path] = []
    self.most = 0  # runs there will be

  def run(self, name: str, changes: Mapping[str, Any]) -> Found:
    """Raises SystemExit where a run was stopped, or its input is wrong."""
    folder = self.workdir / name.replace(' ', '-')
    if not (folder / 'stages' / 'evaluate.json').exists():
      print(f'[{len(self.done) + 1}/{self.most}] {name}', file=sys.stderr, flush=True)
      other = self.reuse or (str(self.done[0]) if self.done else '')
      line = [*self.options, f'--workdir={folder}', *([f'--reuse={other}'] if other else [])]
      line += [f'--config.{field}={value}' for field, value in (self.common | dict(changes)).items()]
      cache = {'JAX_COMPILATION_CACHE_DIR': str((self.workdir / 'cache').absolute())}  # many have the same programs
      status = subprocess.run(
        [sys.executable, '-m', 'dipaco_jax.main', *line], env=cache | os.environ, stdout=subprocess.DEVNULL
      ).returncode
      if status not in (0, command.DIVERGED):
        sys.exit(status)
    self.done.append(folder)
    return read(folder, name, changes)


def search(s: settings.Settings, runs: Search) -> tuple[Found, list[Found], Found]:
  """(the best, all candidates, the dense path)."""
  tau, steps = s.train.steps_per_phase, runs.steps
  is_plain = all(getattr(s.outer, field.split('.')[1]) == value for field, value in PLAIN.items())
  runs.most = 4 - is_plain + len(taus(tau))
  share = runs.most * steps / (s.train.phases * tau)
  print(f'{runs.most} short runs, with {share:.0%} of the steps of the run itself; fewer with --steps', file=sys.stderr)
  best = runs.run(FIRST.replace('-', ' '), {})
  found = [best]

  def try_it(name: str, changes: Mapping[str, Any]) -> Found:
    found.append(runs.run(name, best.changes | dict(changes)))
    return found[-1]

  if not is_plain:
    best = min(best, try_it('averages by row', PLAIN), key=lambda one: one.loss)
  best = longest_good([best, *(try_it(f'tau {t}', lasting(steps, t)) for t in taus(tau))])
  rate = s.train.learning_rate or s.inner.learning_rate
  best = min(best, try_it('a third of the rate', {'train.learning_rate': rate / 3}), key=lambda one: one.loss)
  return best, found, runs.run('dense', ALONE)


def advice(s: settings.Settings, best: Found) -> dict[str, Any]:
  """The options of the whole run: as many steps as the config has."""
  steps = s.train.phases * s.train.steps_per_phase
  return best.changes | (lasting(steps, best.tau) if best.tau != s.train.steps_per_phase else {})


def main():
  f = flags.FLAGS
  if not f.config or not f.workdir:
    raise ValueError('name a config with --config and a folder of its own with --workdir')
  s = settings.from_dict(config_file.read(f.config, OVERRIDES))
  tau = s.train.steps_per_phase
  if math.prod(size for _, size in s.grid) < 2:
    raise ValueError('config.grid has one path, which exchanges nothing: there is nothing to find')
  if not s.train.early_stopping:
    raise ValueError('config.train.early_stopping=False holds no rows back, by which candidates are judged')
  steps = f.steps or tau * max(PHASES, math.ceil(s.train.phases * SHARE))
  if steps % tau:
    raise ValueError(f'--steps={steps} should be a multiple of config.train.steps_per_phase={tau}')
  options = [f'--config={f.config}', *(f'--config.{o.name}={o.text}' for o in OVERRIDES)]
  workdir = pathlib.Path(f.workdir)
  best, found, dense = search(s, Search(workdir, options, f.reuse, steps, base_changes(s, steps)))
  chosen = advice(s, best)
  report = {'steps': steps, 'dense': dense._asdict(), 'candidates': [one._asdict() for one in found], 'options': chosen}
  checkpoint.write_json(workdir / 'recipe.json', metrics.plain(report))
  words = shlex.join([*(f'--config.{name}={value}' for name, value in chosen.items()), f'--reuse={workdir / FIRST}'])
  print(f'loss on hold-outs after {steps} steps, nats a token\n\n{table(found, dense)}\n')
  if not best.loss < dense.loss:
    print('no candidate is below the dense path yet: paths need more steps, text that differs more, or a longer base')
  print(words)


OVERRIDES: list[config_file.Override] = []

if __name__ == '__main__':
  flags.DEFINE_string('config', None, 'As for main: a file, or a config that comes with this, and its fields.')
  flags.DEFINE_string('workdir', None, 'Where the short runs are kept; made if it is not there.')
  flags.DEFINE_string('reuse', '', 'A run whose base and shards are taken, as far as its settings are these.')
  flags.DEFINE_integer('steps', 0, 'Steps of each short run; by default 4 phases or 5% of all.', lower_bound=0)
  try:
    sys.argv[1:], OVERRIDES[:] = config_file.split(sys.argv[1:])
  except ValueError as e:
    command.fail(str(e))
  command.run(main)
