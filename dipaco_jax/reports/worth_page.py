"""The page of what a federation is worth to an owner: its paths, alone and in the federation, and the base."""

from collections.abc import Mapping
from typing import Any

from dipaco_jax.core import bootstrap
from dipaco_jax.reports import category_plots, headline, pages, plot_style, report_page
from dipaco_jax.reports.plot_style import Picture

ALL = 'all paths'
HEAD = ('path', 'documents', 'base', 'alone', 'in the federation', 'federation against alone', 'alone against base')
WORDS = {
  'gain': 'the federation paid: its perplexity is lower than alone',
  'loss': 'the federation did not pay: its perplexity is higher than alone',
  'open': 'whether the federation paid is not known: the difference may be chance',
}


def render(report: Mapping[str, Any]) -> tuple[str, bytes]:
  """Returns the page and its picture as a PNG, from the content of compare.json."""
  drawn = picture(report)
  png = plot_style.to_png(drawn.figure)
  rows = [_row(name, about) for name, about in parts(report).items()]
  trained = [_training(name, about, report['phases']) for name, about in report['by_path'].items()]
  html = pages.render(
    'worth.html', owner=report['owner'], verdict=verdict(report), table=[HEAD, *rows],
    picture=report_page.Figure.of('worth', drawn), level=f'{bootstrap.LEVEL:.0%}',
    training=[('path', 'inner steps', 'tokens', 'alone, taken from phase'), *trained],
  )  # fmt: skip
  return html, png


def parts(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
  """Returns the figures of each path, and of all together where there are several."""
  return dict(report['by_path']) | ({ALL: report['all']} if 'all' in report else {})


def whole(report: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the figures of all paths of an owner."""
  return list(parts(report).values())[-1]


def verdict(report: Mapping[str, Any]) -> str:
  """Says whether the federation paid, with the difference and its interval."""
  about = whole(report)
  ratio, interval = about['ratio']['federation_to_alone'], about['ratio_interval']['federation_to_alone']
  kind = ('gain' if ratio < 1 else 'loss') if ratio and headline.is_significant(interval) else 'open'
  return f'{WORDS[kind]} ({_change(about, "federation_to_alone")})'


def in_words(report: Mapping[str, Any]) -> list[str]:
  """Returns the comparison in lines for a terminal."""
  about = whole(report)
  measured_on = f'{about["documents"]:,} held-back documents of {report["owner"]} ({about["targets"]:,} tokens)'
  of_parts = [_line(name, of_part) for name, of_part in parts(report).items()]
  return [f'perplexity on {measured_on}', *of_parts, verdict(report)]


def _line(name: str, about: Mapping[str, Any]) -> str:
  base, alone, federation = (_number(about['perplexity'][model]) for model in category_plots.WORTH)
  return f'{name}: base {base}; alone {alone}; in the federation {federation}: {_change(about, "federation_to_alone")}'


def picture(report: Mapping[str, Any]) -> Picture:
  """Draws the perplexity of each model with its interval, for each path."""
  groups = {
    name: [(about['perplexity'][model], about['perplexity_interval'][model]) for model in category_plots.WORTH]
    for name, about in parts(report).items()
  }
  caption = (
    'Perplexity of each model on the documents that were held back. Lower is better. Lines are intervals over '
    'documents; as all models are measured on the same documents, their differences are known better than these '
    'lines suggest.'
  )
  return Picture(category_plots.worth(groups), caption)


def _row(name: str, about: Mapping[str, Any]) -> tuple[str, ...]:
  changes = _change(about, 'federation_to_alone'), _change(about, 'alone_to_base')
  return (
    name,
    f'{about["documents"]:,}',
    *(_number(about['perplexity'][model]) for model in category_plots.WORTH),
    *changes,
  )


def _change(about: Mapping[str, Any], name: str) -> str:
  return headline.signed_change(about['ratio'][name], about['ratio_interval'][name])


def _training(name: str, about: Mapping[str, Any], phases: int) -> tuple[str, ...]:
  return name, f'{about["steps"]:,}', f'{about["tokens"]:,}', f'{about["phase_of_alone"]} of {phases}'


def _number(value: float | None) -> str:
  return '-' if value is None else f'{value:.2f}'
