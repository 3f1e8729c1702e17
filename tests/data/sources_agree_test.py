"""The same documents from files, a dataset of tfds and a task of seqio: the same sequences, shards and modules."""

import functools
import pathlib
import signal

import numpy as np
import prepared
import pytest
import tiny_run
import whole

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, sentencepiece_tokenizer, sequences, tokenizer_files
from dipaco_jax.storage import user_modules

pytestmark = pytest.mark.filterwarnings('ignore')  # TensorFlow's own

TASK = """
import functools

import seqio

seqio.TaskRegistry.add(
  'my_task',
  seqio.TfdsDataSource({dataset!r}),
  preprocessors=[
    functools.partial(seqio.preprocessors.rekey, key_map={{'targets': 'text', 'domain': 'domain'}}),
    seqio.preprocessors.tokenize,
  ],
  output_features={{'targets': seqio.Feature(seqio.SentencePieceVocabulary({model!r}))}},
)
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  root = tmp_path_factory.mktemp('agree')
  splits = {'train': prepared.documents(300, seed=0), 'validation': prepared.documents(60, seed=1)}
  prepared.write_lines(root / 'lines', splits)
  for form in ('tfrecord', 'array_record'):
    prepared.prepare(root / form, splits, form, files=1)
  (root / 'tokenizer.model').write_bytes(sentencepiece_tokenizer.train([d['text'] for d in splits['train']], 300))
  (root / 'one_task.py').write_text(TASK.format(model=str(root / 'tokenizer.model'), dataset=prepared.NAME))
  return root


def sources(folder: pathlib.Path) -> dict[str, dict]:
  """Fields of `data` for each."""
  lines = folder / 'lines'
  tfds = {'source': 'tfds', 'name': prepared.NAME}
  return {
    'files': {'source': 'files', 'train': (f'{lines}/train.jsonl',), 'validation': (f'{lines}/validation.jsonl',)},
    'tfrecord': tfds | {'data_dir': str(folder / 'tfrecord')},
    'array_record': tfds | {'data_dir': str(folder / 'array_record')},
    'seqio': {
      'source': 'seqio',
      'name': 'my_task',
      'module': 'one_task',
      'text_key': 'targets',
      'data_dir': str(folder / 'tfrecord'),
    },
  }


def made(folder: pathlib.Path, data: settings.Data, out: pathlib.Path) -> dict[str, bytes]:
  """Sequences and shards, as files by name."""
  model = tokenizer_files.open_file(folder / 'tokenizer.model')
  read = functools.partial(corpus.documents, data)
  whole.write_sequences(read, model, out / 'sequences', seq_len=64, eval_len=64, prefix_tokens=32)
  found = sequences.Sequences(out / 'sequences', 'train')
  paths = np.arange(len(found))[:, None] % 4
  whole.write_shards(found, paths, 4, out / 'shards', seq_len=64, seed=0, holdout_fraction=0.1)
  return {str(file.relative_to(out)): file.read_bytes() for file in out.rglob('*') if file.is_file()}


@pytest.mark.slow
def test_sequences_and_shards_agree(folder, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(folder))
  user_modules.trust(['one_task'])
  found = {name: made(folder, settings.Data(**data), tmp_path / name) for name, data in sources(folder).items()}
  sequence_files = 5 + 6 + 2  # of training, of validation, and two meta.json
  shard_files = 4 * 3 + 1
  assert len(found['files']) == sequence_files + shard_files
  assert all(files == found['files'] for files in found.values()), [
    (name, path) for name, files in found.items() for path in files if files[path] != found['files'][path]
  ]


def write_config(folder: pathlib.Path, out: pathlib.Path, name: str) -> pathlib.Path:
  """tiny_run's, with another source of text."""
  lines = f'  c.data.update(**{sources(folder)[name]!r}, holdout_fraction=0.1)\n'
  lines += f'  c.tokenizer.model_file = {str(folder / "tokenizer.model")!r}\n'
  kept = [line for line in tiny_run.CONFIG.format(train='').splitlines(True) if 'c.data.update' not in line]
  config = out / f'{name}.py'
  config.write_text(''.join(kept).replace('  return c\n', lines + '  return c\n'))
  return config


@pytest.mark.slow
def test_runs_agree_and_resume(folder, tmp_path, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', str(folder))  # where the task is
  tiny_run.run(write_config(folder, tmp_path, 'files'), tmp_path / 'files')
  for name in ('tfrecord', 'seqio'):
    config, workdir = write_config(folder, tmp_path, name), tmp_path / name
    for moment in ((workdir / 'tokenizer.model').exists, lambda at=workdir: tiny_run.updates(at, 'train') >= 10):
      tiny_run.stop_when(tiny_run.start(config, workdir), moment, signal.SIGKILL)
    tiny_run.run(config, workdir)
    assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(tmp_path / 'files')
