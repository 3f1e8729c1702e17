"""Files of tokens that others made: the documents in them, both splits, and the line for each wrong one."""

import json

import corpora
import foreign_tokens
import numpy as np
import pytest
import tokenizers

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, file_kinds, json_tokenizer, megatron_index, source, token_files, tokenizer_files

TEXTS = [f'document {i} of some words, and more of them: {i * i}' for i in range(200)]


@pytest.fixture
def tokenizer(tmp_path):
  folder = tmp_path / 'tokenizer'
  folder.mkdir()
  for name, content in json_tokenizer.train(TEXTS, 280).items():
    (folder / name).write_bytes(content)
  return tokenizer_files.open_file(folder / 'tokenizer.json')


def of(tmp_path, *patterns, **changes) -> source.TextSettings:
  train = tuple(f'{tmp_path}/{pattern}' for pattern in patterns)
  changes = {'source': 'files', 'train': train, 'validation_fraction': 0.1, **changes}
  return source.TextSettings(**changes, tokenizer_file=f'{tmp_path}/tokenizer/tokenizer.json')


def encoded(tokenizer) -> list[list[int]]:
  return [tokenizer.encode(text, eos=False).tolist() for text in TEXTS]


def sentences(ids: list[int]) -> list[list[int]]:
  return [ids[:7], [], ids[7:]]


WRITE = {
  'nanogpt': lambda stem, ids, eos: foreign_tokens.nanogpt(stem.with_suffix('.bin'), ids, eos),
  'nanogpt of 4 bytes': lambda stem, ids, eos: foreign_tokens.nanogpt(stem.with_suffix('.bin'), ids, eos, np.uint32),
  'llm.c': lambda stem, ids, eos: foreign_tokens.llm_c(stem.with_suffix('.bin'), ids, eos),
  'llm.c of 4 bytes': lambda stem, ids, eos: foreign_tokens.llm_c(stem.with_suffix('.bin'), ids, eos, np.uint32),
  'megatron': lambda stem, ids, eos: foreign_tokens.megatron(stem, [[[*x, eos]] for x in ids], np.uint16),
  'megatron without ends': lambda stem, ids, eos: foreign_tokens.megatron(stem, [[x] for x in ids]),
  'megatron, by sentence': lambda stem, ids, eos: foreign_tokens.megatron(stem, [sentences(x) for x in ids], np.int64),
}


@pytest.mark.parametrize('kind', WRITE)
def test_the_documents_are_those_of_their_texts(kind, tmp_path, tokenizer, monkeypatch):
  monkeypatch.setattr(token_files, 'CHUNK_IDS', 1000)  # so that documents lie across chunks
  WRITE[kind](tmp_path / 'a', encoded(tokenizer), tokenizer.eos_id)
  data = of(tmp_path, 'a.*')
  corpus.check_readable(data)
  train, validation = corpora.both(data)
  assert 10 <= len(validation) <= 30
  found = {int(d.id.split(':')[1]): d.text.tolist() for d in train + validation}
  expected = [tokenizer.encode(text).tolist() for text in TEXTS]
  if kind.startswith('llm.c'):  # the last one's end is the first token of the next file
    expected[-1].pop()
  assert [found[i] for i in range(1, len(found) + 1)] == expected
  in_parts = [d.id for k in range(3) for d in corpus.documents(data, 'train', (k, 3))]
  assert sorted(in_parts) == sorted(d.id for d in train)
  assert len(list(corpus.documents(of(tmp_path, 'a.bin', max_documents=50), 'train'))) < 50


def test_a_begin_of_text_token_stands_in_front_as_of_a_text(tmp_path, tokenizer):
  file = tmp_path / 'tokenizer' / 'tokenizer.json'
  made = tokenizers.Tokenizer.from_file(str(file))
  made.post_processor = tokenizers.processors.TemplateProcessing('a $A', 'a $A a $B', [('a', made.token_to_id('a'))])
  made.save(str(file))
  bos = (tokenizer := tokenizer_files.open_file(file)).bos_id
  ids = [[token for token in document if token != bos] for document in encoded(tokenizer)]
  foreign_tokens.nanogpt(tmp_path / 'without.bin', ids, tokenizer.eos_id)
  foreign_tokens.nanogpt(tmp_path / 'begun.bin', [[bos, *document] for document in ids], tokenizer.eos_id)
  foreign_tokens.nanogpt(tmp_path / 'before.bin', ids, bos)  # as llm.c's of Llama 3, without ends
  for name in ('without.bin', 'begun.bin', 'before.bin'):
    token_files._open_tokenizer.cache_clear()
    found = [d.text.tolist() for side in corpora.both(of(tmp_path, name)) for d in side]
    expected = [[bos, *document, tokenizer.eos_id] for document in ids]
    assert sorted(found) == sorted(expected), name


@pytest.mark.parametrize('chunk', [8192, 1 << 20])
def test_a_file_without_documents_is_one_text_in_pieces(chunk, tmp_path, tokenizer, monkeypatch, caplog):
  monkeypatch.setattr(token_files, 'CHUNK_IDS', chunk)
  tokens = np.random.default_rng(0).integers(3, 270, 100_001).astype(np.uint16)
  tokens[-1] = tokenizer.eos_id
  tokens.tofile(tmp_path / 'one.bin')
  data = of(tmp_path, '*.bin')
  corpus.check_readable(data)
  assert 'one.bin: no document ends' in caplog.text
  train, validation = corpora.both(data)
  assert np.array_equal(np.concatenate([d.text for d in train + validation]), tokens)
  assert sum(len(d.text) for d in validation) == 10_000 and all(0 <= d.draw < 1 for d in train)
  for i in range(19):
    np.random.default_rng(i + 1).integers(3, 270, 100_000 - i).astype(np.uint16).tofile(tmp_path / f'{i}.bin')
  train, validation = ({d.id.split('#')[0] for d in side} for side in corpora.both(data))
  assert len(validation) in (2, 3) and not train & validation and len(train | validation) == 20


def test_a_mixture_of_tokens_and_text(tmp_path, tokenizer):
  foreign_tokens.megatron(tmp_path / 'tokens', [[ids] for ids in encoded(tokenizer)])
  lines = ''.join(json.dumps({'text': text, 'domain': 'own'}) + '\n' for text in TEXTS[:50])
  (tmp_path / 'text.jsonl').write_text(lines)
  sources = (
    settings.Source('tokens', (f'{tmp_path}/tokens.bin',), 1.0),
    settings.Source('text', (f'{tmp_path}/text.jsonl',), 1.0),
  )
  train = list(corpus.documents(of(tmp_path, train=sources), 'train'))
  sizes = {name: sum(source.num_bytes(d.text) for d in train if d.domain == name) for name in ('tokens', 'text')}
  assert sizes['tokens'] == pytest.approx(sizes['text'], rel=0.02)
  repeated = {d.id.split('@')[0]: d.content for d in train if d.times}
  once = {d.id: d.content for d in train if not d.times}
  assert repeated and all(once[name] == content for name, content in repeated.items())
  of_text = {d.content for d in train if d.domain == 'text'}
  assert of_text and of_text < {d.content for d in train if d.domain == 'tokens'}, 'on the same side as their tokens'


def damaged_index(change):
  def write(tmp_path, ids, eos):
    foreign_tokens.megatron(tmp_path / 'a', [[x] for x in ids])
    index = bytearray((tmp_path / 'a.idx').read_bytes())
    (tmp_path / 'a.idx').write_bytes(change(index))

  return write


def put(place: int, value: int):
  return lambda index: index[:place] + value.to_bytes(8, 'little', signed=True) + index[place + 8 :]


def cut_file(write, name: str, by: int):
  def cut(tmp_path, ids, eos):
    WRITE[write](tmp_path / 'a', ids, eos)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-by])

  return cut


def one_more_token(value: int, dtype, write='nanogpt'):
  return lambda tmp_path, ids, eos: getattr(foreign_tokens, write)(tmp_path / 'a.bin', [*ids, [5, value]], eos, dtype)


BAD = {
  'odd length': (cut_file('nanogpt', 'a.bin', 1), r'a\.bin: damaged or cut short \(\d+ bytes are no whole number'),
  'cut behind a header': (cut_file('llm.c', 'a.bin', 2), r'a\.bin: damaged or cut short \(\d+ tokens by its header'),
  'empty': (lambda tmp_path, ids, eos: (tmp_path / 'a.bin').touch(), r'a\.bin: it has no text'),
  'ends alone': (
    lambda tmp_path, ids, eos: foreign_tokens.nanogpt(tmp_path / 'a.bin', [[]] * 10, eos),
    r'a\.bin: it has no text',
  ),
  'a token too many': (
    one_more_token(280, np.uint16),
    r'a\.bin: token \d+ is 280, and the vocabulary of config\.tokenizer\.model_file has 280: name the tokenizer',
  ),
  'an index of before': (damaged_index(lambda i: b'TNTIDX\0\0' + i[8:]), r"a\.idx: it is in Megatron's first format"),
  'no index': (damaged_index(lambda i: b'x' * 100), r'a\.idx: not a Megatron index'),
  'an empty index': (damaged_index(lambda i: b''), r'a\.idx: not a Megatron index'),
  'version 2': (damaged_index(put(9, 2)), r'a\.idx: it has version 2, which cannot be read'),
  'numbers with a point': (
    damaged_index(lambda i: i[:17] + b'\7' + i[18:]),
    r'a\.idx: it has tokens of type 7, not an integer',
  ),
  'an index cut short': (damaged_index(lambda i: i[:-8]), r'a\.idx: damaged, cut short or not of text alone'),
  'a huge number of sequences': (damaged_index(put(18, 1 << 60)), r'a\.idx: damaged, cut short or not of text'),
  'with modes': (damaged_index(lambda i: i + bytes(200)), r'a\.idx: damaged, cut short or not of text alone'),
  'a place before the file': (damaged_index(put(34 + 4 * 200, -8)), r'a\.idx: damaged \(its places'),
  'documents beyond the file': (damaged_index(lambda i: put(len(i) - 8, 201)(i)), r'a\.idx: damaged \(its places'),
  'a token too many, by an index': (
    lambda tmp_path, ids, eos: foreign_tokens.megatron(tmp_path / 'a', [*([x] for x in ids), [[-1]]]),
    r'a\.bin: token \d+ is -1, and the vocabulary',
  ),
  'a place whose end is beyond any number': (
    damaged_index(put(34 + 4 * 200, (1 << 63) - 2)),
    r'a\.bin: damaged, cut short or of another \.idx',
  ),
  'documents in no order': (damaged_index(lambda i: put(len(i) - 16, 3)(i)), r'a\.idx: damaged \(its places'),
  'tokens cut short': (cut_file('megatron', 'a.bin', 2), r'a\.bin: damaged, cut short or of another \.idx \('),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_files_are_named(name, tmp_path, tokenizer):
  write, message = BAD[name]
  write(tmp_path, encoded(tokenizer), tokenizer.eos_id)
  with pytest.raises(ValueError, match=message) as error:
    corpus.check_readable(of(tmp_path, '*.bin'))
  assert '\n' not in str(error.value)


def test_a_wrong_token_beyond_the_beginning_is_found_by_the_stream(tmp_path, tokenizer, monkeypatch):
  one_more_token(70_000, np.uint32)(tmp_path, encoded(tokenizer), tokenizer.eos_id)
  monkeypatch.setattr(token_files, 'CHUNK_IDS', 1000)
  monkeypatch.setattr(file_kinds, 'CHECK_DOCUMENTS', 100)
  data = of(tmp_path, 'a.bin')
  file_kinds.check_beginning(f'{tmp_path}/a.bin', data)
  with pytest.raises(ValueError, match=r'a\.bin: token \d+ is 70000'):
    list(corpus.documents(data, 'train'))


def test_the_tokenizer_has_to_be_named(tmp_path, tokenizer):
  foreign_tokens.nanogpt(tmp_path / 'a.bin', encoded(tokenizer), tokenizer.eos_id)
  data = settings.Data(source='files', train=(f'{tmp_path}/a.bin',))
  for read in (corpus.check_readable, lambda data: list(corpus.documents(data, 'train'))):
    with pytest.raises(ValueError, match=r'a\.bin: a file of tokens: name the tokenizer that made it in config\.token'):
      read(data)


def test_documents_of_an_index_may_lie_anywhere(tmp_path):
  """Megatron's index may tell of some sequences only, and in any order."""
  foreign_tokens.megatron(tmp_path / 'a', [[[1, 2]], [[3], [4, 5]], [[6]]])
  dtype, documents = megatron_index.read(f'{tmp_path}/a.bin')
  assert dtype == np.int32 and list(documents) == [[(0, 2)], [(8, 1), (12, 2)], [(20, 1)]]


def test_an_index_without_its_last_border_loses_no_document(tmp_path, tokenizer, caplog):
  documents = [[x] for x in encoded(tokenizer)]
  expected = [tokenizer.encode(text).tolist() for text in TEXTS]
  for name, borders in {
    'last': slice(0, -1), 'first': slice(1, None), 'both': slice(1, -1), 'all but one': slice(0, 1), 'all': slice(0, 0)
  }.items():  # fmt: skip
    foreign_tokens.megatron(tmp_path / 'a', documents, written=borders)
    caplog.clear()
    data = of(tmp_path, 'a.bin')
    corpus.check_readable(data)
    assert caplog.text.count('a.idx: 200 sequences, but its borders of documents do not reach') == 1, name
    found = [d.text.tolist() for side in corpora.both(data) for d in side]
    assert sorted(found) == sorted(expected), name


def test_a_complete_index_is_read_without_a_warning(tmp_path, tokenizer, caplog):
  foreign_tokens.megatron(tmp_path / 'a', [sentences(x) for x in encoded(tokenizer)])
  corpus.check_readable(of(tmp_path, 'a.bin'))
  assert not caplog.text
  with (tmp_path / 'a.bin').open('ab') as f:
    f.write(b'1234')
  corpus.check_readable(of(tmp_path, 'a.bin'))
  assert 'the others are not read' in caplog.text
