"""Sequences are the documents' tokens, cut; the files are the same for any number of threads, and leave no process."""

import re
import subprocess
import sys
import tracemalloc

import numpy as np
import psutil
import pytest
import slow
import tokenizers
import whole

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, cutting, json_tokenizer, left_out
from dipaco_jax.data.corpus import Document
from dipaco_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer, train
from dipaco_jax.data.sequences import MAX_DOMAINS, Sequences

DATA = settings.Data(source='stdlib', max_documents=150, validation_fraction=0.1)


@pytest.fixture(scope='module')
def tokenizer():
  return SentencePieceTokenizer(train((d.text for d in corpus.documents(DATA, 'train')), 700))


def write(out_dir, tokenizer, make_documents=lambda split: corpus.documents(DATA, split), **kwargs):
  sizes = {'seq_len': 128, 'eval_len': 200, 'prefix_tokens': 32}
  return whole.write_sequences(make_documents, tokenizer, out_dir, **sizes | kwargs)


class Wide:
  """A stand-in vocabulary of more than 16 bits: a token is a character's code."""

  vocab_size = 1 << 21

  def encode_batch(self, texts):
    return [np.array([*map(ord, t), 0], np.int32) for t in texts]

  def byte_ends(self, text):
    return np.arange(len(self.encode_batch([text])[0])) + 1


def test_sequences_are_the_documents_cut(tmp_path, tokenizer):
  calls = []
  meta = write(tmp_path / 'a', tokenizer, progress=lambda *args: calls.append(args))
  found = iter(Sequences(tmp_path / 'a', 'train').read(range(meta['sequences'])))
  dropped = tokens = 0
  for number, document in enumerate(corpus.documents(DATA, 'train')):
    whole = tokenizer.encode(document.text)
    for begin in range(0, len(whole), 128):
      piece = whole[begin : begin + 128]
      if len(piece) <= 32:
        dropped += 1
        continue
      sequence = next(found)
      assert (sequence.tokens == piece).all() and sequence.document == number
      assert meta['domains'][sequence.domain] == document.domain
      tokens += len(piece)
  assert next(found, None) is None and dropped
  assert (meta['dropped_sequences'], meta['tokens'], meta['documents']) == (dropped, tokens, number + 1)
  num_validation = sum(1 for _ in corpus.documents(DATA, 'validation'))
  assert calls == [(i + 1, None) for i in range(number + 1 + num_validation)]


def test_short_documents_are_counted_and_reported(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(left_out, 'EARLY_DOCUMENTS', 6)
  sizes = [1, 0, 31, 32, 33, 140, 400]  # with the end-of-text token, documents of 2, 1, 32, 33, 34, 141 and 401 tokens
  documents = [Document(str(i), 'x' * size, '') for i, size in enumerate(sizes)]
  meta = write(tmp_path / 'a', Wide(), lambda split: documents if split == 'train' else [DOCUMENT])
  assert (meta['documents'], meta['dropped_documents']) == (7, 3)
  assert (meta['dropped_sequences'], meta['dropped_ends'], meta['dropped_tokens']) == (5, 2, 2 + 1 + 32 + 13 + 17)
  assert meta['dropped_tokens'] + meta['tokens'] == sum(sizes) + len(sizes)
  assert 'so far, 3 of 6 documents and the end of a longer one have at most 32 tokens and are left out' in caplog.text
  caplog.clear()
  said: list[str] = []
  left_out.log_all(meta, said.append)
  assert '3 of 7 documents and the ends of 2 longer ones have at most 32 tokens and are left out (10%' in caplog.text
  assert not said


def test_a_small_share_is_reported_without_a_warning(tmp_path, caplog):
  documents = [Document(str(i), 'x' * (20 if i == 7 else 100), '') for i in range(100)]
  meta = write(tmp_path / 'a', Wide(), lambda split: documents if split == 'train' else [DOCUMENT])
  said: list[str] = []
  left_out.log_all(meta | {'skipped_records': {'.jsonl': 3, 'tfds': 1}}, said.append)
  assert said[0].startswith('1 of 100 documents has at most 32 tokens and is left out (0.21% of the tokens)')
  assert said[1] == 'bad records that are left out (config.data.skip_bad_records): 3 of .jsonl, 1 of tfds'
  assert not caplog.text
  assert not left_out.describe_dropped({'documents': 3})  # of a version that did not count them


def test_validation_is_the_beginning_of_each_document(tmp_path, tokenizer):
  meta = write(tmp_path / 'a', tokenizer, plain)
  found = Sequences(tmp_path / 'a', 'validation')
  wholes = [tokenizer.encode(d.text) for d in plain('validation')]
  expected = [whole[:200] for whole in wholes if len(whole) > 32]
  assert len(found) == len(expected) == meta['validation_documents'] > 5
  assert all((found[i].tokens == expected[i]).all() for i in range(len(expected)))
  assert meta['validation_tokens'] == sum(map(len, expected))


def plain(split):
  """As if none was a piece of a longer text."""
  return (d._replace(draw=-1.0) for d in corpus.documents(DATA, split))


@pytest.mark.parametrize('pieces', slow.all_but([1, 3, 1000], 3))
def test_a_piece_of_a_text_is_validated_all_over(tmp_path, tokenizer, pieces):
  write(tmp_path / 'a', tokenizer, pieces=pieces)
  found, firsts = Sequences(tmp_path / 'a', 'validation'), []
  for number, document in enumerate(corpus.documents(DATA, 'validation')):
    whole = tokenizer.encode(document.text).tolist()
    cut = [whole[i : i + 200] for i in range(0, len(whole), 200)]
    cut = [sequence for sequence in cut if len(sequence) > 32]
    mine = [s.tokens.tolist() for s in found.read(range(len(found))) if s.document == number]
    at = [cut.index(sequence) for sequence in mine]
    assert len(at) == min(pieces, len(cut)) and at == sorted(set(at))
    firsts += at[:1]
  assert (max(firsts) > 0) == (pieces < 1000)
  drawn = [cutting._spread(list(range(10)), 2, str(i)) for i in range(300)]
  assert {b - a for a, b in drawn} == {5} and {a for a, _ in drawn} == set(range(5)), 'from anywhere, and far apart'


def test_the_files_do_not_depend_on_threads(tmp_path, tokenizer):
  contents = []
  for threads in (1, 5):
    write(tmp_path / str(threads), tokenizer, threads=threads)
    files = [f for f in (tmp_path / str(threads)).rglob('*') if f.is_file()]
    contents.append({str(f.relative_to(tmp_path / str(threads))): f.read_bytes() for f in files})
  assert contents[0] == contents[1] and len(contents[0]) == 2 * 6 + 3


def test_sequences_are_read_by_their_numbers(tmp_path, tokenizer):
  write(tmp_path / 'a', tokenizer)
  sequences = Sequences(tmp_path / 'a', 'train')
  indices = np.random.default_rng(0).permutation(len(sequences))[:50]
  for i, sequence in zip(indices, sequences.read(indices), strict=True):
    assert (sequences[int(i)].tokens == sequence.tokens).all()
  documents, domains = sequences.columns()
  assert [(s.document, s.domain) for s in sequences.read(range(len(sequences)))] == [
    *zip(documents, domains, strict=True)
  ]
  assert sequences[-1].document == documents[-1]
  with pytest.raises(IndexError):
    sequences[len(sequences)]


def test_wide_vocabularies_and_many_domains(tmp_path):
  documents = [Document(str(i), chr(70_000 + i) * 40, f'domain {i}') for i in range(MAX_DOMAINS + 10)]
  meta = write(tmp_path / 'a', Wide(), lambda split: iter(documents))
  sequences = Sequences(tmp_path / 'a', 'train')
  assert [s.tokens[0] for s in sequences] == [70_000 + i for i in range(len(documents))]
  assert len(meta['domains']) == MAX_DOMAINS and meta['domains'][-1] == 'other'
  assert sequences[-1].domain == MAX_DOMAINS - 1


def test_parts_are_one_array(tmp_path):
  """Domains, which each part numbers for itself, and documents' numbers, are the same for all; a few files are open."""
  documents = [Document(str(i), chr(97 + i % 20) * (40 + i), f'd{i * 7 % 5}') for i in range(50)] + [DOCUMENT]
  metas = [write(tmp_path / str(n), Wide(), lambda split: iter(documents), parts=n) for n in (1, 3, 60)]
  one, *others = (Sequences(tmp_path / str(n), 'train', open_parts=1) for n in (1, 3, 60))
  expected = sorted((s.document, tuple(s.tokens), one.domains[s.domain]) for s in one)
  for sequences, meta in zip(others, metas[1:], strict=True):
    found = sequences.read(range(len(sequences)))
    assert sorted((s.document, tuple(s.tokens), sequences.domains[s.domain]) for s in found) == expected
    backwards = sequences.read(range(len(sequences)))[::-1]
    assert [(s.document, s.domain) for s in backwards[::-1]] == [*zip(*sequences.columns(), strict=True)]
    assert {k: v for k, v in meta.items() if k not in ('parts', 'domains')} == {
      k: v for k, v in metas[0].items() if k not in ('parts', 'domains')
    }
  assert sum(others[1].counts) == len(one) and 0 in others[1].counts  # of 60 parts some have no document


def test_domains_beyond_the_limit_of_all_parts_together_are_other(tmp_path):
  documents = [Document(str(i), chr(97 + i % 20) * 40, f'domain {i}') for i in range(MAX_DOMAINS + 50)]
  meta = write(tmp_path / 'a', Wide(), lambda split: iter(documents), parts=2)
  assert len(meta['domains']) == MAX_DOMAINS and meta['domains'][-1] == 'other'
  sequences = Sequences(tmp_path / 'a', 'train')
  names = {s.document: meta['domains'][s.domain] for s in sequences}
  assert [*names.values()].count('other') == 51
  assert all(name in ('other', f'domain {document}') for document, name in names.items())


def test_a_prefix_alone_is_dropped(tmp_path):
  documents = [Document(str(n), 'x' * n, '') for n in (31, 32, 33)]  # and the end token
  meta = write(tmp_path / 'a', Wide(), lambda split: documents)
  assert (meta['sequences'], meta['dropped_sequences']) == (2, 1)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path):
  peaks = []
  for count in (150, 450):
    documents = (Document(str(i), 'some text ' * 1000, '') for i in range(count))
    tracemalloc.start()
    write(tmp_path / str(count), Wide(), lambda split: documents if split == 'train' else [DOCUMENT], threads=1)  # noqa: B023
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
  assert peaks[1] < 1.5 * peaks[0]  # of three times the text; threads differ in how far they get ahead


DOCUMENT = Document('0', 'some text ' * 1000, '')


def test_a_fault_in_the_text_is_passed_on(tmp_path, tokenizer):
  def documents(split):
    yield DOCUMENT
    raise ValueError('a.txt: not UTF-8')

  with pytest.raises(ValueError, match=r'a\.txt: not UTF-8'):
    write(tmp_path / 'a', tokenizer, documents)


def test_text_too_short_to_count_is_an_error(tmp_path, tokenizer):
  with pytest.raises(ValueError, match=r'no document of train is longer than config\.routing\.prefix_tokens=32'):
    write(tmp_path / 'a', tokenizer, lambda split: [Document('0', 'short', '')])


def test_missing_and_damaged_files_are_named(tmp_path):
  with pytest.raises(ValueError, match=r'none/meta\.json is missing'):
    Sequences(tmp_path / 'none', 'train')
  write(tmp_path / 'a', Wide(), lambda split: [DOCUMENT])
  sequences, folder = Sequences(tmp_path / 'a', 'train'), tmp_path / 'a' / '0'
  (folder / 'train.array_record').write_bytes(b'x' * 200_000)
  with pytest.raises(ValueError, match=r'0/train\.array_record is damaged'):
    sequences.read([0])
  (folder / 'train.documents').write_bytes(b'x')
  with pytest.raises(ValueError, match=r'0/train\.documents is damaged'):
    sequences.columns()
  for name in ('train.array_record', 'train.documents', 'meta.json'):
    (folder / name).unlink()
  for name, action in (
    ('train.array_record', lambda: sequences.read([0])),
    ('train.documents', sequences.columns),
    ('meta.json', lambda: Sequences(tmp_path / 'a', 'train')),
  ):
    with pytest.raises(ValueError, match=rf'0/{name} is missing'):
      action()


ENDLESS = """
import itertools, sys
from dipaco_jax.data import cutting, sequences, corpus as text, sentencepiece_tokenizer
assert 'jax' not in sys.modules
trained = sentencepiece_tokenizer.train(['some words to train on'] * 3, 275)
model = sentencepiece_tokenizer.SentencePieceTokenizer(trained)
documents = lambda split: (text.Document(str(i), 'some words ' * 1000, '') for i in itertools.count())
report = lambda done, total: done == 100 and print('running', flush=True)
sequences.write_part(
  sequences.TextPart(documents), model, sys.argv[1], cutting.Cutting(128, 128, 32), progress=report, threads=4)
"""


def test_nothing_survives_a_killed_writer(tmp_path):
  """Threads tokenize, so that there is no process to be left behind; and JAX is not imported for it."""
  with subprocess.Popen([sys.executable, '-c', ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == 'running\n'
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
  assert children == [] and process.returncode == -9


@pytest.mark.parametrize('prefix', [1, 8])
def test_bytes_are_those_of_the_original_text(tmp_path, prefix):
  """Whatever the tokenizer makes of blanks and accents before it looks for tokens."""
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel({'<unk>': 0, '</s>': 1, 'cafe': 2, 'au': 3}, '<unk>'))
  parts = tokenizers.normalizers
  made.normalizer = parts.Sequence([parts.NFD(), parts.StripAccents(), parts.Lowercase()])
  made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  config = b'{"eos_token": "</s>", "unk_token": "<unk>"}'
  tokenizer = json_tokenizer.JsonTokenizer({'tokenizer.json': made.to_str().encode(), 'tokenizer_config.json': config})
  words = ['Café', '  AU   ', 'x' * 9, '漢字 \n', 'É']
  text = ' '.join(words[i % 5] for i in range(30))
  documents = [corpus.Document('0', text, 'd'), corpus.Document('1', f'  {text}  ', 'd')]
  sizes = {'seq_len': 16, 'eval_len': 24, 'prefix_tokens': prefix}
  whole.write_sequences(lambda split: documents, tokenizer, tmp_path, **sizes)
  assert Sequences(tmp_path, 'train').scored_bytes() is None
  for document, num_bytes in zip(documents, Sequences(tmp_path, 'validation').scored_bytes(), strict=True):
    ends = [match.end() for match in re.finditer(r'\S+', document.text)]
    assert num_bytes == len(document.text[ends[prefix - 1] : ends[23]].encode())


def test_bytes_of_files_of_tokens_are_those_of_their_text(tmp_path, tokenizer):
  tokens = tokenizer.encode('def f(x):\n    return "漢字"\n' * 20)
  whole.write_sequences(lambda split: [corpus.Document('0', tokens, 'd')], tokenizer, tmp_path, seq_len=64, eval_len=64,
    prefix_tokens=32)  # fmt: skip
  (num_bytes,) = Sequences(tmp_path, 'validation').scored_bytes()
  assert num_bytes == tokenizer.piece_bytes()[tokens[32:64]].sum()


def test_a_token_that_the_model_has_no_row_for_is_an_error(tmp_path, tokenizer):
  """As of a file of tokens that has one which was left out of the vocabulary."""
  tokens = np.array([*range(3, 60), tokenizer.vocab_size], np.int32)
  with pytest.raises(ValueError, match='document 7 has token 700, and the vocabulary has 700: leave out'):
    write(tmp_path, tokenizer, lambda split: [Document('7', tokens, 'd')])
