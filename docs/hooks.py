"""Hooks of MkDocs: the table of config fields, and pages for files outside docs/.

Pages link to files of the repository by relative paths, such as `../dipaco_jax/core/grid.py#L12`, so that links work
where the repository is viewed. Each such file becomes a page of the site, to which the link then leads: Markdown and
pictures as they are, notebooks as their cells, other files as listings with numbered lines.
"""

import dataclasses
import json
import pathlib
import posixpath
import re

from mkdocs.structure.files import File, Files, InclusionLevel

from dipaco_jax.command_line import config_file, usage
from dipaco_jax.core import settings

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r'\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)')
LISTINGS = {'.py': 'python', '.sh': 'bash', '.yaml': 'yaml', '.cfg': 'ini', '.svg': 'xml'}
FIELDS = '<!-- fields: filled in when the site is built -->'


def on_files(files: Files, config) -> Files:
  """Adds a page for every file outside docs/ that a page links to, or that the navigation names."""
  waiting = [f'docs/{file.src_uri}' for file in files.documentation_pages()]
  waiting += [name for name in _leaves(config.nav) if not files.get_file_from_path(name)]
  seen = set(waiting)
  while waiting:
    path = waiting.pop()
    if not _is_documentation(path):
      files.append(_page(path, config))
    if path.endswith('.md'):
      links = {_target(path, link) for link, _ in LINK.findall((ROOT / path).read_text())}
      new = {link for link in links - seen if (ROOT / link).is_file() and not _is_documentation(link)}
      seen |= new
      waiting += sorted(new)
  return files


def on_page_markdown(markdown: str, page, **_) -> str:
  """Fills in the fields, and makes links to files outside docs/ links to their pages."""
  uri = page.file.src_uri
  inside = (ROOT / 'docs' / uri).is_file()
  path = f'docs/{uri}' if inside else uri

  def rewritten(found: re.Match) -> str:
    target, anchor = _target(path, found[1]), found[2] or ''
    relative = posixpath.relpath(_uri(target), posixpath.dirname(uri) or '.')
    return f']({relative}{anchor.replace("#L", "#__codelineno-0-") if re.fullmatch("#L[0-9]+", anchor) else anchor})'

  return markdown if uri.startswith('source/') else LINK.sub(rewritten, markdown.replace(FIELDS, _fields()))


def on_page_content(html: str, page, **_):
  """Tells MkDocs of the lines of a listing, which it sees in no other way, so that it checks links to them."""
  page.present_anchor_ids.update(re.findall(r' id="(__codelineno-[0-9-]+)"', html))


def _leaves(nav) -> list[str]:
  """Pages that the navigation names."""
  if isinstance(nav, str):
    return [nav]
  return [leaf for item in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(item)]


def _target(path: str, link: str) -> str:
  """What a link of the file `path` leads to, from the root of the repository."""
  return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _is_documentation(path: str) -> bool:
  """Whether MkDocs finds a file by itself."""
  return path.startswith('docs/') and not path.endswith('.py')


def _uri(path: str) -> str:
  """Where the site has a file of the repository."""
  if _is_documentation(path):
    return path.removeprefix('docs/')
  return path if path.endswith(('.md', '.png')) else f'source/{path}.md'


def _page(path: str, config) -> File:
  """A file outside docs/, as the site has it."""
  file = ROOT / path
  if path.endswith(('.md', '.png')):
    return File.generated(config, path, abs_src_path=str(file), inclusion=InclusionLevel.NOT_IN_NAV)
  if file.suffix == '.ipynb':
    return File.generated(config, _uri(path), content=_notebook(file), inclusion=InclusionLevel.NOT_IN_NAV)
  kind = LISTINGS.get(file.suffix, 'text')
  listing = f'---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n``````{kind} linenums="1"\n{file.read_text()}``````\n'
  return File.generated(config, _uri(path), content=listing, inclusion=InclusionLevel.NOT_IN_NAV)


def _notebook(file: pathlib.Path) -> str:
  """The cells of a notebook, one after another."""
  cells = [(cell['cell_type'], ''.join(cell['source'])) for cell in json.loads(file.read_text())['cells']]
  return '\n\n'.join(words if kind == 'markdown' else f'```python\n{words}\n```' for kind, words in cells)


def _fields() -> str:
  """A table of fields for every section of a config."""
  words, sections = usage.explanations(), {}
  for name, value in config_file.FIELDS.items():
    sections.setdefault(name.rpartition('.')[0], []).append((name, value))
  parts = []
  for section, fields in sorted(sections.items(), key=lambda item: _order(item[0])):
    rows = [f'| `{name}` | `{value!r}` | {_cell(words.get(name, ""))} |' for name, value in fields]
    heading = f'## {section}\n\n{words.get(section, "")}' if section else '## The whole run'
    parts.append('\n'.join([heading, '', '| field | default | |', '|---|---|---|', *rows]))
  return '\n\n'.join(parts)


def _order(section: str) -> int:
  names = ['', *(field.name for field in dataclasses.fields(settings.Settings))]
  return names.index(section)


def _cell(words: str) -> str:
  return words.replace('|', r'\|').replace('_', r'\_').replace('*', r'\*')
