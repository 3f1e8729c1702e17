"""Hooks of MkDocs: pages for files outside docs/, and a check that every page of docs/ was built.

Pages link to files of the repository by relative paths, such as `../dipaco_jax/algorithm/grid.py#L12`, so that links
work where the repository is viewed. Each such file becomes a page of the site, to which the link then leads: Markdown
and pictures as they are, notebooks as their cells, other files as listings with numbered lines. The site's first page
is docs/index.md, so README.md, which MkDocs would put there too, has another address.
"""

import collections
import html.parser
import json
import pathlib
import posixpath
import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r'\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)')
LISTINGS = {'.py': 'python', '.sh': 'bash', '.yaml': 'yaml', '.cfg': 'ini', '.svg': 'xml'}
OTHER_URIS = {'README.md': 'readme.md'}


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
  clashes = [uri for uri, count in collections.Counter(file.dest_uri for file in files).items() if count > 1]
  if clashes:
    raise PluginError(f'several files have one address in the site: {", ".join(clashes)}; name others in OTHER_URIS')
  return files


def on_page_markdown(markdown: str, page, **_) -> str:
  """Makes links to files outside docs/ links to their pages."""
  uri = page.file.src_uri
  if uri.startswith('source/'):
    return markdown
  path = pathlib.Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

  def rewritten(found: re.Match) -> str:
    target, anchor = _target(path, found[1]), found[2] or ''
    relative = posixpath.relpath(_uri(target), posixpath.dirname(uri) or '.')
    return f']({relative}{anchor.replace("#L", "#__codelineno-0-") if re.fullmatch("#L[0-9]+", anchor) else anchor})'

  return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page, **_):
  """Tells MkDocs of the lines of a listing, which it sees in no other way, so that it checks links to them."""
  page.present_anchor_ids.update(re.findall(r' id="(__codelineno-[0-9-]+)"', html))


def on_post_build(config):
  """Raises PluginError if a built page lacks a heading of its page in docs/."""
  for page in sorted((ROOT / 'docs').glob('*.md')):
    built = pathlib.Path(config.site_dir) / ('' if page.stem == 'index' else page.stem) / 'index.html'
    parser = BuiltHeadings()
    parser.feed(built.read_text())
    missing = [heading for heading in source_headings(page.read_text()) if heading not in parser.headings]
    if missing:
      raise PluginError(f'{built} lacks headings of docs/{page.name}: {", ".join(missing)}')


def source_headings(markdown: str) -> list[str]:
  """Returns the headings of a page, without markup; lines of code that begin with # are none."""
  text = re.sub(r'^( *)```.*?^\1```$', '', markdown, flags=re.MULTILINE | re.DOTALL)
  headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
  return [re.sub(r'\[([^]]*)\]\([^)]*\)|[`*]', r'\1', heading) for heading in headings]


class BuiltHeadings(html.parser.HTMLParser):
  """Collects the text of the headings of an HTML page."""

  def __init__(self):
    super().__init__()
    self.headings: list[str] = []
    self.is_inside = False

  def handle_starttag(self, tag: str, attrs):
    if re.fullmatch('h[1-6]', tag):
      self.is_inside = True
      self.headings.append('')

  def handle_endtag(self, tag: str):
    if re.fullmatch('h[1-6]', tag):
      self.is_inside = False
      self.headings[-1] = self.headings[-1].removesuffix('¶')  # the link to the heading itself

  def handle_data(self, data: str):
    if self.is_inside:
      self.headings[-1] += data


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
  if path in OTHER_URIS:
    return OTHER_URIS[path]
  return path if path.endswith(('.md', '.png')) else f'source/{path}.md'


def _page(path: str, config) -> File:
  """A file outside docs/, as the site has it."""
  file = ROOT / path
  if path.endswith(('.md', '.png')):
    return File.generated(config, _uri(path), abs_src_path=str(file), inclusion=InclusionLevel.NOT_IN_NAV)
  if file.suffix == '.ipynb':
    return File.generated(config, _uri(path), content=_notebook(file), inclusion=InclusionLevel.NOT_IN_NAV)
  kind = LISTINGS.get(file.suffix, 'text')
  listing = f'---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n``````{kind} linenums="1"\n{file.read_text()}``````\n'
  return File.generated(config, _uri(path), content=listing, inclusion=InclusionLevel.NOT_IN_NAV)


def _notebook(file: pathlib.Path) -> str:
  """The cells of a notebook, one after another."""
  cells = [(cell['cell_type'], ''.join(cell['source'])) for cell in json.loads(file.read_text())['cells']]
  return '\n\n'.join(words if kind == 'markdown' else f'```python\n{words}\n```' for kind, words in cells)
