"""The page of one run: results, pictures and settings (templates/report.html)."""

import json
from typing import Any, NamedTuple

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import fields, settings
from dipaco_jax.pipeline import samples, stage, stage_records
from dipaco_jax.reports import (
  audit_lines,
  excerpt_views,
  failures,
  figures,
  headline,
  pages,
  path_figures,
  plot_style,
  result_cards,
  result_tables,
  run_data,
  sample_views,
  time_table,
)
from dipaco_jax.reports.amounts import count, size
from dipaco_jax.reports.plot_style import Picture
from dipaco_jax.reports.result_cards import Card
from dipaco_jax.reports.run_data import Run
from dipaco_jax.routing import chunk_losses
from dipaco_jax.storage import seals

ALIKE = 1.3  # the largest ratio of the heights of two pictures that stand side by side


class Figure(NamedTuple):
  """A picture in its place on a page."""

  name: str
  title: str
  caption: str
  svg: str
  height: float  # inches
  kind: str  # '': half as wide as the page; 'alone': that, with its caption next to it; 'wide': as wide as the page

  @classmethod
  def of(cls, name: str, picture: Picture) -> 'Figure':
    drawn = picture.figure
    kind = 'wide' if drawn.get_figwidth() >= 6 else ''
    title = next((axes_title for ax in drawn.axes if (axes_title := ax.get_title(loc='left'))), '')
    return cls(name, title, picture.caption, plot_style.to_svg(drawn, name), drawn.get_figheight(), kind)


def render(run: Run, pictures: dict[str, Picture], reload_s: int = 0) -> str:
  """Returns the page of a run; with `reload_s`, browsers load it again after that time."""
  r = run.report
  drawn = {}
  for name, picture in pictures.items():
    with plot_style.left_out(name):
      drawn[name] = Figure.of(name, picture)
  chosen, default = settings_in_words(run.settings), settings_in_words(settings.from_dict({}))
  file = run.workdir / chunk_losses.FILE
  excerpts = None
  if file.exists():  # else all paths are one model
    excerpts = excerpt_views.page_content(chunk_losses.Excerpts.from_dict(seals.read_json(file, 'documents')), run.grid)
  return pages.render(
    'report.html',
    run=run,
    reload_s=reload_s,
    name=_name(run.grid),
    about=[line for line in (str(run.workdir), _when(r), *_devices(r)) if line],
    lead=headline.lead(r) if r['perplexity'] and r['base_perplexity'] else _lead_so_far(run),
    notes=_notes(run) if r['perplexity'] and r['base_perplexity'] else [],
    failures=[*audit_lines.in_words(r), *failures.in_words(failures.read_failures(run.workdir))],
    cards=_cards(run),
    sections={title: arrange([drawn[n] for n in names if n in drawn]) for title, names in figures.SECTIONS.items()},
    seconds=time_table.by_stage(r['seconds']) if r['seconds'] else None,
    seconds_by_path=_seconds_by_path(r),
    excerpts=excerpts,
    kind_of_text=run_data.kind_of_text(run.settings),
    by_kind=result_tables.by_kind(r, run_data.kind_of_text(run.settings).partition(' ')[0]),
    by_answer=result_tables.by_answer(r),
    by_path=result_tables.by_path(r, _row_names(run.grid)),
    training=result_tables.of_training(run, _phase_of_control(run), path_figures.best_versions(run)),
    samples=sample_views.page_content(samples.read(run.workdir), r),
    command=stage_records.read_command(run.workdir),
    changed=[(name, value, default[name]) for name, value in chosen.items() if value != default[name]],
    fields=list(chosen.items()),
    figures=_figures(r),
    paths=[(str(path), ', '.join(map(str, place))) for path, place in enumerate(run.grid.points())],
    digests=[('config', r['config_sha256']), ('modules', r['modules_sha256'] or 'not known')],
  )


def arrange(drawn: list[Figure]) -> list[list[Figure]]:
  """Returns rows of figures: narrow ones in pairs of similar height, or alone; then wide ones."""
  narrow = sorted((one for one in drawn if one.kind != 'wide'), key=lambda one: one.height > ALIKE * plot_style.HEIGHT)
  rows = []
  while narrow:
    pair = narrow[:2]
    heights = [one.height for one in pair]
    if len(pair) == 1 or max(heights) > ALIKE * min(heights):
      pair = [narrow[0]._replace(kind='alone')]
    narrow = narrow[len(pair) :]
    rows.append(pair)
  return rows + [[one] for one in drawn if one.kind == 'wide']


def _row_names(grid: Grid) -> list[str]:
  """Returns what paths are called in tables: their names, or 'path 3' without names."""
  names = run_data.path_names(grid)
  return names if grid.coordinate_names else [f'path {name}' for name in names]


def _name(grid: Grid) -> str:
  if len(grid.shape) > 1:
    return f'{grid.num_paths} paths on a grid of {" × ".join(map(str, grid.shape))}'  # noqa: RUF001
  return f'{grid.num_paths} paths' if grid.num_paths > 1 else 'One path'


def _when(r: dict[str, Any]) -> str:
  """Returns '2026-11-22 17:53 to 18:05 +01:00'."""
  if not r['began']:
    return ''
  day = r['began'][:10]
  began = r['began'][11:16]
  offset = r['began'][19:]
  if not r['ended']:
    return f'since {day} {began} {offset}'
  ended = r['ended'][11:16] if r['ended'][:10] == day else r['ended'][:16]
  return f'{day} {began} to {ended} {offset}'


def _devices(r: dict[str, Any]) -> list[str]:
  """Returns ['4 × TPU v5 lite', 'bfloat16', 'dipaco_jax 0.1.0, jax 0.7.2']; '' for unknown values."""
  number = f'{r["num_devices"]} × ' if (r['num_devices'] or 1) > 1 else ''  # noqa: RUF001
  versions = f'dipaco_jax {r["versions"]["dipaco_jax"]}, jax {r["versions"]["jax"]}'
  return [number + r['device'] if r['device'] else '', r['dtype'], versions]


def _seconds_by_path(r: dict[str, Any]) -> time_table.Table | None:
  all_paths, by_path = (r['seconds'] or {}).get('train', {}), r['seconds_by_path'] or []
  return time_table.by_path(by_path, all_paths) if all_paths and any(by_path) and len(by_path) > 1 else None


def _notes(run: Run) -> list[str]:
  least, tokens = run.settings.data.min_validation_tokens, run.report['validation_tokens_by_path'] or []
  short = stage_records.too_little(tokens, least)
  tokenized = run.results.get('tokenize', {})
  weights = {source.name: source.weight for source in fields.sources(run.settings.data.train)}
  notes = (
    headline.sources(tokenized, weights),
    headline.held_back(tokenized),
    headline.validation_size(run.report, tokenized),
    headline.early_stopping(run.report),
    *headline.text_left_out(tokenized),
    headline.why_no_interval(run.report),
    f'{short[:1].upper()}{short[1:]}.' if short else '',
  )
  return [note for note in notes if note]


def _phase_of_control(run: Run) -> int | None:
  """Returns the phase that the dense control is taken from; None if there is no control."""
  file = run.workdir / stage.CONTROL / 'paths' / 'best.json'
  if not len(run.history.control_holdout.steps):
    return None
  return seals.read_json(file, 'version')['version'][0] if file.exists() else run.settings.train.phases


def _lead_so_far(run: Run) -> str:
  base, last = run.report['base_perplexity'], run.history.last
  if not base:
    return f'Complete so far: {", ".join(run.results)}.'
  after = f', the paths have {last["perplexity"]:.2f} after phase {last["phase"]}' if last else ''
  return f'The base model has a validation perplexity of {base:.2f}{after}.'


def _cards(run: Run) -> list[Card]:
  """Returns the key figures with their titles."""
  r = run.report
  cards = _perplexity_cards(run)
  if r['parameters_path']:
    many = run.grid.num_paths > 1
    description = 'parameters in a path: only these are used to read or write a text' if many else 'parameters'
    more = [f'All modules together have {count(r["parameters_total"])} parameters.'] if many else []
    cards.append(Card(count(r['parameters_path']), description, more))
  if r['train_tokens']:
    which = 'base and all paths' if run.grid.num_paths > 1 else 'base and path'
    cards.append(Card(count(r['train_tokens']), f'training tokens of {which}'))
  elif len(run.history.phases):
    cards.append(Card(f'{max(run.history.phases):,} of {run.settings.train.phases:,}', 'phases are done'))
  if not run.results.get('train') and len(speed := run.history.tokens_per_s[1].values):
    cards.append(Card(f'{speed[-1, 0]:,.0f}', 'tokens a second, lately'))
  total, _, lost = headline.total_time(r).partition(', ')
  stages = 'all stages' if 'evaluate' in run.results else 'the stages so far'
  cards.append(Card(total, f'time of {stages}{", " * bool(lost)}{lost}'))
  return cards


def _perplexity_cards(run: Run) -> list[Card]:
  if run.report['perplexity'] and run.report['base_perplexity']:
    return result_cards.of_result(run.report)
  values = run.history.validation.values
  return [Card(f'{values[-1]:.2f}', 'validation perplexity so far')] if len(values) else []


def settings_in_words(s: settings.Settings) -> dict[str, str]:
  """Returns every field, by its dotted name."""
  levels = [f'{name}: {pattern} over {", ".join(axes) or "nothing"}' for name, pattern, axes in s.levels]
  nested = s.to_dict() | {'grid': str(Grid(s.grid)), 'levels': '; '.join(levels)}
  flat = fields.flatten(nested).items()
  return {name: value if isinstance(value, str) and value else json.dumps(value) for name, value in flat}


def _figures(r: dict[str, Any]) -> list[tuple[str, str]]:
  """Returns the figures that are single numbers, and the range of each path's epochs."""
  single = [(k, _number(k, v)) for k, v in r.items() if v is None or isinstance(v, (int, float))]
  epochs = [('epochs_by_path', headline.span(r['epochs_by_path']))] if r['epochs_by_path'] else []
  return [(name.replace('_', ' '), value) for name, value in single + epochs]


def _number(name: str, value: float | None) -> str:
  if value is None:
    return 'not measured'
  if name.endswith('bytes') or 'bytes_per_phase' in name:
    return size(value)
  return f'{value:,.4g}' if isinstance(value, float) else f'{value:,}'
