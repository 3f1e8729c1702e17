"""Writes the report of a run, or compares several.

Examples:

    python -m dipaco_jax.report --workdir=DIR                      report.json, report.html, plots/*.png
    python -m dipaco_jax.report --workdir=DIR --workdir=DIR2       a table; compare.html and compare.png under --out
"""

import contextlib
import logging
import pathlib

from absl import flags

from dipaco_jax.command_line import bucket_copy, command
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display
from dipaco_jax.reports import run_report
from dipaco_jax.storage import seals

RECORDS = 'stages', 'metrics.jsonl', 'paths', 'shards', 'evaluation', 'timeline.json'  # inputs of a report


def compare(workdirs: list[pathlib.Path], out: pathlib.Path) -> str:
  """Writes compare.html and compare.png into `out`; returns the tables as text.

  Warns of runs with another tokenizer, training text or validation set, which are compared in bits per byte only.
  """
  from dipaco_jax.pipeline import stage_records
  from dipaco_jax.reports import comparison, plot_style, run_contents
  from dipaco_jax.storage import files

  reports = {str(workdir): run_report.make_report(workdir) for workdir in workdirs}
  configs = {str(workdir): stage_records.read_settings(workdir) for workdir in workdirs}
  contents = [run_contents.read(workdir) for workdir in workdirs]
  warning = comparison.warning(run_contents.differences(contents))
  if warning:
    logging.warning('%s', warning)
  rows = comparison.table(reports, configs, in_bits=bool(warning))
  paired = comparison.paired(comparison.short_names(list(reports)), contents)
  pictures = comparison.pictures(workdirs, reports, configs, in_bits=bool(warning))
  files.write_file(out / 'compare.png', plot_style.to_png(pictures[0].figure))
  files.write_file(out / 'compare.html', comparison.render(rows, pictures, warning, paired))
  return '\n\n'.join([comparison.text(rows), *(comparison.text(table) for table in paired)])


def check_options(workdirs: list[str], out: str | None):
  """Raises InputError if a report of the workdirs cannot be made, or not be written to `out`."""
  places = [pathlib.Path(name).resolve() for name in workdirs]
  for i, name in enumerate(workdirs):
    if places[i] in places[:i]:
      raise InputError(f'--workdir={name} is named twice: a run is compared with others')
    if ',' in name and '://' not in name and not pathlib.Path(name).exists():
      raise InputError(f'--workdir={name}: there is no such folder; name each run by a --workdir of its own')
  if not out and len(workdirs) > 1 and '://' in workdirs[0]:
    raise InputError('--out is missing: the folder for the comparison of runs in buckets')
  if out and len(workdirs) == 1:
    raise InputError(f'--out={out} is for several runs; that of one is in its --workdir')
  if out and pathlib.Path(out).exists() and not pathlib.Path(out).is_dir():
    raise InputError(f'--out={out} is a file: name a folder')


def main():
  places = flags.FLAGS.workdir
  if not places:
    raise InputError('name a run with --workdir=DIR, or several to compare them')
  check_options(places, flags.FLAGS.out)
  command.quiet()
  if len(places) == 1:
    with display.doing('writing the report', tells=False):
      write(places[0])
    print(f'{places[0].rstrip("/")}/report.html, next to it report.json and plots/')
  else:
    out = pathlib.Path(flags.FLAGS.out or places[0])
    with contextlib.ExitStack() as stack:
      workdirs = [stack.enter_context(here(place)) for place in places]
      with seals.parsing(*workdirs):
        print(compare(workdirs, out))
    print(f'\n{out / "compare.html"}')


def write(place: str):
  """Writes the report of a run, in a folder or in a bucket."""
  trees = 'base', 'modules', 'control/modules'  # for the distances between modules
  with here(place, *trees) as workdir:
    with seals.parsing(*(workdir / name for name in RECORDS)):
      run_report.write(workdir)
    if '://' in place:
      bucket_copy.upload_pages(place, workdir)


def here(place: str, *trees: str) -> contextlib.AbstractContextManager[pathlib.Path]:
  """Returns the folder of a run: the workdir, or a copy of the bucket's files, with trees of these names."""
  return bucket_copy.copied(place, *trees) if '://' in place else contextlib.nullcontext(pathlib.Path(place))


if __name__ == '__main__':
  flags.DEFINE_multi_string(
    'workdir', [], 'Workdir of a run: a folder, s3://BUCKET/... or gs://BUCKET/... Repeat the option to compare runs.'
  )
  flags.DEFINE_string('out', None, 'Folder for compare.html and compare.png. By default, the first workdir.')
  command.run(main)
