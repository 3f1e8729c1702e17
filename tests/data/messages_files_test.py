"""Conversations in files of each kind, and records that are none."""

import collections
import dataclasses
import io
import json
import tarfile

import chats
import pyarrow as pa
import pyarrow.parquet
import pytest

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import answers, corpus, left_out, sequences
from dipaco_jax.data.cutting import Cutting

SYSTEM = {'role': 'system', 'content': 'You are a helpful assistant, and always brief. ' * 20}
CONVERSATIONS = [[SYSTEM, *chats.chat(f'question {i}', f'answer {i}')] for i in range(40)]


def of(pattern, **changes) -> settings.Data:
  kept = {'validation_fraction': 0.2, 'format': 'messages'} | changes
  return settings.Data(source='files', train=(str(pattern),), **kept)


def write(folder, kind: str, conversations=CONVERSATIONS, key: str = 'messages'):
  rows = [{key: messages, 'domain': f'of {i % 2}'} for i, messages in enumerate(conversations)]
  table = pa.Table.from_pylist(rows) if kind in ('parquet', 'arrow') else None
  file = folder / f'a.{kind}'
  if kind == 'jsonl':
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  elif kind == 'parquet':
    pa.parquet.write_table(table, file)
  elif kind == 'arrow':
    with pa.ipc.new_stream(file, table.schema) as writer:
      writer.write_table(table)
  else:
    with tarfile.open(file, 'w') as tar:
      for i, row in enumerate(rows):
        about = tarfile.TarInfo(f'{i:03}.json')
        content = json.dumps(row).encode()
        about.size = len(content)
        tar.addfile(about, io.BytesIO(content))
  return file


@pytest.mark.parametrize('key', ['messages', 'chat'])
@pytest.mark.parametrize('kind', ['jsonl', 'parquet', 'arrow', 'tar'])
def test_each_kind_of_file_gives_the_same_conversations(kind, key, tmp_path):
  data = of(write(tmp_path, kind, key=key), **({} if key == 'messages' else {'text_key': key}))
  read = [document for split in ('train', 'validation') for document in corpus.documents(data, split)]
  found = sorted((document.text.messages for document in read), key=lambda m: int(m[1]['content'].split()[1]))
  assert found == CONVERSATIONS
  assert {document.domain for document in read} == {'of 0', 'of 1'}


@pytest.mark.parametrize('kind', ['jsonl', 'parquet', 'arrow', 'tar'])
def test_other_keys_are_named(kind, tmp_path):
  with pytest.raises(InputError, match=r"no messages under 'messages'.*config.data.text_key"):
    corpus.check_readable(of(write(tmp_path, kind, key='chat')))


BAD = [
  (chats.chat('hi'), 'messages have no answer'),
  (chats.chat('hi', ' '), r'messages\[1\].content is empty'),
  ([{'role': 'robot', 'content': 'x'}, *chats.chat('hi', 'yes')], r"messages\[0\].role is 'robot'"),
  ('hi', 'messages should be a list of objects'),
]


@pytest.mark.parametrize('bad, words', BAD)
def test_a_bad_record_is_named_with_its_line(bad, words, tmp_path):
  file = write(tmp_path, 'jsonl', [*CONVERSATIONS[:3], bad, *CONVERSATIONS[3:]])
  with pytest.raises(InputError, match=rf'a.jsonl:4: {words}'):
    list(corpus.documents(of(file), 'train'))


def text_of(data, tmp_path) -> tuple[sequences.TextPart, collections.Counter]:
  omitted = left_out.Omitted(collections.Counter(), collections.Counter())
  read = lambda split: corpus.documents(data, split, omitted=omitted)  # noqa: E731
  return sequences.TextPart(read, omitted=omitted, skip_bad_records=data.skip_bad_records), omitted.bad_records


def test_what_is_written_is_read_again(tmp_path):
  tokenizer = chats.tokenizer(chat_template=chats.CHATML)
  text, _ = text_of(of(write(tmp_path, 'jsonl')), tmp_path)
  cutting = Cutting(2000, 2000, 4, conversations=True)
  (tmp_path / 's' / '0').mkdir(parents=True)
  sequences.write_part(text, tokenizer, str(tmp_path / 's' / '0'), cutting)
  meta = sequences.merge_meta(str(tmp_path / 's'), 1)
  (tmp_path / 's' / 'meta.json').write_text(json.dumps(meta))
  encoder = answers.Encoder(tokenizer)
  for split in ('train', 'validation'):
    found = sequences.Sequences(tmp_path / 's', split)
    documents = list(corpus.documents(of(tmp_path / 'a.jsonl'), split))
    assert len(found) == len(documents) > 0
    for sequence, document in zip(found.read(range(len(found))), documents, strict=True):
      cut = encoder.cut(document, cutting, split == 'validation')
      assert sequence.marked.tolist() == cut.kept[0].tolist()
      assert sequence.tokens.tolist() == answers.plain(cut.kept[0]).tolist()
      assert sequence.prefix(4).tolist() == cut.routed.tolist() and len(cut.routed) == 4
      assert sequence.num_scored(9) == (cut.kept[0] >= 0).sum()
  assert sequences.Sequences(tmp_path / 's', 'validation').scored_bytes().tolist() == [
    len(document.text.messages[2]['content']) for document in documents
  ]


def test_what_the_template_rejects_is_named_or_skipped(tmp_path):
  strict = "{% if 'question 7' in messages[1].content %}{{ raise_exception('seven') }}{% endif %}" + chats.CHATML
  tokenizer, file = chats.tokenizer(chat_template=strict), write(tmp_path, 'jsonl')
  cutting = Cutting(2000, 2000, 4, conversations=True)
  with pytest.raises(InputError, match=r'a.jsonl:8: messages: the chat template does not take them: seven'):
    sequences.write_part(text_of(of(file), tmp_path)[0], tokenizer, str(tmp_path), cutting)
  text, skipped = text_of(of(file, skip_bad_records=True), tmp_path)
  meta = sequences.write_part(text, tokenizer, str(tmp_path), cutting)
  assert skipped == meta['skipped_records'] == {left_out.REJECTED: 1}
  assert meta['train']['documents'] + meta['validation']['documents'] == len(CONVERSATIONS) - 1
  again = dataclasses.replace(of(file, skip_bad_records=True), train=(settings.Source('one', (str(file),), 1.0),))
  text, skipped = text_of(again, tmp_path)
  documents = [document._replace(times=1) for document in text.documents('train')]
  sequences.write_part(text._replace(documents=lambda split: documents), tokenizer, str(tmp_path), cutting)
  assert not skipped, 'they were counted when the source was read before'


@pytest.mark.parametrize('name', ['a.txt', 'a.md', 'a.bin'])
def test_files_without_records_are_rejected_before_any_work(name, tmp_path):
  (tmp_path / name).write_text('some text')
  with pytest.raises(InputError, match=r"a\.\w+ has no conversations \(config.data.format='messages'\): name .jsonl"):
    corpus.check_readable(of(tmp_path / name))
