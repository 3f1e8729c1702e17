"""Where the documents of clean_text.py come from: repositories at fixed commits, and the text of their files.

A reader takes a file's text and yields named texts: (id, text), with an empty id where the file is one text. The
readers follow the rules by which the corpus was made: markup of links, images and front matter is removed, lines of a
paragraph are joined in German laws, and annotations are left out of the D.C. Code.
"""

import csv
import functools
import html
import io
import lzma
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dipaco_jax.core.errors import InputError

Texts = Iterator[tuple[str, str]]
MAX_FILE_BYTES = 1 << 22  # larger files are left out: snapshots of repositories often lack them
LAST_YEAR = 1922  # of books, as in the corpus


class Place(NamedTuple):
  """Files of one kind of text in a repository. Places of a lower rank are used up first."""

  kind: str
  repository: str
  commit: str
  paths: str  # a regular expression that matches whole paths
  read: Callable[[str], Texts]
  rank: int = 0


# -- git


class Repository:
  """A place's repository, below a folder that has OWNER/NAME."""

  def __init__(self, folder: str, place: Place):
    self.place = place
    self.git = ['git', '-C', f'{folder}/{place.repository}']
    found = subprocess.run([*self.git, 'cat-file', '-e', f'{place.commit}^{{commit}}'], capture_output=True)
    if found.returncode:
      raise InputError(
        f'--repositories={folder}: {place.repository} has no commit {place.commit}; '
        f'git clone https://github.com/{place.repository} {folder}/{place.repository}'
      )

  def paths(self) -> list[str]:
    """Returns the paths of the place's files, without large ones and those that the repository lacks."""
    listing = self._run('ls-tree', '-r', '-l', '-z', self.place.commit).decode()
    paths = []
    for line in filter(None, listing.split('\0')):
      fields, path = line.split('\t', 1)
      size = fields.split()[3]
      if size.isdigit() and int(size) < MAX_FILE_BYTES and re.fullmatch(self.place.paths, path):
        paths.append(path)
    return paths

  def texts(self, path: str) -> list[tuple[str, str]]:
    """Returns the named texts of a file; none if it is not UTF-8."""
    content = self._run('cat-file', 'blob', f'{self.place.commit}:{path}')
    if path.endswith('.xz'):
      content = lzma.decompress(content)
    try:
      return list(self.place.read(content.decode()))
    except UnicodeDecodeError:
      return []

  def _run(self, *command: str) -> bytes:
    return subprocess.run([*self.git, *command], check=True, capture_output=True).stdout


# -- readers


def read_book(text: str) -> Texts:
  """Yields the body of a book whose header names a year up to LAST_YEAR."""
  header, _, body = text.partition('\n-------')
  year = re.search(r'^## Year: *(\d+)', header, re.MULTILINE)
  if year and int(year[1]) <= LAST_YEAR:
    yield '', '\n'.join(line.rstrip() for line in body.strip('- \n').splitlines())


def read_code(text: str) -> Texts:
  yield '', text


def read_post(text: str) -> Texts:
  """Yields a page of a site: its title and its text without links, images, templates, tags and emphasis."""
  front, body = split_front_matter(text)
  title = re.search(r'^title: *(.+)$', front, re.MULTILINE)
  body = remove_links(re.sub(r'\{\{.*?\}\}|\{%.*?%\}|<!--.*?-->', '', body, flags=re.DOTALL))
  body = re.sub(r'<[^<>]+>', '', body)
  body = re.sub(r'(\*\*|__)(\S(?:.*?\S)?)\1', r'\2', body)
  body = re.sub(r'(?<!\w)([*_])(\S(?:.*?\S)?)\1(?!\w)', r'\2', body)
  lines = (' '.join(line.split()) for line in html.unescape(body).splitlines())
  yield '', collapse((title[1].strip().strip('\'"') + '\n\n' if title else '') + '\n'.join(lines))


def read_docs(text: str) -> Texts:
  """Yields a page of documentation without links, comments, tags and backslashes of Markdown."""
  _, body = split_front_matter(text)
  body = re.sub(r'<!--.*?-->', '', remove_links(body), flags=re.DOTALL)
  body = re.sub(r'</?(?:a|br|sup|sub|p|b|i|em|strong|span|div|details|summary)(?: [^<>]*)?/?>', '', body)
  yield '', collapse(re.sub(r'\\([#*_])', r'\1', body))


def read_german_law(text: str) -> Texts:
  """Yields a law whose paragraphs and items are one line each."""
  _, body = split_front_matter(text)
  paragraphs = []
  for paragraph in re.split(r'\n\s*\n', body):
    one_line = re.sub(r'(?<!\\)\n(?!: )\s*', ' ', paragraph.strip())
    paragraphs.append(re.sub(r'[ \t]+', ' ', one_line))
  yield '', '\n\n'.join(paragraph for paragraph in paragraphs if paragraph not in ('', '-'))


def read_code_section(text: str) -> Texts:
  """Yields a section of the D.C. Code without its annotations."""
  section = ET.fromstring(text)
  yield '', '§ ' + '\n\n'.join(read_paragraphs(section))


def read_paragraphs(element: ET.Element) -> Iterator[str]:
  """Yields the paragraphs of an element.

  Its number and heading are a paragraph in a section, and begin the first paragraph elsewhere.
  """
  label = ''
  for child in element:
    name = child.tag.partition('}')[2]
    if name in ('prefix', 'num', 'heading'):
      label += join_words(child) + ' '
    elif name != 'annotations':
      is_text = name == 'text' or not len(child)
      paragraphs = [join_words(child)] if is_text else list(read_paragraphs(child))
      if is_text and not element.tag.endswith('}section'):
        paragraphs[0] = label + paragraphs[0]
      else:
        paragraphs.insert(0, label.strip())
      yield from filter(None, paragraphs)
      label = ''
  yield from filter(None, [label.strip()])


def join_words(element: ET.Element) -> str:
  return ' '.join(''.join(element.itertext()).split())


def read_abstracts(text: str) -> Texts:
  """Yields the title and abstract of each paper, by its arXiv id."""
  csv.field_size_limit(MAX_FILE_BYTES)
  for row in csv.DictReader(io.StringIO(text), delimiter='\t'):
    if row['abstract'] and row['title']:
      yield row['arxiv_id'], '\n\n'.join(' '.join(row[name].split()) for name in ('title', 'abstract'))


def read_wiki(text: str) -> Texts:
  """Yields the title and the paragraphs of each article, by its page id."""
  for page in re.finditer(r'<doc id="(\d+)"[^>]*>\n(.*?)\n</doc>', text, re.DOTALL):
    yield page[1], '\n\n'.join(filter(None, map(str.strip, page[2].splitlines())))


def collapse(text: str) -> str:
  """Returns a text with one empty line where it had several."""
  return re.sub(r'\n(?:[ \t]*\n){2,}', '\n\n', text)


def split_front_matter(text: str) -> tuple[str, str]:
  """Returns the YAML before a page, and the page."""
  front = re.match(r'\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)', text, re.DOTALL)
  return (front[1], text[front.end() :]) if front else ('', text)


def remove_links(text: str) -> str:
  """Returns Markdown with the text of links in their place, without images and link definitions."""
  text = re.sub(r'!\[[^\]]*\]\([^)]*\)', '', text)
  text = re.sub(r'\[([^\[\]]+)\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^\]]*\])', r'\1', text)
  return re.sub(r'^\[[^\]]+\]: .*$', '', text, flags=re.MULTILINE)


# -- places

_algorithms = functools.partial(Place, 'code', read=read_code)
_posts = functools.partial(Place, 'gov_news_blog', read=read_post)

PLACES = (
  Place(
    'books_en', 'mlschmitt/classic-books-markdown', '944882722e9a96fa6cf2739dc2ea757e101f412f', r'.+/.+\.md', read_book
  ),
  _algorithms('TheAlgorithms/Python', 'f5988cc09713315817df6a7e327e258013a94440', r'.+\.py'),
  _algorithms('TheAlgorithms/Java', '9d05db2d14702454a418ff31158905e502df83e0', r'src/.+\.java'),
  _algorithms('TheAlgorithms/Go', '5ba447ec5ff3d1213de65b92e726ee74c5d5cc19', r'.+\.go', rank=1),
  _posts(
    'GSA/digitalgov.gov', '4979583206d90ff1707b097454a9b169ca9e95e4', r'content/(news|events|resources|guides)/.+\.md'
  ),
  _posts('18F/18f.gsa.gov', '0a55c75e6d9bc71c80136a3867dac52356177443', r'content/posts/.+\.md'),
  _posts('cloud-gov/cg-site', '536b459f25dc541450f8b02675b32584196a05fd', r'_posts/.+\.md', rank=1),
  _posts('GSA/fedramp-gov', '2c01508bd81b96d68a2289da12b0aa45e51bd84f', r'_posts/.+\.md', rank=1),
  Place('law_de', 'bundestag/gesetze', '77abca2ceea3b7b89ea70afb13b5dd55415eb124', r'.+/index\.md', read_german_law),
  Place(
    'law_en',
    'DCCouncil/law-xml',
    '9123af018003a6666851734d92eb3a81862a0f33',
    r'us/dc/council/code/titles/[^/]+/sections/.+\.xml',
    read_code_section,
  ),
  Place(
    'science_abstracts',
    'staeiou/arxiv_archive',
    'f043eb1d71da6ed2fb9eac63ab8707359ff606ea',
    r'processed_data/20200101/per_category/.+\.tsv\.xz',
    read_abstracts,
  ),
  Place('tech_docs', 'MicrosoftDocs/cpp-docs', 'a2e592a8fc391b6aff8d1323f5b58696abdc5d57', r'docs/.+\.md', read_docs),
  Place('wiki_en', 'ZhouYii/PatchedDistro', '961716d8a5a0df1a6373a4d61e360a0b5d1b85cd', r'data/A./wiki_\d+', read_wiki),
)
