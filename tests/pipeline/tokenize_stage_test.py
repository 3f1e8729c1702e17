"""Text is tokenized, and shards are written, in parts, by any number of processes; those that are there are kept."""

import dataclasses
import io
import pathlib
import shutil
import types

import numpy as np
import pytest
import sentencepiece

from dipaco_jax.config import settings
from dipaco_jax.data import corpus
from dipaco_jax.pipeline import inputs, route_stage, run as run_lib, stage_records, tokenize_stage


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob('*') if file.is_file()}


@pytest.fixture
def run(undisturbed, tmp_path):
  """A run without any artefact."""
  made = run_lib.unattended(tmp_path / 'run', stage_records.read_settings(undisturbed))
  yield made
  made.metrics.close()


def copy(undisturbed, run, *names):
  for name in names:
    target = run.workdir / name
    target.parent.mkdir(exist_ok=True, parents=True)
    (shutil.copytree if (undisturbed / name).is_dir() else shutil.copy)(undisturbed / name, target)


def test_the_stage_makes_what_is_missing_and_leaves_nothing_else(undisturbed, run):
  """Killed after two parts of the sequences and before the tokenizer had its last sample."""
  inputs.note_inputs(run, 'tokenize')
  folder = tokenize_stage.find_folder(run.workdir)
  copy(undisturbed, run, 'tokenizer.model')
  tokenize_stage.write_parts(run, folder / 'sequences', (0, 2), corpus.plan_held_back(run.settings))
  assert {path.name for path in (folder / 'sequences').iterdir()} == {'0', '2'}
  (folder / 'sequences' / '2' / 'mark').touch()
  (run.workdir / 'tokenize-of other files').mkdir()

  meta = tokenize_stage.tokenize(run)
  assert (run.workdir / 'sequences' / '2' / 'mark').exists(), 'it was made again'
  (run.workdir / 'sequences' / '2' / 'mark').unlink()
  assert contents(run.workdir / 'sequences') == contents(undisturbed / 'sequences')
  assert {path.name for path in run.workdir.iterdir()} == {'tokenizer.model', 'sequences', 'inputs.json'}
  assert meta['parts'] == 3 and meta['documents'] + meta['validation_documents'] == 300


def test_a_part_that_another_process_has_not_made_is_named(tmp_path):
  for name in '02':
    (tmp_path / name).mkdir()
  with pytest.raises(ValueError, match=r'parts \[1\] of the text were read from other files'):
    tokenize_stage.check_parts([tmp_path / name for name in '012'])


def test_files_that_come_while_they_are_read(undisturbed, run, tmp_path, monkeypatch):
  (tmp_path / 'b.jsonl').write_text((undisturbed.parent / 'text.jsonl').read_text())
  data = dataclasses.replace(run.settings.data, train=(f'{tmp_path}/*.jsonl',), validation=(), parts=2)
  made = dataclasses.replace(run, settings=dataclasses.replace(run.settings, data=data))
  copy(undisturbed, run, 'tokenizer.model')
  write = tokenize_stage.write_parts

  def write_and_more(*args):
    write(*args)
    shutil.copy(tmp_path / 'b.jsonl', tmp_path / 'a.jsonl')

  monkeypatch.setattr(tokenize_stage, 'write_parts', write_and_more)
  with pytest.raises(ValueError, match='changed while they were read: run the'):
    tokenize_stage.tokenize(made)
  monkeypatch.undo()
  assert tokenize_stage.tokenize(made)['documents'] > 300


@pytest.mark.parametrize('parts', [1, 4])
def test_the_tokenizer_does_not_depend_on_parts(undisturbed, run, parts):
  s = run.settings
  sample = dataclasses.replace(s.tokenizer, sample_bytes=20_000)  # of 50,000
  models = []
  for n in (parts, 3):
    of = dataclasses.replace(s, tokenizer=sample, data=dataclasses.replace(s.data, parts=n))
    made = dataclasses.replace(run, workdir=run.workdir / str(n), settings=of)
    tokenize_stage.tokenize(made)
    models.append((made.workdir / 'tokenizer.model').read_bytes())
  assert models[0] == models[1] != (undisturbed / 'tokenizer.model').read_bytes()


def test_a_tokenizer_of_bytes_is_trained_kept_and_given_to_another_run(run):
  s = dataclasses.replace(run.settings, tokenizer=settings.Tokenizer(kind='bytes', vocab_size=400))
  made = dataclasses.replace(run, workdir=run.workdir / 'first', settings=s)
  first = tokenize_stage.tokenize(made)
  assert {path.name for path in made.workdir.iterdir()} == {
    'sequences',
    'inputs.json',
    *(name + seal for name in ('tokenizer.json', 'tokenizer_config.json') for seal in ('', '.sha256')),
  }
  assert first['vocab_size'] == made.tokenizer.vocab_size == 400
  given = dataclasses.replace(s, tokenizer=settings.Tokenizer(model_file=str(made.workdir / 'tokenizer.json')))
  again = dataclasses.replace(run, workdir=run.workdir / 'second', settings=given)
  assert tokenize_stage.tokenize(again) == first
  assert contents(again.workdir / 'sequences') == contents(made.workdir / 'sequences')
  assert again.tokenizer.files == made.tokenizer.files


def test_a_tokenizer_that_no_export_can_have_is_reported_before_any_work(undisturbed, run, tmp_path, caplog):
  words = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['some words to train on'] * 9), model_writer=words, vocab_size=40, model_type='word',
    hard_vocab_limit=False, minloglevel=3,
  )  # fmt: skip
  (tmp_path / 'mine.model').write_bytes(words.getvalue())
  for name in (tmp_path / 'mine.model', undisturbed / 'tokenizer.model'):
    tokenize_stage.check_input(dataclasses.replace(run.settings, tokenizer=settings.Tokenizer(model_file=str(name))))
  assert [record.getMessage() for record in caplog.records] == [
    f'{tmp_path}/mine.model: no path of this run can be exported: the tokenizer cannot be written as tokenizer.json: '
    'its pieces are words or characters; use the tokenizer.json of its model if there is one, or train another'
  ]


def test_parts_of_other_files_are_not_taken(undisturbed, run):
  folder = run.workdir / 'tokenize-of other files' / 'sequences'
  copy(undisturbed, run, 'tokenizer.model')
  tokenize_stage.write_parts(run, folder, (0, 1), corpus.plan_held_back(run.settings))
  (folder / '0' / 'mark').touch()
  tokenize_stage.tokenize(run)
  assert contents(run.workdir / 'sequences') == contents(undisturbed / 'sequences')


def test_shares_of_shards_make_the_whole(undisturbed, run):
  copy(undisturbed, run, 'sequences', 'stages', 'tokenizer.model')
  routed = np.load(undisturbed / 'routing' / '0' / 'train.npy')
  folders = [run.workdir / 'shards' / '0-parts' / str(i) for i in range(4)]
  for share, there in (((1, 3), {'1'}), ((0, 3), {'0', '1', '3'})):
    route_stage.write_shard_parts(run, folders, routed.copy, share)
    assert {path.name for path in folders[0].parent.iterdir()} == there
  (folders[3] / 'mark').touch()
  copy(undisturbed, run, 'routing')
  route_stage.write_shards(run, 0)
  (run.workdir / 'shards' / '0' / '3' / 'mark').unlink()  # it was not made again
  route_stage.write_base_shards(run, 'pretrain')
  assert contents(run.workdir / 'shards') == contents(undisturbed / 'shards')


@pytest.mark.parametrize(
  'source, documents, is_logged', [('files', 88, True), ('files', 40, False), ('stdlib', 90, False)]
)
def test_a_limit_that_leaves_text_out_is_logged(source, documents, is_logged, caplog):
  data = settings.Data(source=source, max_documents=100)
  tokenize_stage._warn_of_limit(data, {'documents': documents, 'validation_fraction': 0.1})
  assert bool(caplog.records) == is_logged


@pytest.mark.parametrize(('turn_end', 'said'), [('<end_of_turn>', True), ('<eos>', False), (None, False)])
def test_a_line_says_so_where_documents_do_not_end_with_the_eos_token(turn_end, said, caplog):
  given = types.SimpleNamespace(special={'<eos>': 1, '<end_of_turn>': 2}, turn_end=turn_end, eos_id=1)
  tokenize_stage._log_document_end('a/tokenizer.json', given)
  line = 'a/tokenizer.json: documents end with <eos>; <end_of_turn>, its eos_token, ends turns of a chat'
  assert caplog.messages == [line] * said


def test_the_number_of_documents_is_known_where_both_splits_are_limited():
  def most(documents: int, validation_documents: int, *validation: str) -> int:
    data = settings.Data(max_documents=documents, max_validation_documents=validation_documents, validation=validation)
    return tokenize_stage.most_documents(data)

  assert most(300, 20) == most(300, 0) == 300 and most(300, 20, 'v.txt') == 320
  assert most(0, 20) == most(0, 20, 'v.txt') == most(300, 0, 'v.txt') == 0
