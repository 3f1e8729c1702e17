"""Outcomes of the short runs of `recipe`, and their comparisons."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dipaco_jax.algorithm import averaging_gap
from dipaco_jax.core import paired


class Outcome(NamedTuple):
  """The outcome of a candidate, averaged over its seeds."""

  name: str
  changes: dict[str, Any]  # fields of the config
  loss: float  # nats per token of validation documents; inf if it diverged
  gap: float | None  # the averaging gap, mean over the phases
  tau: int
  seconds: float  # of training
  losses: tuple[paired.Losses, ...] = ()  # of each seed; () if it diverged

  def to_json(self) -> dict[str, Any]:
    return {name: value for name, value in self._asdict().items() if name != 'losses'}


class Comparison(NamedTuple):
  """A candidate and the best one before it."""

  candidate: Outcome
  other: Outcome
  difference: paired.Difference | None  # of their losses; None if there are too few documents, or one diverged

  @property
  def is_better(self) -> bool:
    if not (math.isfinite(self.candidate.loss) and math.isfinite(self.other.loss)):
      return self.candidate.loss < self.other.loss
    return self.difference is not None and self.difference.high < 0

  @property
  def is_worse(self) -> bool:
    return Comparison(self.other, self.candidate, opposite(self.difference)).is_better


def opposite(x: paired.Difference | None) -> paired.Difference | None:
  return x and paired.Difference(-x.mean, -x.high, -x.low)


def compare(candidate: Outcome, other: Outcome) -> Comparison:
  has_both = candidate.losses and other.losses
  return Comparison(candidate, other, paired.compare(candidate.losses, other.losses) if has_both else None)


def read_outcome(workdir: pathlib.Path, name: str, changes: Mapping[str, Any]) -> Outcome:
  """Reads the outcome of a run that is finished, or has diverged."""
  from dipaco_jax.pipeline import document_losses, stage_records  # not for --help
  from dipaco_jax.storage import seals
  from dipaco_jax.telemetry import metrics_log

  s, stages = stage_records.read_settings(workdir), stage_records.read_stages(workdir)
  rows = [row for row in metrics_log.read_rows(workdir) if (row['kind'], row['stage']) == ('phase', 'train')]
  seconds = stages.get('train', {'wall_s': math.nan})['wall_s']
  gap = averaging_gap.mean_gap([row.get('averaging_gap') for row in rows])
  losses: tuple[paired.Losses, ...] = ()
  loss = math.inf
  if 'evaluate' in stages:
    documents = document_losses.read(workdir)
    if documents is None:
      raise seals.Damaged(workdir / document_losses.FILE)
    measured = paired.Losses(documents.nats['paths'], documents.tokens, documents.content)
    losses, loss = (measured,), float(measured.nats.sum() / measured.tokens.sum())
  return Outcome(name, dict(changes), loss, gap, s.train.steps_per_phase, seconds, losses)


def combine(outcomes: Sequence[Outcome]) -> Outcome:
  """Returns one outcome for those of several seeds."""
  loss = math.fsum(x.loss for x in outcomes) / len(outcomes)
  losses = tuple(one for x in outcomes for one in x.losses) if math.isfinite(loss) else ()
  gap = averaging_gap.mean_gap([x.gap for x in outcomes])
  seconds = math.fsum(x.seconds for x in outcomes)
  return outcomes[0]._replace(loss=loss, gap=gap, seconds=seconds, losses=losses)


def table(compared: Sequence[Comparison], dense: Outcome) -> str:
  """Returns a row for the dense path, the first candidate, and each candidate with the best one before it."""
  from dipaco_jax.reports import comparison  # not for --help

  lines = [['', 'loss', 'compared with', 'difference', '95% interval', 'averaging gap', 'seconds']]
  lines.append(_row(dense._replace(gap=None), '', None))
  lines += [_row(compared[0].other, '', None)] if compared else []
  lines += [_row(x.candidate, x.other.name, x.difference) for x in compared]
  return comparison.text(lines)


def _row(one: Outcome, other: str, difference: paired.Difference | None) -> list[str]:
  loss = f'{one.loss:.3f}' if math.isfinite(one.loss) else 'diverged'
  mean = f'{difference.mean:+.3f}' if difference else ''
  interval = f'{difference.low:+.3f} to {difference.high:+.3f}' if difference else ''
  gap = '' if one.gap is None else f'{one.gap:+.3f}'
  return [one.name, loss, other, mean, interval, gap, f'{one.seconds:,.0f}' if math.isfinite(one.seconds) else '']


def describe(compared: Comparison) -> str:
  """Returns in one sentence which of the two is better, or that they are level."""
  one, other, difference = compared
  if difference is None:
    figures = ''
  else:
    figures = f' ({difference.mean:+.3f} nats a token, 95% interval {difference.low:+.3f} to {difference.high:+.3f})'
  if compared.is_better or compared.is_worse:
    return f'{one.name} is {"better" if compared.is_better else "worse"} than {other.name}{figures}'
  return f'not significant: {one.name} and {other.name} are level{figures}'


def to_json(best: Outcome, compared: Sequence[Comparison], dense: Outcome) -> dict[str, Any]:
  """Returns the outcomes as `recipe.json` has them."""
  candidates = [compared[0].other.to_json() if compared else best.to_json()]
  for candidate, other, difference in compared:
    beside = {'compared_with': other.name, 'difference': difference and difference._asdict()}
    candidates.append(candidate.to_json() | beside)
  return {'dense': dense.to_json(), 'candidates': candidates}


def conclusions(best: Outcome, compared: Sequence[Comparison], dense: Outcome) -> list[str]:
  """Returns what the comparisons show, a sentence to a line."""
  lines = [describe(x) + ('' if x.is_better else f'; {x.other.name} stays') for x in compared]
  beside_dense = compare(best, dense)
  lines.append(describe(beside_dense))
  if not beside_dense.is_better:
    lines.append('paths that do not improve on the dense path need more steps, more varied text, or a longer base')
  if not best.changes:
    lines.append('the config stays as it is; a run can take its text and base from the folder below')
  return lines
