"""What workers of unequal speed cost, and what each remedy would give, before any of them is built.

    python benchmarks/unequal.py                  some minutes on an idle core; --quick: one minute

A schedule is simulated event by event on a virtual clock (unequal_simulation.py), and a small model is really trained
by it (unequal_training.py): times are simulated, losses are real. In each scenario, all workers together are as fast as
equal ones. The reference is equal workers under today's rules (`wait`). Its loss after three quarters of its phases is
the target, and "time" is the time until a rule reaches it, divided by the reference's. Losses between two outer steps
are interpolated. "steps" is the same ratio for the time until as many steps count as in the reference; --notrain
computes it alone, in seconds. "loss" and "worst" are losses minus the reference's after equally many steps that count:
the mean of all shards, and that of the shard that lost most. The columns from "goodput" on say what became of the steps
that all workers could have made in the run. All numbers are medians over seeds; failures are one draw.

Simulated: speeds, who takes which task, leases, backups, checkpoints, failures, restarts, and fetching a state that
another worker trained (5 s). Not simulated: the time of outer steps and of exchanging modules (wire.py has it),
heartbeats, replays, publishing of checkpoints that a hand-over needs, and speeds that change. Phases of the mean worker
take `--phase_s`; only its ratio to the times above matters.

The last line is JSON, with the seconds of each worker by cause.
"""

import collections
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import unequal_rules
import unequal_simulation
from absl import app, flags
from unequal_rules import DROP, Rule

FLAGS = flags.FLAGS
LONGEST = 12  # times the reference's time: a run that has not reached the target then has failed
TARGET = 0.75  # share of the reference's phases

QUORUM = Rule(quorum=0.75, grace=0.1)
RULES = {
  'wait': Rule(),
  'backup': Rule(spares=1),
  'hand over': Rule(hand_over=2.0),
  'hand over at once': Rule(hand_over=1.0),
  'quorum, late next': QUORUM,
  'quorum, late drop': QUORUM._replace(late=DROP),
  'quorum, late at once': QUORUM._replace(begins_at_once=True),
  'unequal tau': Rule(by_time=True),
  'unequal tau, moved': Rule(by_time=True, moves=True),
  'quorum + unequal tau': QUORUM._replace(by_time=True),
  'both, late at once': QUORUM._replace(by_time=True, begins_at_once=True),
}


class Scenario(NamedTuple):
  """Relative speeds of workers, repeated for all of them, and failures."""

  first: tuple[float, ...]  # of the first workers
  others: float = 1.0
  failures_per_hour: float = 0.0


SCENARIOS = {
  'equal': Scenario(()),
  'one slow': Scenario((0.1,)),
  'mixed': Scenario((1.0, 0.5, 0.25, 0.1) * 4),
  'failing': Scenario((), failures_per_hour=60.0),
  'failing 15': Scenario((), failures_per_hour=15.0),
  'failing 125': Scenario((), failures_per_hour=125.0),
}
SETUPS: dict[str, tuple[str, int, tuple[str, ...]]] = {  # method, workers, scenarios
  'DiLoCo, 8 workers': ('diloco', 8, ('equal', 'one slow', 'mixed', 'failing')),
  '4x4, 16 workers': ('grid', 16, ('equal', 'one slow', 'mixed', 'failing')),
  '4x4, 8 workers': ('grid', 8, ('equal', 'one slow')),
  '4x4 without a level that all share, 16 workers': ('grid-apart', 16, ('equal', 'one slow')),
}
LARGE: dict[str, tuple[str, int, tuple[str, ...]]] = {  # whose schedules alone are simulated
  'DiLoCo, 1,000 workers': ('diloco-1000', 1000, ('equal', 'failing 15', 'failing', 'failing 125'))
}
QUICK: dict[str, tuple[str, ...]] = {'DiLoCo, 8 workers': ('equal', 'one slow')}


def make_workers(scenario: Scenario, number: int, spares: int, mean_speed: float) -> unequal_rules.Workers:
  """Returns workers whose mean speed is given, without spares; with spares, all together are as fast as without."""
  relative = [*scenario.first[:number], *[scenario.others] * (number - len(scenario.first)), *[1.0] * spares]
  scale = number * mean_speed / sum(relative)
  speeds = tuple(scale * speed for speed in relative)
  return unequal_rules.Workers(speeds, scenario.failures_per_hour, checkpoint_steps=max(1, FLAGS.tau // 4))


class Curve:
  """What was measured during a run."""

  def __init__(self):
    self.times: list[float] = []
    self.counted: list[float] = []  # steps, up to then
    self.losses: list[np.ndarray] = []  # [shards, S]

  def add(self, time: float, counted: float, losses: np.ndarray) -> None:
    """Adds a point."""
    self.times.append(time)
    self.counted.append(counted)
    self.losses.append(losses)

  def mean_losses(self) -> np.ndarray:
    """Returns the mean losses of all shards, [points, S]."""
    return np.stack(self.losses).mean(1)

  def time_to(self, target: np.ndarray) -> np.ndarray:
    """Returns the times at which each seed first has its target loss; infinity where it never does."""
    return np.array(
      [unequal_rules.first_time(self.times, column, x) for column, x in zip(self.mean_losses().T, target, strict=True)]
    )

  def losses_at(self, counted: float) -> np.ndarray:
    """Returns the losses after so many steps that count, [shards, S]."""
    stacked = np.stack(self.losses)
    flat = stacked.reshape(len(stacked), -1).T
    return np.array([np.interp(counted, self.counted, column) for column in flat]).reshape(stacked.shape[1:])


class Run:
  """A rule in a scenario."""

  def __init__(self, method: str, number: int, scenario: Scenario, rule: Rule, trainer: Any):
    self.trainer = trainer  # or None
    mean_speed = FLAGS.tau / FLAGS.phase_s
    workers = make_workers(scenario, number, rule.spares, mean_speed)
    work = unequal_rules.Work(unequal_rules.METHODS[method].module_paths(), FLAGS.tau, FLAGS.phase_s)
    self.simulation = unequal_simulation.Simulation(work, workers, rule)
    self.steps_per_s = sum(workers.speeds)
    self.round_s = FLAGS.phase_s * work.num_paths / number  # in which equal workers train all paths for a phase
    self.all_steps = work.num_paths * FLAGS.tau * FLAGS.phases
    self.curve = Curve()
    self.add(0.0)

  def add(self, counted: float) -> None:
    """Adds a point to the curve; a loss of 0 if nothing is trained."""
    self.curve.add(self.simulation.time, counted, self.trainer.losses() if self.trainer else np.zeros((1, 1)))

  def follow(self, target: np.ndarray | None) -> None:
    """Trains until all seeds have a target loss and as many steps count as in the reference, or for too long."""
    for entries in self.simulation.run():
      for entry in entries if self.trainer else ():
        self.trainer.perform(entry)
      time = self.simulation.time
      has_closed = any(isinstance(entry, unequal_rules.Close) for entry in entries)
      if has_closed and time >= self.curve.times[-1] + self.round_s / 5:
        counted = self.simulation.shares()['counted'] * time * self.steps_per_s
        self.add(counted)
        is_there = target is None or np.all(np.isfinite(self.curve.time_to(target)))
        if (is_there and counted >= self.all_steps * (1 - 1e-6)) or time > LONGEST * FLAGS.phases * self.round_s:
          return


class Reference(NamedTuple):
  """Equal workers under today's rules."""

  time: float  # to the target
  all_s: float  # to the end
  target: np.ndarray  # [S]
  losses: np.ndarray  # at the end, [shards, S]


def make_reference(run: Run) -> Reference:
  """Returns the target that the reference sets."""
  place = round(TARGET * (len(run.curve.times) - 1))
  return Reference(run.curve.times[place], run.curve.times[-1], run.curve.mean_losses()[place], run.curve.losses[-1])


def summarize(run: Run, reference: Reference) -> dict[str, Any]:
  """Returns the results of a run."""
  ratios = run.curve.time_to(reference.target) / reference.time
  lost = run.curve.losses_at(run.all_steps) - reference.losses
  median = float(np.median(ratios))
  return {
    'time_s': median * reference.time, 'time_ratio': median, 'time_ratios': ratios.tolist(),
    'steps_ratio': float(np.interp(run.all_steps, run.curve.counted, run.curve.times)) / reference.all_s,
    'loss': float(np.median(lost.mean(0))), 'worst_loss': float(np.median(lost.max(0))),
    'shares': run.simulation.shares(), 'simulated_s': run.simulation.time, 'worker_s': run.simulation.seconds(),
    'times': run.curve.times, 'losses': np.median(run.curve.mean_losses(), 1).tolist(),
  }  # fmt: skip


def rules_of(method: str, scenario: str) -> list[str]:
  """Returns the rules to compare: with equal workers, most are the same; paths move in grids; few for many workers."""
  if method == 'diloco-1000':
    return ['wait', 'quorum, late drop', 'unequal tau', 'quorum + unequal tau'] if scenario != 'equal' else ['wait']
  if scenario == 'equal':
    return ['wait', 'backup']
  return [name for name, rule in RULES.items() if method != 'diloco' or not rule.moves]


COLUMNS = 'scenario', 'rule', 'time, s', 'time', 'steps', 'loss', 'worst', 'goodput', *unequal_simulation.CAUSES[1:]


def print_row(found: dict[str, Any]) -> None:
  """Prints a row of a Markdown table."""
  numbers = ['', '', f'{found["steps_ratio"]:.2f}', '', '']
  if FLAGS.train:
    numbers[:2] = f'{found["time_s"]:,.0f}', f'{found["time_ratio"]:.2f}'
    numbers[3:] = f'{found["loss"]:+.3f}', f'{found["worst_loss"]:+.3f}'
  shares = [f'{100 * share:.0f}%' for share in found['shares'].values()]
  print('|', ' | '.join((found['scenario'], found['rule'], *numbers, *shares)), '|', flush=True)


def measure_setup(name: str, scenarios: Sequence[str], make_trainer: Callable[[str], Any]) -> list[dict[str, Any]]:
  """Prints the table of a setup, and returns its rows."""
  method, number, _ = (SETUPS | LARGE)[name]
  print(f'\n{name}\n\n| {" | ".join(COLUMNS)} |\n|{"---|" * len(COLUMNS)}', flush=True)
  rows: list[dict[str, Any]] = []
  reference = None
  for scenario in (x for x in scenarios if x == 'equal' or x in (FLAGS.scenarios or scenarios)):
    for rule in rules_of(method, scenario):
      run = Run(method, number, SCENARIOS[scenario], RULES[rule], make_trainer(method))
      run.follow(reference.target if reference else None)
      reference = reference or make_reference(run)
      rows.append({'setup': name, 'scenario': scenario, 'rule': rule} | summarize(run, reference))
      print_row(rows[-1])
  return rows


def trainers() -> Callable[[str], Any]:
  """Returns a function that makes a trainer of a method; the trainers of a method share what they have computed."""
  import unequal_training  # with JAX, which schedules alone do not need

  text = unequal_training.Text()
  base = unequal_training.pretrain(text, FLAGS.seeds)
  memories: dict[str, Any] = collections.defaultdict(unequal_training.Memory)
  return lambda name: unequal_training.Trainer(unequal_rules.METHODS[name], text, base, memories[name])


def main(argv: list[str]) -> None:
  del argv
  make_trainer = trainers() if FLAGS.train else lambda name: None
  known = SETUPS if FLAGS.train else SETUPS | LARGE
  if unknown := {*(FLAGS.setups or ())} - {*known}:
    raise app.UsageError(f'--setups={min(unknown)!r} is simulated alone: add --notrain')
  setups: dict[str, tuple[str, ...]] = {
    name: of_setup for name, (_, _, of_setup) in known.items() if name in (FLAGS.setups or known)
  }
  if FLAGS.quick:
    setups = dict(QUICK)
  rows = [row for name, scenarios in setups.items() for row in measure_setup(name, scenarios, make_trainer)]
  sizes = {name: FLAGS[name].value for name in ('seeds', 'phases', 'tau', 'phase_s')}
  print(json.dumps(sizes | {'rows': rows}))


if __name__ == '__main__':
  flags.DEFINE_bool('quick', False, 'Whether to run only two scenarios of DiLoCo.')
  flags.DEFINE_bool('train', True, 'Whether to train; otherwise only schedules are simulated, in seconds.')
  flags.DEFINE_multi_enum('setups', None, [*SETUPS, *LARGE], 'Setups to run; by default all.')
  flags.DEFINE_multi_enum('scenarios', None, list(SCENARIOS), 'Scenarios to run beside equal workers; by default all.')
  flags.DEFINE_integer('seeds', 3, 'Number of seeds, which are trained together.', lower_bound=1)
  flags.DEFINE_integer('phases', 12, 'Phases of the reference.', lower_bound=2)
  flags.DEFINE_integer('tau', 20, 'Inner steps of a phase of the mean worker.', lower_bound=1)
  flags.DEFINE_float('phase_s', 160.0, 'Seconds of a phase of the mean worker.', lower_bound=1.0)
  app.run(main)
