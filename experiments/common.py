"""A table: rows (runs, once per seed) by columns (figures of their results), written again after every run.

    python experiments/TABLE.py --size=SIZE --seeds=0,1,2 --data=TRAIN --validation=VALIDATION --workdir=DIR

runs missing rows and writes `results/<size>/<table>.json` and `.png`. A result is found again in the file of any
table, even if its workdir no longer exists. If the config has changed since, it is left out.
"""

import contextlib
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import config
import intervals
import runs
import source_losses
from absl import flags
from deadline import Deadline
from runs import Record, Row

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display
from dipaco_jax.storage import lock

RESULTS = runs.HERE / 'results'
LONGEST_RUN_S = 7 * 24 * 3600.0
TRY_AGAIN = (command.TRY_AGAIN, 130, 143)  # exit statuses of a run that continues when it is started again

Results = dict[tuple[str, int], Record]  # by row and seed
Prepare = Callable[[Sequence[runs.Run]], None]


class Column(NamedTuple):
  """A figure of every run."""

  title: str
  field: str  # of a result; `a.b` is field b of field a, `a.-1` the last of its values
  form: str = '.2f'
  # The row whose figure of the same seed is subtracted; * is what a row's name begins with, up to _, # what follows it.
  against: str = ''
  interval: bool = False  # Student's t, 90%, instead of the standard deviation


class Table(NamedTuple):
  """`rows(size)`, and `picture(table, rows, results) -> figure`, if it has one."""

  name: str
  title: str
  rows: Callable[[str], Sequence[Row]]
  columns: Sequence[Column]
  picture: Callable[..., Any] | None
  lines: Callable[..., list[list[str]]] | None = None  # its cells, of (rows, results), in a form of its own
  sizes: Sequence[str] = tuple(config.SIZES)  # that it has rows for
  measure: Callable[[runs.Run, pathlib.Path], Record] | None = None  # what a run's record has beside the usual fields
  part: Callable[[str], str] = lambda row: ''  # by name of a row; seeds' variance is pooled over rows of one part


# -- results


def read(table: Table, size: str, folder: pathlib.Path) -> Results:
  """Returns a table's results, without those of configs that have changed since."""
  file = folder / size / f'{table.name}.json'
  records = read_records(file) if file.exists() else []
  rows = {row.name: row for row in table.rows(size)}
  return {
    (r['row'], r['seed']): r
    for r in records
    if r['row'] in rows and r['config'] == runs.make(size, rows[r['row']], r['seed']).config
  }


def read_all(size: str, folder: pathlib.Path) -> dict[str, Record]:
  """Every result of a size, by its run's key; of equal runs the last, with losses by source if one has them."""
  records = [r for file in sorted((folder / size).glob('*.json')) for r in read_records(file)]
  records.sort(key=lambda r: bool(r.get('by_source')))
  return {f'{r["config"]}-{r["text"]}': r for r in records}


def read_records(file: pathlib.Path) -> list[Record]:
  contents = json.loads(file.read_text())
  return source_losses.put_sources_back(contents['runs'], contents.get('sources', {}))


def write(table: Table, size: str, folder: pathlib.Path, results: Results):
  """The table's file and its picture; rows in the table's order, seeds rising."""
  (folder / size).mkdir(parents=True, exist_ok=True)
  with lock.in_directory(folder / size):
    results |= {at: r for at, r in read(table, size, folder).items() if at not in results}  # of others beside us
    publish_table(table, size, folder, results)


def publish_table(table: Table, size: str, folder: pathlib.Path, results: Results):
  """As `write`, of these results alone."""
  order = [row.name for row in table.rows(size)]
  records = [results[at] for at in sorted(results, key=lambda at: (order.index(at[0]), at[1]))]
  records, sources = source_losses.set_sources_apart(records)
  contents: dict[str, Any] = {'table': table.name, 'lowest': lowest(table, size, results), 'runs': records}
  contents |= {'sources': sources} if sources else {}
  publish(folder / size / f'{table.name}.json', json.dumps(contents, indent=1) + '\n')
  if records and table.picture:
    from dipaco_jax.reports import plot_style

    publish(folder / size / f'{table.name}.png', plot_style.to_png(table.picture(table, table.rows(size), results)))


def publish(file: pathlib.Path, data: str | bytes):
  """Whole or not at all."""
  file.parent.mkdir(parents=True, exist_ok=True)
  aside = file.with_name(f'.{file.name}.{os.getpid()}')
  aside.write_bytes(data.encode() if isinstance(data, str) else data)
  os.replace(aside, file)


# -- figures


def figure(record: Record | None, field: str) -> Any:
  """A field of a result, or, of a list, the value at a number; None where there is none.

  Of perplexities by kind of text, a name of config.MEANS is a geometric mean, in which each kind has the same weight.
  """
  found: Any = record
  for name in field.split('.'):
    if isinstance(found, list) and found:
      found = found[int(name)]
    elif name in config.MEANS and isinstance(found, dict):
      of_kinds = [x for kind, x in found.items() if kind not in config.MEANS[name] and x]
      found = statistics.geometric_mean(of_kinds) if of_kinds else None
    else:
      found = found.get(name) if isinstance(found, dict) else None
  return found


def figures(results: Results, row: str, column: Column) -> list[float]:
  """A column's, of every seed that has it."""
  first, _, second = row.partition('_')
  found, against = [], column.against.replace('*', first).replace('#', second)
  for (name, seed), record in sorted(results.items()):
    mine = figure(record, column.field)
    other = figure(results.get((against, seed)), column.field) if against else 0
    if name == row and mine is not None and other is not None:
      found.append(mine - other)
  return found


def lowest(table: Table, size: str, results: Results) -> str | None:
  """The row whose first column's mean is the lowest."""
  found = {row.name: figures(results, row.name, table.columns[0]) for row in table.rows(size)}
  return min((name for name in found if found[name]), key=lambda name: statistics.fmean(found[name]), default=None)


def cell(numbers: Sequence[float], form: str, interval: bool = False) -> str:
  """Mean, and of several seeds the standard deviation over them, or the interval; of counts the mean alone."""
  if not numbers:
    return ''
  mean, several = statistics.fmean(numbers), len(numbers) > 1 and form.endswith('f') and not form.endswith('.0f')
  if several and interval:
    half = intervals.half_width(numbers)
    return f'{mean:{form}} ({mean - half:{form}} to {mean + half:{form}})'
  return f'{mean:{form}} ± {statistics.stdev(numbers):{form.lstrip("+")}}' if several else f'{mean:{form}}'


def to_markdown(table: Table, size: str, results: Results) -> str:
  """Rows that were not run are named below."""
  if table.lines:
    return in_columns(table.lines(table.rows(size), results))
  not_run, lines = (
    [],
    [['', 'seeds', *(column.title for column in table.columns)], ['---', *['---:'] * (len(table.columns) + 1)]],
  )
  for row in table.rows(size):
    if not (mine := [record for (name, _), record in results.items() if name == row.name]):
      not_run.append(row.title)
      continue
    by_column = [(column, figures(results, row.name, column)) for column in table.columns]
    cells = [cell(found, column.form, column.interval) + fewer(found, mine) for column, found in by_column]
    if any(record['perplexity'] is None for record in mine):
      cells[0] = 'diverged'
    lines.append([row.title, str(len(mine)), *cells])
  return in_columns(lines) + (f'\n\nNot run: {"; ".join(not_run)}.' if not_run else '')


def in_columns(lines: Sequence[Sequence[str]]) -> str:
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def fewer(found: Sequence[float], mine: Sequence[Record]) -> str:
  """Says where not all of a row's runs have a figure, as where the row that it is compared with has fewer seeds."""
  return f' (of {len(found)})' if 0 < len(found) < len(mine) else ''


# -- the script


def main(table: Table, prepare: Prepare = lambda missing: None):
  """Of a table's script; `prepare(missing)` makes what these runs start from."""
  define_flags(table.sizes)
  command.run(lambda: run(table, flags.FLAGS.size, pathlib.Path(flags.FLAGS.results), prepare))


def define_flags(sizes: Sequence[str] = tuple(config.SIZES)):
  usual = 'micro' if 'micro' in sizes else sizes[-1]
  flags.DEFINE_enum('size', usual, list(sizes), 'How large the runs are, see config.py.')
  flags.DEFINE_list('seeds', ['0'], 'A run of every row for each.')
  flags.DEFINE_list('rows', [], 'Run these rows only; none: all.')
  flags.DEFINE_string('data', '', 'Training text, globs as in config.data.train; none: that of the running Python.')
  flags.DEFINE_string('validation', '', 'Validation text, likewise.')
  flags.DEFINE_string('workdir', 'runs/experiments', 'Where the runs are.')
  flags.DEFINE_float(
    'minutes', 0, 'Stop after so many: no run starts that would not end in time; 0: no limit.', lower_bound=0
  )
  flags.DEFINE_string('results', str(RESULTS), 'Where tables and their pictures are.')


def run(table: Table, size: str, folder: pathlib.Path, prepare: Prepare) -> int:
  """Runs missing rows, seed by seed, so that an interrupted table has complete seeds. Returns 1 if a run failed."""
  rows, f = table.rows(size), flags.FLAGS
  if unknown := set(f.rows) - {row.name for row in rows}:
    raise InputError(f'--rows: there is no {", ".join(unknown)}; there are {", ".join(row.name for row in rows)}')
  planned = [runs.make(size, row, int(seed), f.data, f.validation) for seed in f.seeds for row in rows]
  results = read(table, size, folder)
  known = {} if table.measure else read_all(size, folder)  # records of other tables lack what this table measures
  check_text(table, size, folder, results, planned[0])
  results |= {(p.row.name, p.seed): known[p.key] | {'row': p.row.name} for p in planned if p.key in known}
  fill_losses(pathlib.Path(f.workdir) / size, planned, results)
  write(table, size, folder, results)
  wanted = [p for p in planned if not f.rows or p.row.name in f.rows]
  if missing := [p for p in wanted if (p.row.name, p.seed) not in results]:
    prepare(missing)
  failed = run_missing(table, folder, pathlib.Path(f.workdir) / size, wanted, results)
  print(f'{table.title}\n\n{to_markdown(table, size, results | read(table, size, folder))}')
  if failed:
    print(f'failed: {"; ".join(failed)}', file=sys.stderr)
  return int(bool(failed))


def check_text(table: Table, size: str, folder: pathlib.Path, results: Results, planned: runs.Run):
  """Raises InputError if existing results are of another text."""
  if any(r['text'] != planned.text for r in results.values()):
    raise InputError(f'{folder / size / table.name}.json is of another text: give its --data, or other --results')


def fill_losses(workdirs: pathlib.Path, planned: Sequence[runs.Run], results: Results) -> bool:
  """Adds losses by source to results that were made without them, if their workdirs are still there; whether to any."""
  filled = False
  for one in planned:
    record = results.get((one.row.name, one.seed))
    if record and not record.get('by_source') and (losses := runs.find_losses(one, workdirs, record)):
      results[one.row.name, one.seed] = record | {'by_source': losses}
      filled = True
  return filled


def run_missing(
  table: Table, folder: pathlib.Path, workdirs: pathlib.Path, wanted: Sequence[runs.Run], results: Results
) -> list[str]:
  """Adds to the results, and writes the table after every run; returns those that failed."""
  distinct = list({p.key: p for p in reversed(wanted)}.values())[::-1]
  todo = [p for p in distinct if (p.row.name, p.seed) not in results]
  failed: list[str] = []
  deadline = Deadline(flags.FLAGS.minutes)
  for i, one in enumerate(todo):
    with claim(workdirs, one.key) as claimed:
      if not claimed:
        print(f'{one.row.title}, seed {one.seed}: another process trains it', file=sys.stderr, flush=True)
      elif (one.row.name, one.seed) not in read(table, one.size, folder):
        done = [(p, results[p.row.name, p.seed]) for p in wanted if (p.row.name, p.seed) in results]
        if not deadline.allows(runs.seconds_left([one], done)):
          print(f'{one.row.title}, seed {one.seed}: not enough time is left', file=sys.stderr, flush=True)
          continue
        seconds = runs.seconds_left(todo[i:], done)
        left = f'; about {display.duration(seconds)} to go' if seconds is not None else ''
        print(f'[{i + 1}/{len(todo)}] {one.row.title}, seed {one.seed}{left}', file=sys.stderr, flush=True)
        if record := train(table, one, workdirs, failed):
          results |= {(p.row.name, p.seed): record | {'row': p.row.name} for p in wanted if p.key == one.key}
          write(table, one.size, folder, results)
  return failed


def train(table: Table, one: runs.Run, workdirs: pathlib.Path, failed: list[str]) -> Record | None:
  """The record of a run that has finished; None, and a line of `failed`, where it has not."""
  status = runs.execute(one, workdirs)
  if status in TRY_AGAIN:
    sys.exit(status)
  if runs.is_finished(one, workdirs):
    return runs.make_record(one, workdirs) | (table.measure(one, workdirs) if table.measure else {})
  failed.append(f'{one.row.name}, seed {one.seed}: exit status {status}')
  return None


def score_finished(table: Table, field: str, score: Callable[[runs.Run, pathlib.Path], Any]) -> int:
  """Of a script whose runs are other tables': adds `score(run, workdirs)` to each record, as this field."""
  f = flags.FLAGS
  folder, workdirs = pathlib.Path(f.results), pathlib.Path(f.workdir) / f.size
  results = read(table, f.size, folder)
  planned = [runs.make(f.size, row, int(seed), f.data, f.validation) for seed in f.seeds for row in table.rows(f.size)]
  if fill_losses(workdirs, planned, results):
    write(table, f.size, folder, results)
  for one in planned:
    name, seed = one.row.name, one.seed
    if (name, seed) in results or (f.rows and name not in f.rows):
      continue
    check_text(table, f.size, folder, results, one)
    if not runs.is_finished(one, workdirs):
      raise InputError(
        f'{name}, seed {seed} is not in {workdirs}: run the script of its table first, with the same options'
      )
    results[name, seed] = runs.make_record(one, workdirs) | {'row': name, field: score(one, workdirs)}
    write(table, f.size, folder, results)
  print(f'{table.title}\n\n{to_markdown(table, f.size, results)}')
  return 0


@contextlib.contextmanager
def claim(workdirs: pathlib.Path, key: str, wait: bool = False) -> Iterator[bool]:
  """Claims a run, or a base, for the block, which gets whether nobody else has it; `wait` waits until it is free."""
  place = workdirs / 'claims' / key
  place.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as held:
    try:
      held.enter_context(lock.locked(place, os.O_RDONLY, LONGEST_RUN_S if wait else 0))
    except lock.Held:
      yield False
      return
    yield True
