"""Exported paths: what another engine makes of them is what we make of them."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import hf_small
import jax.numpy as jnp
import numpy as np
import object_server
import pytest
import safetensors.numpy
from repository import ROOT

from dipaco_jax import export
from dipaco_jax.config.settings import Model
from dipaco_jax.data import sequences
from dipaco_jax.huggingface import config_json, families, model_folder
from dipaco_jax.inference import trained_run
from dipaco_jax.models import transformer as model_lib
from dipaco_jax.storage import module_store, object_store, tensors


def command(*options: str, status: int = 0) -> str:
  """What the command prints; on stderr only where it is to fail, whatever JAX logs of devices that it looks for."""
  line = [sys.executable, '-m', 'dipaco_jax.export', *options]
  env = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
  done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
  assert done.returncode == status and (status or not done.stderr), done.stderr
  return done.stderr if status else done.stdout


@pytest.fixture(scope='module')
def run(undisturbed):
  return trained_run.TrainedRun(str(undisturbed))


@pytest.fixture(scope='module')
def exported(undisturbed, tmp_path_factory):
  """All paths of the run, by the command."""
  out = tmp_path_factory.mktemp('exported') / 'all'
  said = command(f'--workdir={undisturbed}', '--all', f'--out={out}')
  assert (
    said.splitlines()[3] == f'{out}/3: path 3 at version {trained_run.TrainedRun(str(undisturbed)).best_versions[3]}'
  )
  assert {file.name for file in out.iterdir()} == {'0', '1', '2', '3'}
  return out


def test_the_card_says_what_was_measured(undisturbed, exported):
  report = json.loads((undisturbed / 'report.json').read_text())
  page = (exported / '2' / 'README.md').read_text()
  for value in (report['perplexity_by_path'][2], report['perplexity'], report['base_perplexity']):
    assert f'| {value:.2f} |' in page
  assert '# Path 2 of 4' in page and '| this path | 2, at a=1, b=0 |' in page
  assert f'{report["validation_tokens"]:,} tokens of text held back' in page and 'text.jsonl' in page


def test_what_was_not_measured_has_no_figure(undisturbed, run, tmp_path):
  report = json.loads((undisturbed / 'report.json').read_text())
  other = next(v for v in module_store.versions(undisturbed) if v != run.best_versions[2])
  export.export(run, 2, other, tmp_path / 'other', 'float32')
  assert f'{report["perplexity_by_path"][2]:.2f}' not in (tmp_path / 'other' / 'README.md').read_text()
  unfinished = trained_run.TrainedRun(str(undisturbed))
  for place, figures in ('no_report', {}), ('early_report', dict.fromkeys(report)):  # None: not measured yet
    unfinished.report = figures
    export.export(unfinished, 2, run.best_versions[2], tmp_path / place, 'float32')
    assert 'Nothing was measured yet' in (tmp_path / place / 'README.md').read_text()


def test_an_export_that_is_read_and_exported_again_is_the_same(undisturbed, run, exported):
  folder = exported / '1'
  params = module_store.load_path(undisturbed, run.layout, 1)
  made = model_lib.make_model(run.settings.model, run.tokenizer.vocab_size)
  found, about = model_folder.load_params(str(folder), made)
  assert found.keys() == params.keys() and all((found[name] == params[name]).all() for name in params)
  assert about['sha256'].keys() == {'model.safetensors'} and not about['vocabulary_left_out']
  dipaco = json.loads((folder / 'config.json').read_text())['dipaco_jax']
  again = model_folder.make_files(found, run.settings.model, run.tokenizer, 'float32', dipaco)
  assert again == {name: (folder / name).read_bytes() for name in again} and len(again) == 6


def test_weights_are_in_the_layout_of_llama():
  """Theirs are [out, in], and heads follow one another."""
  model = Model(width=6, num_layers=1, num_heads=2, head_dim=4, mlp_dim=5, seq_len=40, tied=False, rope_base=5e3)
  shapes = model_lib.shapes(model_lib.make_model(model, 7))
  ours = {name: np.random.default_rng(0).normal(size=x.shape) for name, x in shapes.items()}
  theirs = families.to_theirs(families.FAMILIES[0], ours)
  block, of = {n.removeprefix('block_0/'): x for n, x in ours.items()}, 'model.layers.0'
  for d, h, k in np.ndindex(6, 2, 4):
    for x in 'qkv':
      assert theirs[f'{of}.self_attn.{x}_proj.weight'][4 * h + k, d] == block[f'attention/{x}'][d, h, k]
    assert theirs[f'{of}.self_attn.o_proj.weight'][d, 4 * h + k] == block['attention/o'][h, k, d]
  for x in ('gate', 'up', 'down'):
    assert (theirs[f'{of}.mlp.{x}_proj.weight'] == block[f'mlp/{x}'].T).all()
  assert (theirs[f'{of}.input_layernorm.weight'] == block['attention_norm/scale']).all()
  assert (theirs[f'{of}.post_attention_layernorm.weight'] == block['mlp_norm/scale']).all()
  assert (theirs['model.norm.weight'] == ours['final_norm/scale']).all()
  assert (theirs['model.embed_tokens.weight'] == ours['embed/tokens']).all()
  assert (theirs['lm_head.weight'] == ours['head/kernel'].T).all() and len(theirs) == len(ours) == 12
  assert config_json.write(model, 7, {'bos': 1, 'eos': 2})[1] == {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'vocab_size': 7, 'hidden_size': 6,
    'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 2, 'head_dim': 4, 'intermediate_size': 5,
    'tie_word_embeddings': False, 'rms_norm_eps': 1e-6, 'rope_theta': 5e3, 'rope_scaling': None, 'hidden_act': 'silu',
    'attention_bias': False, 'mlp_bias': False, 'max_position_embeddings': 40, 'bos_token_id': 1, 'eos_token_id': 2,
    'pad_token_id': None,
  }  # fmt: skip


def test_bfloat16_rounds_the_weights(undisturbed, run, tmp_path):
  export.export(run, 3, run.best_versions[3], tmp_path / 'half', 'bfloat16')
  found = tensors.from_bytes(memoryview((tmp_path / 'half' / 'model.safetensors').read_bytes()))
  params = module_store.load_path(undisturbed, run.layout, 3)
  for name, x in families.to_theirs(families.FAMILIES[0], params).items():
    assert found[name].dtype == jnp.bfloat16 and (found[name] == x.astype(jnp.bfloat16)).all()
  assert json.loads((tmp_path / 'half' / 'config.json').read_text())['torch_dtype'] == 'bfloat16'


def test_a_folder_of_ours_is_written_again_and_no_other(run, exported, tmp_path):
  shutil.copytree(exported / '0', tmp_path / 'out')
  before = {file.name: file.read_bytes() for file in (tmp_path / 'out').iterdir()}
  (tmp_path / 'out' / 'model.safetensors').write_bytes(b'')
  export.export(run, run.number('0,0'), run.best_versions[0], tmp_path / 'out', 'float32')
  assert before == {file.name: file.read_bytes() for file in (tmp_path / 'out').iterdir()}
  (tmp_path / 'mine').mkdir()
  export.check_out(tmp_path / 'mine')  # empty
  (tmp_path / 'mine' / 'config.json').write_text('{"model_type": "llama"}')
  for other in (tmp_path / 'mine', tmp_path / 'mine' / 'config.json'):
    with pytest.raises(ValueError, match='name another folder'):
      export.check_out(other)


def test_what_transformers_has_written_is_not_ours(exported, tmp_path):
  shutil.copytree(exported / '0', tmp_path / 'tuned')
  file = tmp_path / 'tuned' / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | {'transformers_version': '5'}))  # it keeps our key
  for text in (file.read_text(), '5', '[]', '{'):
    file.write_text(text)
    with pytest.raises(ValueError, match='not an export'):
      export.check_out(tmp_path / 'tuned')


@pytest.mark.slow
def test_neighbours_and_links_stay(undisturbed, tmp_path):
  (tmp_path / 'real').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'real')
  (tmp_path / '.real.backup').mkdir()
  (tmp_path / '.real.backup' / 'precious').write_text('x')
  (tmp_path / '.real.txt').write_text('x')
  for _ in range(2):
    command(f'--workdir={undisturbed}', '--path=1', f'--out={tmp_path / "link"}')
  assert (tmp_path / 'link').is_symlink() and (tmp_path / 'real' / 'model.safetensors').exists()
  assert sorted(f.name for f in tmp_path.iterdir()) == ['.real.backup', '.real.txt', 'link', 'real']
  assert (tmp_path / '.real.backup' / 'precious').exists()


@pytest.mark.parametrize(
  'options, words',
  [
    (['--path=3'], 'name a run with --workdir=DIR'),
    (['--workdir=x', '--out=y'], 'name one path with --path=3, all of them with --all, or the base'),
    (['--workdir=x', '--out=y', '--path=1', '--all'], 'name one path with --path=3, all'),
    (['--workdir=x', '--out=y', '--base', '--version=3'], '--version is of paths: the base has one'),
    (['--workdir=x', '--out=s3://y', '--path=1'], 'name a folder of this machine'),
    (
      ['--workdir=x', '--out=x/../x/y', '--all'],
      '--out=x/../x/y is in --workdir=x, among the files of the run: name a',
    ),
    (['--workdir=x', '--out=x', '--path=1'], '--out=x is in --workdir=x'),
    (['--workdir=x', '--out=y', '--path=1', '--dtype=int8'], '--dtype=int8 should be float32 or bfloat16'),
  ],
)
def test_wrong_options_are_reported_before_any_work(options, words):
  assert words in command(*options, status=2) and not (ROOT / 'y').exists()


def test_an_export_is_not_taken_for_a_run(exported):
  with pytest.raises(ValueError, match=r'its config\.json is not that of a run'):
    trained_run.TrainedRun(str(exported / '1'))


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_fix(run):
  with pytest.raises(ValueError, match=r'--out=/proc/x: .*name a folder that can be made'):
    export.export(run, 0, run.best_versions[0], pathlib.Path('/proc/x'), 'float32')


@pytest.mark.parametrize('path', ['one', '1,', '-1', '4', '2,0', '0,0,0'])
def test_a_path_that_does_not_exist_is_rejected(run, path):
  with pytest.raises(ValueError, match='--path='):
    run.number(path)


@pytest.mark.slow
def test_an_export_from_a_bucket_is_the_same_and_can_be_a_base(undisturbed, run, exported, tmp_path, monkeypatch):
  with object_server.s3_server() as endpoint:
    for name, value in object_server.environment(endpoint).items():
      monkeypatch.setenv(name, value)
    url = f's3://{object_server.BUCKET}/run'
    place = object_store.open_storage(url)
    for file in undisturbed.rglob('*'):
      if file.is_file() and file.relative_to(undisturbed).parts[0] not in ('checkpoints', 'shards', 'events'):
        place.write(str(file.relative_to(undisturbed)), file.read_bytes())
    export.export(trained_run.TrainedRun(url), 1, run.best_versions[1], tmp_path / 'out', 'float32')
    for file in (exported / '1').iterdir():
      assert (tmp_path / 'out' / file.name).read_bytes() == file.read_bytes()
      place.write(f'llama/{file.name}', file.read_bytes())
    s = run.settings
    s = dataclasses.replace(
      s,
      pretrain=dataclasses.replace(s.pretrain, init=f'{url}/llama'),
      tokenizer=dataclasses.replace(s.tokenizer, model_file=f'{url}/llama/tokenizer.model'),
    )
    model_folder.check_config(s)
    found, _ = model_folder.load_params(s.pretrain.init, model_lib.make_model(s.model, run.tokenizer.vocab_size))
    assert (found['block_0/mlp/up'] == module_store.load_path(undisturbed, run.layout, 1)['block_0/mlp/up']).all()
    with pytest.raises(ValueError, match=r'nowhere: config\.json: '):
      model_folder.load_params(f'{url}/nowhere', model_lib.make_model(s.model, 7))


# -- beside transformers


@pytest.fixture(scope='module')
def llama(exported):
  """(tokenizer, model) of path 2, as transformers reads them."""
  pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  folder = exported / '2'
  return transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)


def their_logits(llama, tokens_BL: np.ndarray) -> np.ndarray:
  import torch

  with torch.no_grad():
    return llama[1](torch.tensor(tokens_BL.astype(np.int64))).logits.numpy()


def test_transformers_computes_our_logits(run, llama):
  path = run.path(2)
  tokens = np.random.default_rng(0).integers(0, run.tokenizer.vocab_size, run.settings.model.seq_len)
  ours = np.asarray(path.logits(tokens))
  assert ours.std() > 0.1
  close = hf_small.tolerance(run.settings.model, len(tokens), ours)
  np.testing.assert_allclose(their_logits(llama, tokens[None])[0], ours, rtol=0, atol=close)


def test_transformers_continues_a_text_as_we_do(run, llama):
  import torch

  path, prompt = run.path(2), 'bcd dfg'
  tokens = path.tokenizer.encode(prompt, eos=False).tolist()
  assert llama[0](prompt)['input_ids'] == tokens
  for end in range(len(tokens), len(tokens) + 12):  # what is behind a token does not change its logits
    tokens.append(int(path.logits(tokens + [0] * (run.settings.model.seq_len - end))[end - 1].argmax()))
  inputs = llama[0](prompt, return_tensors='pt')
  found = llama[1].generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=-1)
  assert found[0].tolist() == tokens and isinstance(found, torch.Tensor)
  assert llama[0].decode(tokens) == path.tokenizer.decode(tokens)


def test_transformers_measures_the_perplexity_of_the_report(undisturbed, run, llama):
  s, routed = run.settings, np.load(undisturbed / 'routing' / '0' / 'validation.npy')
  found = sequences.Sequences(str(undisturbed / 'sequences'), 'validation')
  nll = count = greatest = 0
  for document in found.read(np.flatnonzero(routed == 2)):
    tokens = document.tokens[: s.model.seq_len]
    logits = their_logits(llama, tokens[None])[0, :-1].astype(np.float64)
    each = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), tokens[1:]]
    nll += each[s.routing.prefix_tokens - 1 :].sum()
    count += len(each[s.routing.prefix_tokens - 1 :])
    greatest = max(greatest, np.abs(logits).max())
  report = json.loads((undisturbed / 'report.json').read_text())['perplexity_by_path'][2]
  close = 2 * hf_small.tolerance(s.model, s.model.seq_len, greatest)  # of a token's nats: its logit, and their sum
  assert count > 100 and abs(np.log(report) - nll / count) < close


def test_safetensors_reads_our_halves():
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  data = safetensors.numpy.save({'a': x, 'b': x.astype(jnp.bfloat16)}, metadata={'format': 'pt'})
  found = tensors.from_bytes(memoryview(data))
  assert (found['a'] == x).all() and (found['b'] == x).all() and set(found) == {'a', 'b'}
