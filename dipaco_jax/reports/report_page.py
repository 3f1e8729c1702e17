"""The page of one run: what came out, the pictures, what it was made with."""

import json
from typing import Any

from dipaco_jax.core import fields as fields_lib
from dipaco_jax.core import settings
from dipaco_jax.core.grid import Grid
from dipaco_jax.pipeline import stage_records
from dipaco_jax.reports import excerpts_html, failures, headline, html_page, plot_style
from dipaco_jax.reports.figures import Picture, Run, count, size
from dipaco_jax.routing import chunk_losses
from dipaco_jax.storage import seals
from dipaco_jax.training.progress import duration

GLOSSARY = (
  ('Base model', 'One small language model, trained first and alone. Every path starts as a copy of it.'),
  ('Level', 'A part of the network. It exists in several versions, its modules.'),
  ('Module', 'One version of a level. Paths that share a module pool what they learn for it.'),
  ('Path', 'One module of every level: a whole language model, no larger than the base. A text needs only one path.'),
  ('Shard', 'The training text of one path. The router looks at the first tokens of each text and picks its path.'),
  ('Phase', 'Each path trains alone on its shard for some steps; then modules are averaged over their paths, once.'),
  ('Perplexity', 'How many tokens the model hesitates between on text it has not seen. Lower is better.'),
)

SECTIONS = (
  ('Quality', ('validation_perplexity', 'perplexity_by_domain', 'perplexity_by_path', 'early_stopping')),
  ('Training', ('losses', 'holdout_losses', 'gradient_norm', 'learning_rate', 'tokens_per_s', 'outer_gradients',
                'agreement', 'averaging_gap')),
  ('Who reads what', ('shard_sizes', 'loss_matrix', 'kinds_by_paths', 'excerpts')),
  ('The grid', ('grid', 'siblings')),
  ('Cost', ('time_by_stage', 'bytes_sent')),
  ('Islands', ('timeline', 'island_bytes')),
)  # fmt: skip
ALIKE = 1.3  # that much higher may the one be of two pictures that stand side by side


def make(run: Run, found: dict[str, Picture]) -> str:
  parts = [_header(run), html_page.folded('New to DiPaCo? The words on this page', html_page.terms(GLOSSARY))]
  panels = _panels(run)
  for title, names in SECTIONS:
    here = _placed([(name, found[name]) for name in names if name in found])
    here += [panels[name] for name in names if name in panels]
    if here:
      parts += [html_page.section(title), *here]
  return html_page.page(f'DiPaCo run {run.workdir.name}', [*parts, *_details(run)])


def _panels(run: Run) -> dict[str, str]:
  """What is no picture, by name; without what an older run has not made."""
  file = run.workdir / chunk_losses.FILE
  if not file.exists():
    return {}
  return {'excerpts': excerpts_html.make(chunk_losses.Excerpts.from_dict(seals.read_json(file, 'documents')), run.grid)}


def _placed(found: list[tuple[str, Picture]]) -> list[str]:
  """Pictures of half the width stand in pairs; one that is left, or is much higher, has its caption beside it."""
  placed: list[str] = []
  narrow = [one for one in found if one[1].figure.get_figwidth() < 6]
  narrow.sort(key=lambda one: one[1].figure.get_figheight() > ALIKE * plot_style.HEIGHT)
  while narrow:
    pair, narrow = narrow[:2], narrow[2:]
    heights = [picture.figure.get_figheight() for _, picture in pair]
    if len(pair) == 2 and max(heights) > ALIKE * min(heights):
      narrow.insert(0, pair.pop())
    placed.append(html_page.row([_figure(*one, 'alone' if len(pair) == 1 else '') for one in pair]))
  return placed + [html_page.row([_figure(*one, 'wide')]) for one in found if one[1].figure.get_figwidth() >= 6]


def _figure(name: str, picture: Picture, kind: str) -> str:
  with plot_style.left_out(name):
    figure = picture.figure
    return html_page.figure(plot_style.to_svg(figure, name), name, plot_style.title(figure), picture.caption, kind)
  return ''


def _header(run: Run) -> str:
  r, P = run.report, run.grid.num_paths
  shape = ' × '.join(map(str, run.grid.shape))  # noqa: RUF001
  name = f'{P} paths on a grid of {shape}' if len(run.grid.shape) > 1 else f'{P} paths' if P > 1 else 'One path'
  quiet = ' · '.join(words for words in (str(run.workdir), _when(r), _devices(run)) if words)
  title = html_page.element('h1', name) + html_page.element('p', quiet, 'quiet')
  title += html_page.element('p', run.notice, 'notice') if run.notice else ''
  return title + _lead(run) + _failures(run) + html_page.cards(_cards(run))


def _failures(run: Run) -> str:
  """What went wrong and was survived."""
  told = failures.words(failures.read(run.workdir))
  return html_page.box(''.join(html_page.element('p', line[:1].upper() + line[1:]) for line in told)) if told else ''


def _when(r: dict[str, Any]) -> str:
  """'2026-11-22 17:53 to 18:05 +01:00'."""
  if not r['began']:
    return ''
  day, began, offset = r['began'][:10], r['began'][11:16], r['began'][19:]
  if not r['ended']:
    return f'since {day} {began} {offset}'
  ended = r['ended'][11:16] if r['ended'][:10] == day else r['ended'][:16]
  return f'{day} {began} to {ended} {offset}'


def _devices(run: Run) -> str:
  """'4 × TPU v5 lite · bfloat16 · dipaco_jax 0.1.0, jax 0.7.2'."""
  r = run.report
  number = f'{r["num_devices"]} × ' if (r['num_devices'] or 1) > 1 else ''  # noqa: RUF001
  versions = f'dipaco_jax {r["versions"]["dipaco_jax"]}, jax {r["versions"]["jax"]}'
  return ' · '.join(words for words in (number + r['device'] if r['device'] else '', r['dtype'], versions) if words)


def _lead(run: Run) -> str:
  r = run.report
  if not r['perplexity'] or not r['base_perplexity']:
    return html_page.element('p', _lead_so_far(run), 'lead')
  told = headline.held_back(run.results.get('tokenize', {}))
  short = stage_records.too_little(r['validation_tokens_by_path'] or [], run.settings.data.min_validation_tokens)
  notes = [told, f'{short[:1].upper()}{short[1:]}.' if short else '']
  return html_page.element('p', headline.lead(r), 'lead') + html_page.element(
    'p', ' '.join(filter(None, notes)), 'quiet'
  )


def _lead_so_far(run: Run) -> str:
  """Of a run that is not finished."""
  base, last = run.report['base_perplexity'], run.history.last
  if not base:
    return f'Complete so far: {", ".join(run.results)}.'
  after = f', the paths have {last["perplexity"]:.2f} after phase {last["phase"]}' if last else ''
  return f'The base model has a validation perplexity of {base:.2f}{after}.'


def _cards(run: Run) -> list[tuple[str, str]]:
  r = run.report
  found = []
  if r['perplexity'] and r['base_perplexity']:
    words = f'validation perplexity of the {"paths" if run.grid.num_paths > 1 else "path"}'
    found.append(_perplexity(r, '', words))
    found += [_perplexity(r, 'control_', f'of {headline.DENSE}')] if r['control_perplexity'] else []
    found.append(_perplexity(r, 'base_', 'of the base model'))
  elif len(run.history.validation.steps):
    found.append((f'{run.history.validation.values[-1]:.2f}', 'validation perplexity so far'))
  if r['parameters_path']:
    found.append((count(r['parameters_path']), 'parameters in a path, all that runs at a time'))
    if run.grid.num_paths > 1:
      found.append((count(r['parameters_total']), 'parameters in all modules together'))
  if r['train_tokens']:
    found.append((count(r['train_tokens']), 'training tokens, those of the base included'))
  elif len(run.history.phases):
    found.append((f'{max(run.history.phases):,} of {run.settings.train.phases:,}', 'phases are done'))
  if not run.results.get('train') and len(speed := run.history.tokens_per_s[1].values):
    found.append((f'{speed[-1, 0]:,.0f}', 'tokens a second, lately'))
  span = 'from text to evaluation' if 'evaluate' in run.results else 'so far'
  found.append((duration(sum(r['wall_s'].values())), f'of wall time, {span}'))
  return found


def _perplexity(r: dict[str, Any], whose: str, words: str) -> tuple[str, str]:
  """A card: the figure, and whose it is, with its interval."""
  interval = r[f'{whose}perplexity_interval']
  return f'{r[f"{whose}perplexity"]:.2f}', words + (f' ({interval[0]:.2f} to {interval[1]:.2f})' if interval else '')


def _details(run: Run) -> list[str]:
  r, file = run.report, run.workdir / 'command.txt'
  numbers = [(k.replace('_', ' '), _number(k, v)) for k, v in r.items() if isinstance(v, (int, float)) or v is None]
  chosen, default = fields(run.settings), fields(settings.Settings())
  changed = [(k, v, default[k]) for k, v in chosen.items() if v != default[k]]
  digests = [('config', r['config_sha256']), ('modules', r['modules_sha256'] or 'not known')]
  parts = [html_page.section('The run')]
  if file.exists():
    command = file.read_text(errors='replace').strip()
    parts.append(html_page.box(html_page.element('b', 'Command') + html_page.element('pre', command)))
  changes = html_page.table(changed, ('field', 'this run', 'default'), 'left')
  return [
    *parts,
    html_page.box(html_page.element('b', 'What differs from the defaults') + changes),
    html_page.folded('All fields', html_page.table(list(chosen.items()), name='left')),
    html_page.folded('All figures', html_page.table(numbers)),
    html_page.folded('Paths', html_page.table(_paths(run), ('path', f'its place: {", ".join(run.grid.names)}'), 'left'))
    if len(run.grid.shape) > 1
    else '',
    html_page.folded('Versions', html_page.table(list(r['versions'].items()), name='left')),
    html_page.folded('Digests (sha256)', html_page.table(digests, name='left')),
  ]


def _paths(run: Run) -> list[tuple[str, str]]:
  return [(str(i), ', '.join(map(str, at))) for i, at in enumerate(run.grid.points())]


def fields(s: settings.Settings) -> dict[str, str]:
  """Every field as words."""
  levels = [f'{name}: {pattern} over {", ".join(axes) or "nothing"}' for name, pattern, axes in s.levels]
  nested = s.to_dict() | {'grid': str(Grid(s.grid)), 'levels': '; '.join(levels)}
  flat = fields_lib.flatten(nested).items()
  return {name: value if isinstance(value, str) and value else json.dumps(value) for name, value in flat}


def _number(name: str, value: float | None) -> str:
  if value is None:
    return 'not known'
  if 'bytes_' in name:
    return size(value)
  return f'{value:,.4g}' if isinstance(value, float) else f'{value:,}'
