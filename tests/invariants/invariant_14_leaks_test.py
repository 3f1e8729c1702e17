"""14. No validation text is trained on, however files, links, mixtures and repetitions overlap.

Each paragraph has a marker of its own, such as q17z, and a document is some of them: a marker on two sides is a leak.
"""

import gzip
import json
import os
import pathlib
import re
import shutil

import corpora
import numpy as np
import pytest

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, equality, sequences, shards
from dipaco_jax.pipeline import features, run as run_lib, tokenize_stage
from dipaco_jax.storage import user_modules

SEQ_LEN = 128


def records(first: int, count: int = 100) -> list[dict[str, str]]:
  return [{'text': f'Record q{n}z has some words of its own and no other.'} for n in range(first, first + count)]


def write_lines(file: pathlib.Path, given: list[dict[str, str]]) -> pathlib.Path:
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(''.join(json.dumps(record) + '\n' for record in given))
  return file


def prose(first: int, count: int = 600) -> str:
  return ''.join(f'Paragraph q{n}z of a text, which tells something.\n\n' for n in range(first, first + count))


def write_text(file: pathlib.Path, text: str) -> pathlib.Path:
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_bytes(text.encode())
  return file


def sources_that_overlap(folder):
  for i, name in enumerate(('code', 'law', 'web')):
    write_lines(folder / name / 'x.jsonl', records(1000 * i))
  return {'train': {'all': f'{folder}/*/*.jsonl', 'code': f'{folder}/code/*.jsonl'}}


def sources_of_text_that_overlap(folder):
  """Of one source whole files are held back, of the other their ends."""
  for i in range(24):
    write_text(folder / ('code' if i < 3 else 'law') / f'{i}.txt', prose(1000 * i, 300))
  return {'train': {'all': f'{folder}/*/*.txt', 'code': f'{folder}/code/*.txt'}}


def links(folder):
  file = write_lines(folder / 'x' / 'a.jsonl', records(0))
  (folder / 'y').mkdir()
  (folder / 'y' / 'soft.jsonl').symlink_to(file)
  os.link(file, folder / 'y' / 'hard.jsonl')
  return {'train': (f'{folder}/x/*', f'{folder}/y/*')}


def copies_of_other_kinds(folder):
  file = write_lines(folder / 'a.jsonl', records(0))
  (folder / 'b.jsonl.gz').write_bytes(gzip.compress(file.read_bytes()))
  corpora.write_records(folder, 'parquet', records(0)[::-1], 'c')
  return {'train': (f'{folder}/*.*',)}


def duplicates_in_a_file(folder):
  write_lines(folder / 'a.jsonl', [*records(0), *records(50), *records(0)])
  return {'train': (f'{folder}/*.jsonl',)}


def repetitions(folder):
  write_lines(folder / 'a.jsonl', records(0, 40))
  write_lines(folder / 'b.jsonl', records(1000, 300))
  return {'train': {'a': (f'{folder}/a.jsonl', 5), 'b': (f'{folder}/b.jsonl', 1)}}


def copies_of_validation_text(folder):
  """With other white space, a byte order mark and letters that are composed otherwise."""
  given = [{'text': f'Café q{n}z\n\nhas some words.'} for n in range(30)]
  write_lines(folder / 'validation.jsonl', given)
  spelled = [{'text': '\ufeff' + r['text'].replace('\n', '\r\n').replace('é', 'e\u0301') + ' '} for r in given]
  write_lines(folder / 'train' / 'a.jsonl', records(1000) + spelled)
  write_text(folder / 'train' / 'b.txt', prose(5000))
  write_text(folder / 'train' / 'c.txt', given[0]['text'] + '\n')
  return {'train': (f'{folder}/train/*',), 'validation': (f'{folder}/*.jsonl',)}


def copies_of_validation_text_in_a_mixture(folder):
  for i, name in enumerate(('law', 'web')):
    write_lines(folder / f'{name}.jsonl', records(1000 * i, 30))
    write_lines(folder / 'train' / f'{name}.jsonl', records(1000 * (1 - i), 100))
  train = {name: f'{folder}/train/{name}.jsonl' for name in ('law', 'web')}
  return {'train': train, 'validation': {name: f'{folder}/{name}.jsonl' for name in train}}


def few_texts(folder):
  """A compressed copy, and one with other line ends, of a text that is the longest of a folder."""
  file = write_text(folder / 'a.txt', prose(0))
  (folder / 'b.txt.gz').write_bytes(gzip.compress(file.read_bytes()))
  write_text(folder / 'c.txt', prose(0).replace('\n', '\r\n'))
  write_text(folder / 'd.md', prose(5000, 3000))
  return {'train': (f'{folder}/*',)}


def many_texts(folder):
  for i in range(22):
    file = write_text(folder / 'x' / f'{i}.txt', prose(1000 * i, 40))
    (folder / 'y').mkdir(exist_ok=True)
    (folder / 'y' / f'{i}.md.gz').write_bytes(gzip.compress(file.read_bytes()))
    shutil.copy(file, folder / 'y' / f'other name {i}.txt')
  return {'train': (f'{folder}/*/*',)}


def texts_that_are_records_too(folder):
  for i in range(3):
    write_text(folder / f'{i}.txt', prose(1000 * i))
  write_lines(folder / 'books.jsonl', [*({'text': prose(1000 * i)} for i in range(3)), *records(9000)])
  return {'train': (f'{folder}/*',)}


def long_texts_that_are_spelled_otherwise(folder):
  """As records, with other white space, on one line and with letters that are composed otherwise."""
  texts = [prose(1000 * i).replace('text', 'café') for i in range(3)]
  for i, text in enumerate(texts):
    write_text(folder / f'{i}.txt', text)
  spelled = [texts[0].replace(' ', '  '), ' '.join(texts[1].split()), texts[2].replace('é', 'e\u0301')]
  write_lines(folder / 'books.jsonl', [*({'text': text} for text in spelled), *records(9000)])
  return {'train': (f'{folder}/*',)}


def validation_text_inside_a_text(folder):
  write_text(folder / 'validation.txt', prose(300, 400))
  write_text(folder / 'train' / 'a.txt', prose(0, 2000))
  return {'train': (f'{folder}/train/*',), 'validation': (f'{folder}/validation.txt',)}


def part_of_a_text_as_validation_text(folder):
  write_text(folder / 'validation.txt', prose(0, 1000))
  write_text(folder / 'train' / 'a.txt', prose(300, 2000))
  return {'train': (f'{folder}/train/*',), 'validation': (f'{folder}/validation.txt',)}


CASES = [
  sources_that_overlap, sources_of_text_that_overlap, links, copies_of_other_kinds, duplicates_in_a_file, repetitions,
  copies_of_validation_text, copies_of_validation_text_in_a_mixture, few_texts, many_texts, texts_that_are_records_too,
  long_texts_that_are_spelled_otherwise, validation_text_inside_a_text, part_of_a_text_as_validation_text,
]  # fmt: skip


def tokenize(folder: pathlib.Path, data: dict, parts: int = 1):
  values = {
    'data': {'source': 'files', 'validation_fraction': 0.1, 'parts': parts, **data},
    'tokenizer': {'kind': 'byte_ids:make'},
    'model': {'seq_len': SEQ_LEN},
    'routing': {'prefix_tokens': 8, 'router_fraction': 0.1},
    'train': {'batch_size': 1},
  }
  user_modules.trust(['byte_ids'])
  run = run_lib.unattended(folder / 'run', settings.from_dict(values))
  try:
    return run.settings, tokenize_stage.tokenize(run)
  finally:
    run.metrics.close()


def markers(found: list[sequences.Sequence]) -> set[str]:
  texts = (bytes(token for token in s.tokens.tolist() if token < 256).decode('utf-8', 'replace') for s in found)
  return {marker for text in texts for marker in re.findall(r'q\d+z', text)}


@pytest.mark.parametrize('parts', [1, 3])
@pytest.mark.parametrize('case', CASES)
def test_no_validation_text_is_trained_on(tmp_path, case, parts):
  (tmp_path / 'text').mkdir()
  s, meta = tokenize(tmp_path, case(tmp_path / 'text'), parts)
  train, validation = (sequences.Sequences(tmp_path / 'run' / 'sequences', split) for split in ('train', 'validation'))
  trained, validated = (markers(split.read(range(len(split)))) for split in (train, validation))
  assert len(trained) > 20 and len(validated) > 3
  assert not trained & validated
  if case.__name__.startswith('copies_of_validation'):
    assert meta['copies_of_validation'] == len(validated) + (case is copies_of_validation_text)

  # Nor text of hold-outs, by which versions are chosen; nor router data, by which routers are.
  router_data = features.draw_router_data(train, s)
  pieces = features.router_pieces(train, s.routing.router_fraction)
  paths = np.where(router_data, -1, np.arange(len(train)) % 3)[:, None].astype(np.int32)
  dealt = shards.deal(train, paths, 3, s.seed, 0.1, pieces.end if pieces else 0.0)
  kinds = [router_data, dealt.held, ~router_data & ~dealt.held]
  routed, held, left = (markers(train.read(np.flatnonzero(kind))) for kind in kinds)
  assert routed and held and left and not routed & held and not routed & left and not held & left


def test_equal_documents_are_an_error_that_says_so(tmp_path):
  """There is nothing to hold back; and of an evaluation, no interval (see `bootstrap`)."""
  file = write_lines(tmp_path / 'a.jsonl', records(0, 1) * 300)
  for fraction in (0.02, 0.5, 0.98):
    data = settings.Data(source='files', train=(str(file),), validation_fraction=fraction)
    with pytest.raises(ValueError, match=r'no document is left for .*: all 300 documents are equal'):
      corpora.both(data)
  write_lines(tmp_path / 'b.jsonl', records(0, 1) * 30)
  data = settings.Data(source='files', train=(str(file),), validation=(f'{tmp_path}/b.jsonl',))
  with pytest.raises(ValueError, match='no document is left for training: all 300 are validation text'):
    corpora.both(data)


def test_equal_validation_documents_count_once(tmp_path):
  write_lines(tmp_path / 'a.jsonl', [*records(0), *records(0), *records(0)])
  train, validation = corpora.both(corpora.in_files(tmp_path, validation_fraction=0.2))
  assert len({d.text for d in validation}) == len(validation) > 10 and len(train) == 3 * (100 - len(validation))
  limited = list(
    corpus.documents(corpora.in_files(tmp_path, validation_fraction=0.2, max_validation_documents=9), 'validation')
  )
  assert len({d.text for d in limited}) == 9 and {d.text for d in limited} < {d.text for d in validation}


def test_what_is_equal():
  assert len({equality.digest(text) for text in ('a b', ' a\r\n\tb\n', '\ufeffa b', 'a\u00a0b')}) == 1
  assert equality.digest('\u00e9') == equality.digest('e\u0301')
  assert len({equality.digest(text) for text in ('a b', 'ab', 'A b', 'a b c', np.array([97, 98]))}) == 5
  assert equality.digest(np.array([97, 98], '<u2')) == equality.digest(np.array([97, 98], '<i4'))
