"""A grid from a pretrained model: the folder determines the fields, and contradicting fields are named."""

import json
import pathlib
import shutil
import subprocess
import sys

import model_folders
import numpy as np
import pytest
import shapes_of_families
import tiny_run

from dipaco_jax.command_line import config_file
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import config_json, model_folder, pretrained
from dipaco_jax.models import transformer
from dipaco_jax.storage import tensors

TEXT = [pathlib.Path(__file__).read_text()]


def read(config: str, *options: str, workdir: str = '') -> settings_lib.Settings:
  overrides = config_file.split([f'--config.{option}' for option in options])[1]
  return settings_lib.from_dict(config_file.read(config, overrides, workdir))


@pytest.fixture(scope='module')
def qwen(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('models') / 'qwen3'
  model_folders.write(folder, 'qwen3', TEXT)
  return folder


@pytest.mark.parametrize('variant', ['', 'dense:'])
def test_the_folder_alone_is_enough(qwen, variant):
  s = read(f'upcycle:{variant}{qwen}', "data.train=('x.txt',)", 'model.seq_len=96')
  assert config_json.canonical(s.model) == config_json.canonical(model_folders.model('qwen3')) and s.model.seq_len == 96
  assert s.tokenizer.model_file == f'{qwen}/tokenizer.json' and s.pretrain.init == str(qwen)
  assert s.num_paths == (1 if variant else 16)
  model_folder.check_config(s)


def test_any_config_takes_it_and_what_is_set_against_it_is_named(qwen):
  s = read('tiny', f'pretrain.init={qwen}', 'model.num_heads=4')
  assert s.model.qk_norm == 'head' and s.model.rope_factor == 4.0
  with pytest.raises(InputError, match=r'set config\.model\.width=16, .*set config\.model\.mlp_dim=24'):
    model_folder.check_config(s)
  # What is the default too, if somebody says so.
  for option in ('qk_norm=none', 'num_kv_heads=0'):
    s = read(f'upcycle:{qwen}', "data.train=('x.txt',)", f'model.{option}')
    assert str(getattr(s.model, option.split('=')[0])) == option.split('=')[1]
  s = read(f'upcycle:{qwen}', "data.train=('x.txt',)", 'model.qk_norm=none')
  with pytest.raises(InputError, match=r"set config\.model\.qk_norm='head'"):
    model_folder.check_config(s)


def test_a_run_that_has_begun_needs_the_folder_no_more(qwen, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(qwen, copy)
  options = (f'pretrain.init={copy}', 'model.seq_len=64')
  config = tmp_path / 'c.py'
  config.write_text(
    'from ml_collections import ConfigDict\nfrom dipaco_jax import settings\n\n'
    'def get_config():\n  return ConfigDict(settings.Settings().to_dict())\n'
  )
  first = read(str(config), *options)
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(first.to_dict()))
  shutil.rmtree(copy)
  assert read(str(config), *options, workdir=str(tmp_path / 'run')) == first
  for workdir in ('', str(tmp_path / 'other')):
    with pytest.raises(InputError, match=r"config\.json: No such file or directory; name a folder as Hugging Face's"):
      read(str(config), *options, workdir=workdir)


def test_upcycle_continues_without_the_folder_too(qwen, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(qwen, copy)
  options = "data.train=('x.txt',)", 'model.seq_len=96'
  first = read(f'upcycle:{copy}', *options)
  (tmp_path / 'config.json').write_text(json.dumps(first.to_dict()))
  shutil.rmtree(copy)
  assert read(f'upcycle:{copy}', *options, workdir=str(tmp_path)) == first
  # What is computed is of the folder, how it is computed of the config.
  assert read(f'upcycle:{copy}', options[0], workdir=str(tmp_path)).model.seq_len == 512


def test_a_tokenizer_to_train_contradicts_it(qwen):
  for option in ('vocab_size=900', 'kind=bytes', 'sample_bytes=9'):
    with pytest.raises(
      InputError, match=rf'config\.tokenizer\.{option.split("=")[0]} is of a tokenizer that is trained'
    ):
      read(f'upcycle:{qwen}', "data.train=('x.txt',)", f'tokenizer.{option}')


def test_a_model_of_the_hub_without_its_library(monkeypatch):
  monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
  with pytest.raises(InputError, match=r"init=org/odd: there is no such folder.* pip install 'dipaco_jax\[hub\]'$"):
    read('tiny', 'pretrain.init=org/odd')


@pytest.mark.parametrize('config', ['[]', '{', '[' * 100_000])
def test_a_folder_that_is_none_is_named(tmp_path, config):
  (tmp_path / 'config.json').write_text(config)
  with pytest.raises(InputError, match='not a JSON object'):
    pretrained.read_model(str(tmp_path))


def test_a_name_is_of_the_hub_unless_it_is_a_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert pretrained.located('org/model') == 'hf://org/model'
  (tmp_path / 'org' / 'model').mkdir(parents=True)
  assert pretrained.located('org/model') == 'org/model' and pretrained.located('/a/b/') == '/a/b'


SMALL = (
  'train.phases=2 train.steps_per_phase=3 train.batch_size=2 model.seq_len=64 routing.sample=200 '
  'inner.rewarm_steps=2 inner.learning_rate=0.01 train.steps_per_dispatch=3 data.validation_fraction=0.2'
).split()


def call(module: str, *options: str) -> str:
  done = subprocess.run(
    [sys.executable, '-m', f'dipaco_jax.{module}', *options], capture_output=True, text=True, timeout=200
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
  'family',
  shapes_of_families.FAMILIES,
)
def test_a_family_starts_trains_generates_and_is_exported(family, tmp_path):
  tiny_run.write_config(tmp_path, 300)
  words = [json.loads(line)['text'] for line in (tmp_path / 'text.jsonl').read_text().splitlines()]
  model_folders.write(tmp_path / 'model', family, words)
  options = [f'--config.data.train={tmp_path}/text.jsonl', *(f'--config.{option}' for option in SMALL)]
  tiny_run.run(f'upcycle:{tmp_path}/model', tmp_path / 'run', *options)
  report = json.loads((tmp_path / 'run' / 'report.json').read_text())
  assert report['paths'] == 16 and report['perplexity'] < report['base_perplexity']
  base = tensors.from_bytes(memoryview((tmp_path / 'run' / 'base' / 'params.safetensors').read_bytes()))
  made = transformer.make_model(model_folders.model(family), model_folders.VOCAB)
  given, _ = model_folder.load_params(str(tmp_path / 'model'), made)
  assert base.keys() == given.keys() and all(np.array_equal(base[name], x) for name, x in given.items())
  text = call('generate', f'--workdir={tmp_path}/run', '--prompt=aeiou', '--max_tokens=5', '--ignore_eos')
  assert text.startswith('aeiou') and len(text) > len('aeiou') + 5
  call('export', f'--workdir={tmp_path}/run', '--path=5', f'--out={tmp_path}/out')
  theirs, ours = (json.loads((tmp_path / name / 'config.json').read_text()) for name in ('model', 'out'))
  assert theirs['architectures'] == ours['architectures'] and ours['max_position_embeddings'] == 4096
  assert (tmp_path / 'out' / 'tokenizer.json').read_bytes() == (tmp_path / 'model' / 'tokenizer.json').read_bytes()
  trained, _ = model_folder.load_params(str(tmp_path / 'out'), made)
  assert any(not np.array_equal(trained[name], x) for name, x in given.items())
  call('export', f'--workdir={tmp_path}/run', '--base', f'--out={tmp_path}/base')
  for name in ('model.safetensors', 'tokenizer.json'):
    assert (tmp_path / 'base' / name).read_bytes() == (tmp_path / 'model' / name).read_bytes()
