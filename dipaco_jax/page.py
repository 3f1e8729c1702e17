"""A page that stands alone: one HTML file with its style and pictures inside, nothing fetched."""

import html
from collections.abc import Iterable, Sequence

from dipaco_jax import plain

STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { margin: 0; background: #f5f7fa; color: #243b53; line-height: 1.55; font-size: 16px;
  font-family: Inter, "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 48px 32px 80px }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -.01em; color: #102a43 }
h2 { font-size: 22px; margin: 56px 0 4px; color: #102a43 }
p { max-width: 46em; margin: 8px 0 }
.quiet { color: #627d98; font-size: 14px; margin: 0 }
.lead { font-size: 19px; margin: 20px 0 4px }
.cards { display: flex; flex-wrap: wrap; gap: 16px; margin: 28px 0 20px }
.card, figure, details, .box { background: #fff; border: 1px solid #e4e9f0; border-radius: 12px }
.card { padding: 16px 20px; flex: 1 1 170px } .card.first { flex-grow: 1.6 }
.card b { display: block; font-size: 27px; line-height: 1.25; color: #102a43; font-variant-numeric: tabular-nums;
  white-space: nowrap; letter-spacing: -.01em }
.card span { display: block; color: #627d98; font-size: 13.5px; line-height: 1.4; margin-top: 2px }
.card.first b { color: #0072b2 }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; margin-top: 16px }
figure { margin: 16px 0 0; padding: 18px 20px 14px }
.row figure { margin: 0 }
figure svg { display: block; width: 100%; height: auto; margin: 0 auto }
figcaption { color: #52667a; font-size: 14px; margin-top: 10px; max-width: 60em }
details, .box { padding: 12px 20px; margin-top: 16px }
summary { cursor: pointer; font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 12px 0 4px; font-size: 15px }
dt { font-weight: 600 } dd { margin: 0; max-width: 44em }
table { border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums; margin: 12px 0 4px }
th, td { text-align: left; padding: 6px 28px 6px 0; border-bottom: 1px solid #edf1f5; vertical-align: top }
th { font-weight: 600; color: #52667a }
td + td, th + th { text-align: right } td:last-child, th:last-child { padding-right: 0 }
.left td + td, .left th + th { text-align: left }
.scroll { overflow-x: auto }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13.5px }
pre { background: #f5f7fa; border-radius: 8px; padding: 12px 16px; overflow-x: auto; margin: 12px 0 4px }
.row .box { margin: 0; min-width: 0 }
.text { font: 12px/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; color: #102a43; margin: 10px 0 4px;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32em; overflow-y: auto }
.text span, .keys span { padding: 2px 0; -webkit-box-decoration-break: clone; box-decoration-break: clone }
.text sup { font: 600 10px/0 inherit; font-style: normal; padding: 0 2px; user-select: none }
.text .prefix { font-style: italic }
.text .worse { text-decoration: underline dotted 1.5px; text-underline-offset: 3px }
.keys { display: flex; flex-wrap: wrap; gap: 4px; font-size: 13.5px } .keys span { min-width: 26px; text-align: center;
  border-radius: 4px; padding: 0 6px; color: #102a43 }
@media (max-width: 560px) { main { padding: 28px 14px } .row { grid-template-columns: 1fr } }
@media print { body { background: #fff } figure, .card { break-inside: avoid } }
"""


def page(title: str, parts: Iterable[str]) -> str:
  return plain.text(
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{html.escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n'
    '<body>\n<main>\n' + '\n'.join(parts) + '\n</main>\n</body>\n</html>\n'
  )


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


def figure(svg: str, width: float, caption: str) -> str:
  """width: pixels that the picture has at most."""
  svg = svg.replace('<svg ', f'<svg role="img" style="max-width:{width:.0f}px" ', 1)
  return f'<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'


def row(figures: Sequence[str]) -> str:
  """Side by side, where the window is wide enough."""
  return f'<div class="row">{"".join(figures)}</div>'


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), name: str = '') -> str:
  top = f'<tr>{"".join(element("th", cell) for cell in head)}</tr>' if head else ''
  body = ''.join(f'<tr>{"".join(element("td", cell) for cell in cells)}</tr>' for cells in rows)
  return f'<div class="scroll"><table class="{name}">{top}{body}</table></div>'


def terms(found: Sequence[tuple[str, str]]) -> str:
  return f'<dl>{"".join(element("dt", term) + element("dd", words) for term, words in found)}</dl>'


def folded(title: str, inside: str, opened: bool = False) -> str:
  return f'<details{" open" if opened else ""}>{element("summary", title)}{inside}</details>'


def box(inside: str) -> str:
  return f'<div class="box">{inside}</div>'
