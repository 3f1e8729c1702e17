"""The page of an islands run while it trains, which the monitor writes from facts where `report.html` will be.

A path has one point for each phase. Paths proceed at different speeds: a phase that is not complete shows the paths
that are done with it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dipaco_jax.islands import run_history, screening_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.registry import Fact
from dipaco_jax.reports import live_report, run_report, timeline_plot

EVERY_S = 60.0


class LivePage:
  """Writes the page of a run whose text is prepared, from time to time."""

  def __init__(self, island: Island, every_s: float = EVERY_S):
    self.island, self.every_s = island, every_s
    self.pointers = run_history.Pointers(island)
    self.rows: list[dict[str, Any]] = []  # of complete phases
    self.phases = 0  # that are complete
    self.next, self.failed = time.monotonic() + every_s, False

  def write_if_due(self) -> None:
    """Writes the page if it is due. Never raises: a run does not end for its page."""
    if (started := time.monotonic()) < self.next:
      return
    try:
      self.write()
      self.failed = False
    except Exception as e:
      if not self.failed:  # once, as the cause may last for weeks
        logging.warning('the report of the run so far was not written (%s)', str(e) or repr(e))
      self.failed = True
    self.next = time.monotonic() + max(self.every_s, (time.monotonic() - started) / live_report.SHARE)

  def write(self) -> None:
    """Writes the page, unless no path is done with a phase yet, or the evaluator makes the report of the run."""
    registry, rows = self.island.registry, self.make_rows()
    if not rows or 'finish' in registry.counts():
      return
    self.island.fetch_trees()
    tasks = [timeline_plot.Task(*task) for task in run_history.timeline(self.island)['tasks']]
    text = run_report.page_so_far(self.island.run.workdir, rows, tasks)
    if 'finish' not in registry.counts():
      self.island.storage.write(live_report.PAGE, text.encode())

  def make_rows(self) -> list[dict[str, Any]]:
    """Makes rows as metrics.jsonl has them; those of complete phases are read once."""
    while self.is_complete(self.phases):
      found = run_history.read_phase(self.island, self.pointers, self.phases)
      after = screening_facts.first_step(self.island, self.phases + 1)
      row = run_history.phase_row(self.island, after, self.phases, found)
      # all of a phase at once, and last: what failed before is tried again from the phase's first row
      self.rows += [*self.steps(found.checkpoints), {'kind': 'phase', 'stage': 'train'} | row]
      self.phases += 1
    rows, phase = list(self.rows), self.phases
    while facts := self.island.registry.facts('checkpoint', number=phase):
      rows += self.steps(facts)
      phase += 1
    return rows

  def is_complete(self, phase: int) -> bool:
    """Returns whether all modules of the version after a phase are there, and evaluated."""
    registry, s = self.island.registry, self.island.run.settings
    if phase == s.train.phases or len(registry.facts('module', number=phase + 1)) < len(self.island.all_modules()):
      return False
    paths = self.island.layout.grid.num_paths
    return not s.train.early_stopping or len(registry.facts('evaluation', number=phase + 1)) == paths

  def steps(self, facts: Sequence[Fact]) -> Iterator[dict[str, Any]]:
    """Yields a row of steps for each path's checkpoint of a phase."""
    s = self.island.run.settings
    for fact in facts:
      _, losses, norms, rates, *_ = np.array(fact.meta['rows'], float).T
      tokens, seconds = fact.meta['timed_steps'] * s.train.batch_size * s.model.seq_len, fact.meta['timed_s']
      step = screening_facts.first_step(self.island, fact.number + 1)
      of_path = {'paths': [int(fact.key)], 'loss': [float(losses.mean())], 'grad_norm': [float(norms.mean())]}
      rate = {'learning_rate': float(rates[-1]), 'tokens_per_s': tokens / seconds if seconds else None}
      yield {'kind': 'step', 'stage': 'train', 'step': step} | of_path | rate
