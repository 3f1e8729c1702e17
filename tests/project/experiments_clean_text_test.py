"""clean_text.py: the test text has nothing of the corpus, and is the same on every machine."""

import gzip
import hashlib
import json
import pathlib
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import repository

from dipaco_jax.core.errors import InputError

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import clean_text
import clean_text_sources
import shared_passages
import source_losses


def write_words(seed: int, num_words: int = 200) -> str:
  """Returns text of words of its own, with a paragraph of every 20."""
  draw = random.Random(seed)
  words = [''.join(draw.choices('abcdefghijklmnop', k=7)) for _ in range(num_words)]
  return '\n\n'.join(' '.join(words[i : i + 20]) for i in range(0, num_words, 20))


def commit(folder: pathlib.Path, files: dict[str, str]) -> str:
  """Commits files to a repository and returns the commit."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in files.items():
    (folder / name).write_text(text)
  identity = ('-c', 'user.name=x', '-c', 'user.email=x@example.org', '-c', 'commit.gpgsign=false')
  for command in (('init', '-q'), ('add', '.'), (*identity, 'commit', '-q', '-m', 'x')):
    subprocess.run(['git', *command], cwd=folder, check=True)
  head = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=folder, check=True, capture_output=True, text=True)
  return head.stdout.strip()


def make(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, places, corpus: list[dict[str, str]]) -> list[dict]:
  """Runs the script and returns the documents of its file."""
  (folder / 'corpus.jsonl').write_text(''.join(json.dumps(document) + '\n' for document in corpus))
  out = folder / 'out' / 'test.jsonl.gz'
  monkeypatch.setattr(clean_text_sources, 'PLACES', places)
  flags = SimpleNamespace(repositories=str(folder), corpus=[str(folder / 'corpus.jsonl')], out=str(out))
  monkeypatch.setattr(clean_text.flags, 'FLAGS', flags)
  clean_text.main()
  return list(source_losses.read_documents(str(out)))


def place(repository: str, commit: str, rank: int = 0) -> clean_text_sources.Place:
  return clean_text_sources.Place('code', repository, commit, r'.+\.py', clean_text_sources.read_code, rank)


def test_nothing_of_the_corpus_is_in_the_test_text(tmp_path, monkeypatch, capsys):
  passages = [write_words(seed, 40) for seed in range(3)]
  numbered = '1234 ' + write_words(4)
  files = {
    'used.py': write_words(10),
    'passage.py': write_words(11) + '\n\n' + passages[0][:100].replace(' ', '\n ') + '.',
    'shorter.py': write_words(12) + '\n\n' + passages[1][:99] + '.',
    'numbered.py': numbered.replace('1', '9').upper(),
    'short.py': write_words(13)[: clean_text.SHORTEST - 1],
    'long.py': write_words(14, 5000),
    'large.py': write_words(15) + ' ' * clean_text_sources.MAX_FILE_BYTES,
    'other.txt': write_words(16),
  }
  head = commit(tmp_path / 'owner/name', files)
  commit(tmp_path / 'owner/name', {'new.py': write_words(17), 'shorter.py': write_words(18)})
  texts = {'owner/name:used.py': 'other text', 'a': passages[0], 'b': f'x{passages[1]}', 'c': numbered}
  corpus = [{'source': source, 'text': text} for source, text in texts.items()]
  documents = make(tmp_path, monkeypatch, [place('owner/name', head)], corpus)
  assert [document['source'] for document in documents] == ['owner/name:long.py', 'owner/name:shorter.py']
  assert {document['domain'] for document in documents} == {'code'}
  by_source = {document['source'].partition(':')[2]: document['text'] for document in documents}
  assert by_source['shorter.py'] == files['shorter.py']
  assert by_source['long.py'] in files['long.py'] and len(by_source['long.py']) <= clean_text.LONGEST
  content = (tmp_path / 'out/test.jsonl.gz').read_bytes()
  assert content[4:8] == bytes(4)  # no time
  printed = capsys.readouterr().out
  assert 'code: 2 documents' in printed and '2 of owner/name' in printed
  assert hashlib.sha256(gzip.decompress(content)).hexdigest() in printed


def test_sibling_repositories_only_fill_up(tmp_path, monkeypatch):
  monkeypatch.setattr(clean_text, 'DOCUMENTS', 5)
  first = commit(tmp_path / 'owner/first', {f'{i}.py': write_words(i) for i in range(3)})
  second = commit(tmp_path / 'owner/second', {f'{i}.py': write_words(10 + i) for i in range(30)})
  places = [place('owner/second', second, rank=1), place('owner/first', first)]
  documents = make(tmp_path, monkeypatch, places, [])
  assert [document['source'].partition(':')[0] for document in documents] == ['owner/first'] * 3 + ['owner/second'] * 2
  again = make(tmp_path, monkeypatch, places[::-1], [])
  assert again == documents


def test_articles_of_one_file_are_apart(tmp_path, monkeypatch):
  pages = {str(i): f'Title {i}\n\n' + write_words(i) for i in range(4)}
  page = '<doc id="{}" url="x" title="x">\n{}\n\n</doc>\n'
  head = commit(tmp_path / 'owner/name', {'wiki_00': ''.join(page.format(*named) for named in pages.items())})
  places = [clean_text_sources.Place('wiki', 'owner/name', head, 'wiki_.*', clean_text_sources.read_wiki)]
  corpus = [{'source': f'owner/name:wiki_00#{i}', 'text': ''} for i in range(3)]
  (document,) = make(tmp_path, monkeypatch, places, corpus)
  assert document == {'text': pages['3'], 'domain': 'wiki', 'source': 'owner/name:wiki_00#3'}


def test_wrong_input_is_rejected(tmp_path, monkeypatch):
  commit(tmp_path / 'owner/name', {'x.py': 'x'})
  with pytest.raises(InputError, match=r'owner/name has no commit .*git clone https://github.com/owner/name'):
    make(tmp_path, monkeypatch, [place('owner/name', '0' * 40)], [{'source': 'x', 'text': 'x'}])
  with pytest.raises(InputError, match='--corpus='):
    monkeypatch.setattr(clean_text.flags.FLAGS, 'corpus', ['nowhere'])
    clean_text.main()
  with pytest.raises(InputError, match='--repositories is missing'):
    monkeypatch.setattr(clean_text.flags.FLAGS, 'repositories', '')
    clean_text.main()
  assert not (tmp_path / 'out').exists()


def test_shared_passages_are_those_that_a_search_finds():
  draw = random.Random(0)
  texts = [''.join(draw.choices('ab ü\n', k=400)) for _ in range(60)]
  corpus = [''.join(draw.choices('ab ü\n', k=400)) for _ in range(20)]
  for i, text in enumerate(texts[:40]):  # a copied part of 70 to 148 characters, white space included
    at = draw.randrange(200)
    corpus[i % 20] += text[at : at + 70 + 2 * i]
  size = shared_passages.PASSAGE
  joined = [' '.join(text.split()) for text in texts]
  known = {one[i : i + size] for text in corpus for one in [' '.join(text.split())] for i in range(len(one) - size + 1)}
  expected = [any(text[i : i + size] in known for i in range(len(text) - size + 1)) for text in joined]
  assert 0 < sum(expected) < 40
  assert shared_passages.find([*texts, 'short'], [*corpus, '']).tolist() == [*expected, False]


def test_readers_remove_markup():
  readers = clean_text_sources
  page = (
    '---\ntitle: "Why"\n---\n![x](y)\nSee **[the _guide_](https://x/(y))**{{< note >}} &amp; <b>[ask][2]</b>.\n\n\n\n'
  )
  page += '[2]: z\nEnd'
  assert list(readers.read_post(page)) == [('', 'Why\n\nSee the guide & ask.\n\nEnd')]
  page = '---\ntitle: x\n---\n# <a name="f"></a> `f`\n\nA `vector<int>` \\* [see](x.md)<br/>\n<!-- x -->'
  assert next(iter(readers.read_docs(page)))[1].rstrip() == '#  `f`\n\nA `vector<int>` * see'
  law = (
    '---\nTitle: x\n---\n# Gesetz\n\nDatum\n:   1971\n\n\n## § 1 Zweck\n\n(1) Das\nist\n\n1.  eins,\n    zwei\n\n-\n'
  )
  expected = '# Gesetz\n\nDatum\n: 1971\n\n## § 1 Zweck\n\n(1) Das ist\n\n1. eins, zwei'
  assert list(readers.read_german_law(law)) == [('', expected)]
  section = (
    '<section xmlns="x"><num>1-2</num><heading>Terms.</heading><text>Let <cite>§ 3</cite>:</text><para><num>(a)</num>'
    '<text>one;</text></para><para><num>(b)</num><para><num>(1)</num><text>two.</text></para></para>'
    '<annotations><text>no</text></annotations></section>'
  )
  expected = '§ 1-2 Terms.\n\nLet § 3:\n\n(a) one;\n\n(b)\n\n(1) two.'
  assert list(readers.read_code_section(section)) == [('', expected)]
  table = '\tabstract\tarxiv_id\ttitle\n1\t"Two\nlines "\tmath/1\tA  title\n2\t\tmath/2\tNo abstract\n'
  assert list(readers.read_abstracts(table)) == [('math/1', 'A title\n\nTwo lines')]
  book = '# Title: x\n\n## Year: {}\n\n-------\nOne. \n\nTwo.\n'
  assert list(readers.read_book(book.format('700 BC'))) == [('', 'One.\n\nTwo.')]
  assert not list(readers.read_book(book.format('1923')))
