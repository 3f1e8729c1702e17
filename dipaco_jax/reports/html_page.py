"""A page that stands alone: one HTML file with its style and pictures inside, nothing fetched, for light and dark."""

import html
from collections.abc import Iterable, Sequence

from dipaco_jax.core import printable
from dipaco_jax.reports import palette

# Names of colours, each light and dark: see palette.py.
COLOURS = {
  'ground': ('#f5f7fa', '#0e161e'),
  'ink': (palette.INK, palette.DARK[palette.INK]),
  'strong': ('#102a43', '#f5f8fb'),
  'quiet': (palette.GREY, palette.DARK[palette.GREY]),
  'accent': (palette.BLUE, palette.DARK[palette.BLUE]),
  'paper': (palette.PAPER, palette.DARK[palette.PAPER]),
  'edge': ('#dfe6ee', '#2b3b4b'),
  'notice': ('#fff4e5', '#33261a'),
}
STYLE = """
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55; font-size: 16px;
  font-family: Inter, "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; overflow-wrap: break-word }
main { max-width: 1120px; margin: 0 auto; padding: 48px 32px 80px }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -.01em; color: var(--strong) }
h2 { font-size: 22px; margin: 56px 0 16px; color: var(--strong) }
p { max-width: 46em; margin: 8px 0 }
.quiet { color: var(--quiet); font-size: 14px; margin: 0; max-width: none; overflow-wrap: anywhere }
.lead { font-size: 19px; margin: 20px 0 4px }
.notice { background: var(--notice); border: 1px solid var(--edge); border-radius: 12px; padding: 10px 20px;
  max-width: none; margin: 20px 0 0 }
.cards { display: flex; flex-wrap: wrap; gap: 16px; margin: 28px 0 16px }
.card, figure, details, .box { background: var(--paper); border: 1px solid var(--edge); border-radius: 12px }
.card { padding: 16px 18px; flex: 1 1 150px; max-width: 340px } .card.first { flex: 1.6 1 230px }
.card b { display: block; font-size: 25px; line-height: 1.25; color: var(--strong); letter-spacing: -.01em;
  font-variant-numeric: tabular-nums }
.card span { display: block; color: var(--quiet); font-size: 13.5px; line-height: 1.4; margin-top: 2px }
.card.first b { color: var(--accent) }
.row { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin-top: 16px }
figure { margin: 0; padding: 18px 20px 16px; min-width: 0 }
figure > div { max-width: 500px; margin: 0 auto }
figure svg { display: block; width: 100%; height: auto }
figure.wide, .row > figure.alone { grid-column: 1 / -1 }
figure.wide > div { max-width: none } figure.wide svg { min-width: 760px }
figure.alone { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 40px; align-items: center }
figcaption { color: var(--quiet); font-size: 14px; margin-top: 10px; max-width: 60em }
details, .box { padding: 12px 20px; margin-top: 16px; min-width: 0 }
summary { cursor: pointer; font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 12px 0 4px; font-size: 15px }
dt { font-weight: 600 } dd { margin: 0; max-width: 44em }
table { border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums; margin: 12px 0 4px }
th, td { text-align: left; padding: 6px 28px 6px 0; border-bottom: 1px solid var(--edge); vertical-align: top;
  overflow-wrap: anywhere; min-width: 6em }
th { font-weight: 600; color: var(--quiet) }
td + td, th + th { text-align: right } td:last-child, th:last-child { padding-right: 0 }
.left td + td, .left th + th { text-align: left }
.many td:first-child, .many th:first-child { position: sticky; left: 0; background: var(--paper); padding-right: 16px;
  white-space: nowrap }
.scroll { overflow-x: auto }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13.5px }
pre { background: var(--ground); border-radius: 8px; padding: 12px 16px; margin: 12px 0 4px; white-space: pre-wrap;
  overflow-wrap: anywhere }
.texts { columns: 430px; column-gap: 16px; margin-top: 16px }
.texts .box { margin: 0 0 16px; break-inside: avoid }
.text { font: 12.5px/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 10px 0 4px;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32em; overflow-y: auto }
.text span, .keys span { background: var(--light); color: var(--strong) }
.text span { padding: 2px 0; -webkit-box-decoration-break: clone; box-decoration-break: clone }
.text sup { font: 600 10px/0 inherit; font-style: normal; padding: 0 2px; user-select: none }
.text .prefix { font-style: italic }
.text .worse { text-decoration: underline dotted 1.5px; text-underline-offset: 3px }
.keys { display: flex; flex-wrap: wrap; gap: 4px; font-size: 13.5px; max-width: none }
.keys span { min-width: 26px; text-align: center; border-radius: 4px; padding: 0 6px }
@media (max-width: 860px) {
  .row, figure.alone { grid-template-columns: minmax(0, 1fr) } figure.alone { display: block }
}
@media (max-width: 560px) {
  main { padding: 28px 12px 48px } h1 { font-size: 28px } h2 { margin-top: 40px } .lead { font-size: 17px }
  .cards { gap: 12px } .card { padding: 12px 14px; flex-basis: 40%; max-width: none } .card.first { flex-basis: 100% }
  .card b { font-size: 20px } .card.first b { font-size: 25px }
  figure { padding: 14px 12px } details, .box { padding: 12px 14px }
  dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: 10px }
  .pairs tr { display: block; border-bottom: 1px solid var(--edge); padding: 6px 0 }
  .pairs th, .pairs td { display: block; border: 0; padding: 0; text-align: left !important }
  .pairs td:first-child { color: var(--quiet); font-size: 13.5px }
  .pairs tr:has(th) { display: none } .pairs td[data-of]::before { content: attr(data-of) ": "; color: var(--quiet) }
  th, td { padding-right: 16px } .many td:first-child { white-space: normal; min-width: 9em }
}
@media screen and (prefers-color-scheme: dark) { .text span, .keys span { background: var(--dark) } }
@media print { figure, .card, .box { break-inside: avoid } }
"""


def page(title: str, parts: Iterable[str]) -> str:
  inside = '\n'.join(parts)
  return printable.text(
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta name="color-scheme" content="light dark">\n'
    f'<title>{html.escape(title)}</title>\n<link rel="icon" href="data:,">\n'
    f'<style>{_colours()}{palette.variables(inside)}{STYLE}</style>\n</head>\n'
    f'<body>\n<main>\n{inside}\n</main>\n</body>\n</html>\n'
  )


def _colours() -> str:
  light, dark = (''.join(f'--{name}:{pair[i]};' for name, pair in COLOURS.items()) for i in (0, 1))
  on_dark = f'@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}'
  return f':root{{color-scheme:light dark;{light}}}\n{on_dark}\n'


def element(tag: str, text: str, name: str = '') -> str:
  """Text as it is, escaped."""
  return f'<{tag}{f" class={name}" if name else ""}>{html.escape(text)}</{tag}>'


def section(title: str, words: str = '') -> str:
  return element('h2', title) + (element('p', words) if words else '')


def cards(found: Sequence[tuple[str, str]]) -> str:
  """(figure, what it is); the first stands out."""
  inside = ''.join(
    f'<div class="card{" first" if i == 0 else ""}"><b>{html.escape(value)}</b><span>{html.escape(words)}</span></div>'
    for i, (value, words) in enumerate(found)
  )
  return f'<div class="cards">{inside}</div>'


def figure(svg: str, name: str, title: str, caption: str, kind: str = '') -> str:
  """A picture that is half as wide as the page; of kind 'alone', its caption beside it; 'wide', as wide as the page.

  On a small screen a wide one can be scrolled, rather than be too small to read.
  """
  svg = svg.replace('<svg ', f'<svg role="img" aria-label="{html.escape(title)}" ', 1)
  inside = scrolled(svg, title) if kind == 'wide' else f'<div>{svg}</div>'
  style = f' class="{kind}"' if kind else ''
  return f'<figure id="{name}"{style}>{inside}<figcaption>{html.escape(caption)}</figcaption></figure>'


def scrolled(inside: str, title: str) -> str:
  """What may be wider than the screen; keys scroll it too."""
  return f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(title)}">{inside}</div>'


def row(figures: Sequence[str]) -> str:
  """Side by side in two columns, where the window is wide enough."""
  return f'<div class="row">{"".join(figures)}</div>'


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), name: str = '') -> str:
  """A table; on a small screen its rows stand as blocks, or, with more columns than three, it can be scrolled."""
  few = max((len(cells) for cells in rows), default=0) <= 3
  kind = ' '.join(filter(None, (name, 'pairs' if few else 'many')))
  top = f'<tr>{"".join(element("th", cell) for cell in head)}</tr>' if head else ''
  body = ''.join(f'<tr>{"".join(_cells(cells, head))}</tr>' for cells in rows)
  inside = f'<table class="{kind}">{top}{body}</table>'
  return inside if few else scrolled(inside, 'table')


def _cells(cells: Sequence[str], head: Sequence[str]) -> Iterable[str]:
  """With the name of its column, where there are several to a name."""
  for i, cell in enumerate(cells):
    of = f' data-of="{html.escape(head[i])}"' if head and i else ''
    yield f'<td{of}>{html.escape(cell)}</td>'


def terms(found: Sequence[tuple[str, str]]) -> str:
  return f'<dl>{"".join(element("dt", term) + element("dd", words) for term, words in found)}</dl>'


def folded(title: str, inside: str, opened: bool = False) -> str:
  return f'<details{" open" if opened else ""}>{element("summary", title)}{inside}</details>'


def box(inside: str) -> str:
  return f'<div class="box">{inside}</div>'
