"""Where the time of a run went, in words and tables: seconds by cause and stage, or by path."""

from collections.abc import Collection, Mapping, Sequence

from dipaco_jax.processes import time_use
from dipaco_jax.processes.display import duration
from dipaco_jax.processes.time_use import Seconds

WORDS = {  # in the order of tables and pictures
  time_use.INNER: 'inner steps',
  time_use.OUTER: 'outer steps',
  time_use.INPUT: 'input',
  time_use.EVALUATE: 'evaluation',
  time_use.CHECKPOINT: 'checkpoints',
  time_use.COMPILE: 'compilation',
  time_use.START: 'start',
  time_use.STAGES: 'text, router, shards',
  time_use.STORAGE: 'storage',
  time_use.DATABASE: 'database',
  time_use.WAIT: 'waiting for others',
  time_use.LOST: 'lost to restarts',
  time_use.OTHER: 'other work',
}
NAMED = 5  # causes in a line
STAGES = {'control': 'dense control'}  # names of stages for readers, where they differ

ByStage = Mapping[str, Seconds]
Table = tuple[list[tuple[str, ...]], tuple[str, ...]]  # rows, and the head of the columns


def in_words(seconds: ByStage) -> str:
  """Returns a line with the largest causes of all stages, and goodput; '' if nothing is known."""
  totals = total(seconds.values())
  if not (all_s := sum(totals.values())):
    return ''
  largest = sorted(totals, key=lambda cause: -totals[cause])
  named = [f'{WORDS[cause]} {_share(totals[cause], all_s)}' for cause in largest if totals[cause]]
  rest = all_s - sum(totals[cause] for cause in largest[:NAMED])
  named = [*named[:NAMED], *([f'the rest {_share(rest, all_s)}'] if len(named) > NAMED else [])]
  goodput = time_use.goodput(seconds.get('train', {}))
  good = f'; goodput of training {goodput:.0%}' if goodput is not None else ''
  return f'time {duration(all_s)}: {", ".join(named)}{good}'


def by_stage(seconds: ByStage) -> Table:
  """Returns a row for each cause, with a column for each stage and one for all, and the sums of the columns."""
  columns = {**seconds, **({'in all': total(seconds.values())} if len(seconds) > 1 else {})}
  causes = [cause for cause in WORDS if any(of.get(cause) for of in columns.values())]
  rows = [(WORDS[cause], *(_seconds(of.get(cause, 0.0)) for of in columns.values())) for cause in causes]
  sums = 'sum', *(_seconds(sum(of.values())) for of in columns.values())
  return [*rows, sums], ('seconds', *(STAGES.get(name, name) for name in columns))


def by_path(seconds: Sequence[Seconds], all_paths: Seconds) -> Table:
  """Returns a row for each path, one for what of the `all_paths` they spent together, and one for all of it."""
  of_paths = total(seconds)
  together = {cause: max(0.0, s - of_paths[cause]) for cause, s in all_paths.items()}
  named = [*((str(path), of) for path, of in enumerate(seconds)), ('together', together), ('in all', all_paths)]
  causes = [cause for cause in WORDS if all_paths.get(cause)]
  rows = [(name, *(_seconds(of.get(cause, 0.0)) for cause in causes), _seconds(sum(of.values()))) for name, of in named]
  return rows, ('path', *(WORDS[cause] for cause in causes), 'sum')


def total(parts: Collection[Seconds]) -> dict[str, float]:
  """Returns the sums by cause."""
  return {cause: sum(of.get(cause, 0.0) for of in parts) for cause in WORDS}


def _seconds(seconds: float) -> str:
  return f'{seconds:,.1f}' if seconds else ''


def _share(seconds: float, all_s: float) -> str:
  return f'{seconds / all_s:.0%}'
