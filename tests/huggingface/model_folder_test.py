"""A base from a model that transformers wrote: the same logits here, and clear words where it does not fit."""

import dataclasses
import functools
import hashlib
import json
import pathlib

import hf_small
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import shapes_of_families
import tokenizers

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import json_tokenizer, sentencepiece_tokenizer, tokenizer_files
from dipaco_jax.huggingface import config_json, families, model_folder
from dipaco_jax.inference import trained_run
from dipaco_jax.models import transformer as model_lib
from dipaco_jax.pipeline import run as run_lib, stage, stages, tokenize_stage
from dipaco_jax.storage import files, module_store

V, L = 70, 24
MODEL = settings.Model(
  width=32, num_layers=2, num_heads=4, head_dim=8, mlp_dim=48, seq_len=L, tied=False, norm_epsilon=1e-5, rope_base=5e3
)


def write(folder: pathlib.Path, vocab_size: int = V, kv_heads: int = 4, **changes) -> dict[str, np.ndarray]:
  """A checkpoint of Llama, drawn by numpy; returns its weights."""
  return write_model(folder, dataclasses.replace(MODEL, num_kv_heads=kv_heads), vocab_size, **changes)


def write_model(folder: pathlib.Path, model: settings.Model, vocab_size: int = V, **changes) -> dict[str, np.ndarray]:
  """A checkpoint in their layout, drawn by numpy; returns its weights."""
  rng, shapes = np.random.default_rng(0), shapes_of(model, vocab_size)
  family, config = config_json.write(model, vocab_size, {'pad': 0})
  params = {name: rng.normal(0, 0.2, x.shape).astype('f') for name, x in shapes.items()}
  weights = families.to_theirs(family, params)
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps({k: x for k, x in (config | changes).items() if x is not None}))
  safetensors.numpy.save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
  return weights


@functools.cache
def shapes_of(model: settings.Model, vocab_size: int):
  return model_lib.shapes(model_lib.make_model(model, vocab_size))


@pytest.fixture(scope='module')
def pieces(tmp_path_factory):
  """A SentencePiece model of 400 pieces."""
  file = tmp_path_factory.mktemp('pieces') / 'tokenizer.model'
  file.write_bytes(sentencepiece_tokenizer.train([pathlib.Path(__file__).read_text()], 400))
  return file


def of(folder: pathlib.Path, model_file: str = '', **changes) -> settings.Settings:
  s = settings.Settings(model=dataclasses.replace(MODEL, **changes), tokenizer=settings.Tokenizer(model_file))
  return dataclasses.replace(s, pretrain=settings.Pretrain(steps=0, init=str(folder)))


@pytest.mark.parametrize('kv_heads', [1, 2, 4])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('tied', [True, False])
def test_logits_are_those_of_transformers(tmp_path, kv_heads, dtype, tied):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  config = transformers.LlamaConfig(
    vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=8,
    intermediate_size=48, tie_word_embeddings=tied, rms_norm_eps=1e-5, rope_theta=5e3, initializer_range=0.2,
  )  # fmt: skip
  torch.manual_seed(0)
  theirs = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
  theirs.save_pretrained(tmp_path, max_shard_size='20KB' if kv_heads == 2 else '1GB')
  assert (tmp_path / 'model.safetensors.index.json').exists() == (kv_heads == 2)
  made = model_lib.make_model(dataclasses.replace(MODEL, tied=tied), V)
  params, about = model_folder.load_params(str(tmp_path), made)
  assert about['key_value_heads'] == kv_heads and len(about['sha256']) == len([*tmp_path.glob('*.safetensors')])
  tokens = np.random.default_rng(0).integers(0, V, (2, L)).astype(np.int32)
  ours = hf_small.logits(made, params, tokens)
  with torch.no_grad():
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  assert ours.std() > 0.1
  np.testing.assert_allclose(ours, expected, rtol=0, atol=hf_small.tolerance(made.config, L, ours))


@pytest.mark.parametrize('name', shapes_of_families.FAMILIES)
def test_logits_of_a_family_are_those_of_transformers(name, tmp_path):
  """Of texts beyond the original length of scaled rotary embeddings; written by either side, read by the other."""
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  model = dataclasses.replace(MODEL, **{'num_layers': 4} | shapes_of_families.FAMILIES[name])
  write_model(tmp_path / 'ours', model)
  tokens = np.random.default_rng(0).integers(0, V, (2, L)).astype(np.int32)
  read = transformers.AutoModelForCausalLM.from_pretrained
  theirs, told = read(tmp_path / 'ours', dtype=torch.float32, output_loading_info=True)
  assert not any(told[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
  assert type(theirs).__name__ == json.loads((tmp_path / 'ours' / 'config.json').read_text())['architectures'][0]
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  theirs.save_pretrained(tmp_path / 'theirs')
  made = model_lib.make_model(model, V)
  params, _ = model_folder.load_params(str(tmp_path / 'ours'), made)
  again, _ = model_folder.load_params(str(tmp_path / 'theirs'), made)
  assert all((again[name] == x).all() for name, x in params.items()) and again.keys() == params.keys()
  ours = hf_small.logits(made, params, tokens)
  assert ours.std() > 0.1
  np.testing.assert_allclose(ours, expected, rtol=0, atol=hf_small.tolerance(made.config, L, ours))


UNSAID = [  # changes of config.json; None: it is left out
  ('qwen2', {'use_sliding_window': True, 'sliding_window': 5, 'max_window_layers': None, 'layer_types': None}),
  ('qwen2', {'use_sliding_window': True, 'sliding_window': 5, 'max_window_layers': 0, 'layer_types': None}),
  ('smollm3', {'use_sliding_window': True, 'sliding_window': 5, 'layer_types': ['full_attention'] * 4}),
  ('smollm3', {'no_rope_layers': None, 'no_rope_layer_interval': 3}),
  ('mistral', {'layer_types': ['sliding_attention', 'full_attention'] * 2}),
  ('gemma3', {'layer_types': None, 'sliding_window_pattern': 4, 'sliding_window': 3}),
  ('llama3', {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}, 'max_position_embeddings': 12}),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'changes'), UNSAID)
def test_what_a_config_leaves_out_is_what_transformers_takes(name, changes, tmp_path):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  model = dataclasses.replace(MODEL, **{'num_layers': 4} | shapes_of_families.FAMILIES[name])
  write_model(tmp_path, model, **changes)
  theirs = json.loads((tmp_path / 'config.json').read_text())
  tokens = np.random.default_rng(0).integers(0, V, (2, L)).astype(np.int32)
  with torch.no_grad():
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(torch.tensor(tokens))
  read = dataclasses.replace(settings.Model(seq_len=L), **config_json.read_config(theirs))
  made = model_lib.make_model(read, V)
  ours = hf_small.logits(made, model_folder.load_params(str(tmp_path), made)[0], tokens)
  np.testing.assert_allclose(ours, found.logits.numpy(), rtol=0, atol=hf_small.tolerance(made.config, L, ours))


def test_what_would_be_dropped_is_named(tmp_path):
  weights = write(tmp_path)
  file, made = tmp_path / 'model.safetensors', model_lib.make_model(MODEL, V)
  derived = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, 'f')}
  safetensors.numpy.save_file(weights | derived, file)
  model_folder.load_params(str(tmp_path), made)
  safetensors.numpy.save_file(weights | {'model.layers.0.self_attn.q_proj.bias': np.ones(32, 'f')}, file)
  with pytest.raises(InputError, match=r'q_proj\.bias is not a parameter of this model, of 1 such'):
    model_folder.load_params(str(tmp_path), made)


def test_a_head_beside_a_tied_embedding_is_the_same(tmp_path):
  tied = dataclasses.replace(MODEL, tied=True)
  weights, made = write_model(tmp_path, tied), model_lib.make_model(tied, V)
  file, head = tmp_path / 'model.safetensors', weights['model.embed_tokens.weight']
  safetensors.numpy.save_file(weights | {'lm_head.weight': head.copy()}, file)
  assert 'head/kernel' not in model_folder.load_params(str(tmp_path), made)[0]
  safetensors.numpy.save_file(weights | {'lm_head.weight': head + 1}, file)
  with pytest.raises(InputError, match=r'set it to False there, and config\.model\.tied=False'):
    model_folder.load_params(str(tmp_path), made)


def test_shared_keys_and_values_are_repeated(tmp_path, caplog):
  weights = write(tmp_path, kv_heads=2)
  params, about = model_folder.load_params(str(tmp_path), model_lib.make_model(MODEL, V))
  k_DHK = params['block_1/attention/k']
  assert k_DHK.shape == (32, 4, 8) and about['key_value_heads'] == 2
  for head in range(4):
    rows = slice(head // 2 * 8, head // 2 * 8 + 8)
    assert (k_DHK[:, head] == weights['model.layers.1.self_attn.k_proj.weight'][rows].T).all()
  assert 'keys and values of 2 heads are repeated for 4' in caplog.text


def test_rows_behind_the_tokenizers_last_are_left_out(tmp_path, caplog):
  weights = write(tmp_path, vocab_size=V + 10)
  params, about = model_folder.load_params(str(tmp_path), model_lib.make_model(MODEL, V))
  assert (params['embed/tokens'] == weights['model.embed_tokens.weight'][:V]).all()
  assert (params['head/kernel'] == weights['lm_head.weight'][:V].T).all()
  assert about['vocabulary_left_out'] == 10 and '10 rows' in caplog.text


def test_shards_are_all_read(tmp_path):
  weights = write(tmp_path)
  names = sorted(weights)
  for i in range(2):
    part = {name: weights[name].astype(jnp.bfloat16) for name in names[i::2]}
    (tmp_path / f'{i}.safetensors').write_bytes(safetensors.numpy.save(part))
  (tmp_path / 'model.safetensors').unlink()
  index = {'weight_map': {name: f'{i % 2}.safetensors' for i, name in enumerate(names)}}
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
  params, about = model_folder.load_params(str(tmp_path), model_lib.make_model(MODEL, V))
  expected = weights['model.layers.0.mlp.up_proj.weight'].T.astype(jnp.bfloat16)
  assert (params['block_0/mlp/up'] == expected).all() and params['block_0/mlp/up'].dtype == np.float32
  assert about['sha256'].keys() == {'0.safetensors', '1.safetensors'}


@pytest.mark.parametrize(
  'config, words',
  [
    ({'hidden_size': 64, 'rope_theta': 1e6}, 'set config.model.width=64, set config.model.rope_base=1000000.0'),
    ({'rope_parameters': {'rope_type': 'default', 'rope_theta': 7e5}}, 'set config.model.rope_base=700000.0'),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, "set config.model.rope_scaling='linear'"),
    ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "its rope scaling is 'dynamic', not one of default, linear"),
    ({'attention_bias': True}, 'its attention_bias is True, not False'),
    ({'model_type': 'gpt2'}, "its model_type is 'gpt2', not one of llama"),
    ({'hidden_act': 'gelu'}, "config.json: its hidden_act is 'gelu', not 'silu'"),
    ({'hidden_size': None}, 'config.json: it has no hidden_size'),
    ({'vocab_size': 399}, 'its vocab_size is 399, and its tokenizer has 400 tokens: it is the tokenizer of another'),
  ],
)
def test_what_does_not_fit_is_named_before_any_work(tmp_path, pieces, config, words):
  write(tmp_path, 400)
  tokenize_stage.check_init(of(tmp_path, str(pieces)))
  write(tmp_path, **{'vocab_size': 400} | config)
  with pytest.raises(ValueError) as e:
    tokenize_stage.check_init(of(tmp_path, str(pieces)))
  assert str(e.value).startswith(f'config.pretrain.init={tmp_path}') and words in str(e.value)


def test_the_folder_of_a_run_is_not_taken_for_a_model(tmp_path, pieces):
  write(tmp_path, 400)
  (tmp_path / 'config.json').write_text(json.dumps(settings.Settings().to_dict()))
  with pytest.raises(ValueError, match='it is a run, not a model: export a path of it with python -m'):
    tokenize_stage.check_init(of(tmp_path, str(pieces)))


@pytest.mark.parametrize(
  'kind, words',
  [
    ('F8_E4M3', "model.safetensors has weights of type 'F8_E4M3': convert them to float32, bfloat16 or float16"),
    ('I8', "model.safetensors has weights of type 'I8'"),
    (None, 'model.safetensors has no model.norm.weight'),
  ],
)
def test_weights_that_cannot_be_used_are_named_before_any_work(tmp_path, pieces, kind, words):
  """By the header alone, in which one weight is of another type, or has another name."""
  write(tmp_path, 400)
  file = tmp_path / 'model.safetensors'
  data = file.read_bytes()
  start = 8 + int.from_bytes(data[:8], 'little')
  header = json.loads(data[8:start])
  norm = header.pop('model.norm.weight')
  header |= {'model.norm.weight': norm | {'dtype': kind}} if kind else {'model.norm.other': norm}
  words_of_header = json.dumps(header).encode()
  file.write_bytes(len(words_of_header).to_bytes(8, 'little') + words_of_header + data[start:])
  with pytest.raises(ValueError) as e:
    tokenize_stage.check_init(of(tmp_path, str(pieces)))
  assert words in str(e.value)


def write_tokenizer(folder: pathlib.Path, special: bool, **config) -> int:
  """A tokenizer.json with an added token behind all others, as Gemma 3's; returns the number of the others."""
  made = tokenizers.Tokenizer.from_str(
    json_tokenizer.train([pathlib.Path(__file__).read_text()], 400)['tokenizer.json'].decode()
  )
  made.add_special_tokens(['<bos>'])
  num_others = made.get_vocab_size()
  made.add_tokens([tokenizers.AddedToken('<image>', special=special)])
  made.save(str(folder / 'tokenizer.json'))
  decoder = {str(num_others - 1): {'content': '<bos>'}, str(num_others): {'content': '<image>'}}
  config = {
    'bos_token': '<bos>',
    'image_token': '<image>',
    'added_tokens_decoder': decoder,
    'more': ['<image>'],
  } | config
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return num_others


def test_a_token_without_a_row_that_no_text_can_have_is_left_out(tmp_path):
  """Published Gemma 3 models of text have one, for images."""
  num_others = write_tokenizer(tmp_path, special=True)
  write(tmp_path, num_others)
  s = of(tmp_path, f'{tmp_path}/tokenizer.json')
  tokenize_stage.check_init(s)
  tokenizer = model_folder.open_tokenizer(s)
  assert tokenizer.vocab_size == num_others
  assert tokenizer.decode(tokenizer.encode('a <image> b')) == 'a <image> b'
  assert b'<image>' not in b''.join(tokenizer.files.values()) and b'<bos>' in tokenizer.files['tokenizer_config.json']
  all_kept = tokenizer_files.open_file(tmp_path / 'tokenizer.json')
  assert all_kept.vocab_size == num_others + 1 and all_kept.special_ids == tokenizer.special_ids
  assert tokenizer_files.load(tokenizer.files).encode('x y').tolist() == all_kept.encode('x y').tolist()


@pytest.mark.parametrize(('special', 'config'), [(False, {}), (True, {'eos_token': '<image>'})])
def test_a_token_without_a_row_that_a_text_can_have_is_an_error(tmp_path, special, config):
  num_others = write_tokenizer(tmp_path, special, **config)
  write(tmp_path, num_others)
  words = f"'<image>' is token {num_others}, and a text can have it, but the model has {num_others} rows"
  with pytest.raises(InputError, match=words):
    tokenize_stage.check_init(of(tmp_path, f'{tmp_path}/tokenizer.json'))


def test_its_tokenizer_is_to_be_named(tmp_path, pieces):
  write(tmp_path, 400)
  with pytest.raises(ValueError, match=r'has no tokenizer\.json and no tokenizer\.model'):
    tokenize_stage.check_init(of(tmp_path))
  (tmp_path / 'tokenizer.model').write_bytes(pieces.read_bytes())
  with pytest.raises(ValueError, match=rf'set config.tokenizer.model_file={tmp_path}/tokenizer.model'):
    tokenize_stage.check_init(of(tmp_path))
  tokenize_stage.check_init(of(tmp_path, f'{tmp_path}/tokenizer.model'))


@pytest.mark.parametrize(
  'name, data, words',
  [
    ('config.json', b'[]', 'config.json is not a JSON object'),
    ('config.json', b'[' * 100_000, 'config.json is not a JSON object'),
    ('config.json', None, 'config.json: No such file'),
    ('model.safetensors', None, 'model.safetensors: No such file'),
    ('model.safetensors', b'x' * 100, 'model.safetensors is not a safetensors file, or incomplete'),
    ('model.safetensors', b'\xff' * 8 + b'[' * 100_000, 'model.safetensors is not a safetensors file, or incomplete'),
    ('model.safetensors', b'version https://git-lfs.github.com/spec/v1', 'model.safetensors is a pointer of Git LFS'),
    ('model.safetensors', b'', 'model.safetensors is not a safetensors file, or incomplete'),
    ('model.safetensors', safetensors.numpy.save({'x': np.zeros(3)}), 'has no lm_head.weight'),
  ],
)
def test_files_that_are_not_what_they_should_be_are_named(tmp_path, name, data, words):
  write(tmp_path)
  file = tmp_path / name
  whole = file.read_bytes()
  file.unlink() if data is None else file.write_bytes(data)
  with pytest.raises(ValueError, match=words):
    model_folder.load_params(str(tmp_path), model_lib.make_model(MODEL, V))
  if name == 'model.safetensors':
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match='incomplete'):
      model_folder.load_params(str(tmp_path), model_lib.make_model(MODEL, V))


def in_two_shards(folder: pathlib.Path, weights: dict[str, np.ndarray]):
  names = sorted(weights)
  for i in range(2):
    safetensors.numpy.save_file({name: weights[name] for name in names[i::2]}, folder / f'{i}.safetensors')
  (folder / 'model.safetensors').unlink()
  index = {'weight_map': {name: f'{i % 2}.safetensors' for i, name in enumerate(names)}}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))


@pytest.mark.parametrize('change', [lambda data: data[:-1], lambda data: data + b'x', lambda data: data[:-100]])
def test_a_shard_of_another_size_is_found_before_any_work(tmp_path, pieces, change):
  in_two_shards(tmp_path, write(tmp_path, 400))
  tokenize_stage.check_init(of(tmp_path, str(pieces)))
  file = tmp_path / '1.safetensors'
  data = file.read_bytes()
  file.write_bytes(change(data))
  words = rf'1\.safetensors has {len(change(data)):,} bytes, and its header describes {len(data):,}: download or copy'
  with pytest.raises(InputError, match=words):
    tokenize_stage.check_init(of(tmp_path, str(pieces)))


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', ['float32', jnp.bfloat16, 'float16'])
def test_a_value_that_is_not_finite_is_found_before_any_work(tmp_path, pieces, value, dtype):
  weights = {name: x.astype(dtype) for name, x in write(tmp_path, 400).items()}
  name = 'model.layers.1.mlp.up_proj.weight'
  weights[name][3, 5] = value
  in_two_shards(tmp_path, weights)
  with pytest.raises(InputError, match=rf'{name} in \d\.safetensors is not finite \(NaN or infinity\) in 1 place'):
    tokenize_stage.check_init(of(tmp_path, str(pieces)))


def test_a_value_that_float32_cannot_hold_is_found_before_any_work(tmp_path, pieces):
  weights = {name: x.astype(np.float64) for name, x in write(tmp_path, 400).items()}
  weights['model.layers.1.mlp.up_proj.weight'][3, 5] = 1e300
  in_two_shards(tmp_path, weights)
  with pytest.raises(InputError, match=r'up_proj.weight in \d\.safetensors is not finite .* in 1 place:'):
    tokenize_stage.check_init(of(tmp_path, str(pieces)))


def test_a_shard_that_is_missing_and_a_weight_in_two_shards_are_named(tmp_path, pieces):
  weights = write(tmp_path, 400)
  in_two_shards(tmp_path, weights)
  safetensors.numpy.save_file(weights, tmp_path / '1.safetensors')
  with pytest.raises(InputError, match=f'{min(weights)} is in 1.safetensors and in another file: download'):
    tokenize_stage.check_init(of(tmp_path, str(pieces)))
  (tmp_path / '1.safetensors').unlink()
  words = 'config.pretrain.init=.*: 1.safetensors, which model.safetensors.index.json names, cannot be read: download'
  with pytest.raises(InputError, match=words):
    tokenize_stage.check_init(of(tmp_path, str(pieces)))


def test_a_weight_that_its_shard_lacks_is_named(tmp_path, pieces):
  weights = write(tmp_path, 400)
  in_two_shards(tmp_path, weights)
  first = {name: weights[name] for name in sorted(weights)[2::2]}
  safetensors.numpy.save_file(first, tmp_path / '0.safetensors')
  with pytest.raises(InputError, match=f'0.safetensors, 1.safetensors has no {min(weights)}'):
    tokenize_stage.check_init(of(tmp_path, str(pieces)))


def test_an_added_token_without_a_row_is_named(tmp_path):
  text = [pathlib.Path(__file__).read_text()]
  write(tmp_path, 400)
  for name, data in json_tokenizer.train(text, 400).items():
    (tmp_path / name).write_bytes(data)
  file = tmp_path / 'tokenizer.json'
  tokenize_stage.check_init(of(tmp_path, str(file)))
  tokenizer = json.loads(file.read_text())
  tokenizer['added_tokens'].append(tokenizer['added_tokens'][0] | {'id': 400, 'content': '<pad>'})
  file.write_text(json.dumps(tokenizer))
  tokenize_stage.check_init(of(tmp_path, str(file)))  # no text can have it
  config = tmp_path / 'tokenizer_config.json'
  config.write_text(json.dumps(json.loads(config.read_text()) | {'pad_token': '<pad>'}))
  words = r"'<pad>' is token 400, and a text can have it, but the model has 400 rows: take it out of tok"
  with pytest.raises(InputError, match=words) as e:
    tokenize_stage.check_init(of(tmp_path, str(file)))
  assert 'model.resize_token_embeddings(401)' in str(e.value)


@pytest.mark.parametrize('config', [b'', b'[]', b'[' * 100_000, b'{"dipaco_jax": {}, "transformers_version": "5.0"}'])
def test_a_config_that_is_not_ours_is_none(config):
  assert not model_folder.is_our_config(config) and model_folder.is_our_config(b'{"dipaco_jax": {}}')


def test_a_weight_of_another_shape_is_named(tmp_path):
  weights = write(tmp_path)
  layer = 'model.layers.1'
  for name in ('model.embed_tokens', 'model.norm', f'{layer}.self_attn.k_proj', f'{layer}.self_attn.o_proj', 'lm_head'):
    name += '.weight'
    for part in (weights[name][:-1], weights[name][..., :0]):
      safetensors.numpy.save_file(weights | {name: part}, tmp_path / 'model.safetensors')
      with pytest.raises(InputError, match=rf'{name} is of shape'):
        model_folder.load_params(str(tmp_path), model_lib.make_model(MODEL, V))


def test_shapes_and_a_tied_head_are_looked_at_before_any_work(tmp_path, pieces):
  tied = dataclasses.replace(MODEL, tied=True)
  weights, file = write_model(tmp_path, tied, 400), tmp_path / 'model.safetensors'
  of_tied, head = of(tmp_path, str(pieces), tied=True), weights['model.embed_tokens.weight']
  safetensors.numpy.save_file(weights | {'lm_head.weight': head.copy()}, file)
  tokenize_stage.check_init(of_tied)
  safetensors.numpy.save_file(weights | {'lm_head.weight': head + 1}, file)
  with pytest.raises(InputError, match=r'lm_head\.weight is not model\.embed_tokens\.weight'):
    tokenize_stage.check_init(of_tied)
  safetensors.numpy.save_file(weights | {'model.embed_tokens.weight': head[:399]}, file)
  with pytest.raises(InputError, match=r'embed_tokens\.weight is of shape \(399, 32\), which contradicts'):
    tokenize_stage.check_init(of_tied)


def test_another_tokenizer_than_its_own_is_rejected(tmp_path, pieces):
  write(tmp_path, 400)
  (tmp_path / 'tokenizer.model').write_bytes(pieces.read_bytes())
  (tmp_path / 'copy.model').write_bytes(pieces.read_bytes())
  tokenize_stage.check_init(of(tmp_path, f'{tmp_path}/copy.model'))
  other = tmp_path / 'other.model'
  other.write_bytes(sentencepiece_tokenizer.train([pathlib.Path(__file__).read_text()], 399))
  with pytest.raises(InputError, match=rf'={other} is not the tokenizer that config\.pretrain\.init=.* leave it out'):
    tokenize_stage.check_init(of(tmp_path, str(other)))


def test_pytorchs_own_files_give_the_same(tmp_path):
  torch = pytest.importorskip('torch')
  weights, made = write(tmp_path), model_lib.make_model(MODEL, V)
  expected, _ = model_folder.load_params(str(tmp_path), made)
  (tmp_path / 'model.safetensors').unlink()
  torch.save({name: torch.from_numpy(x) for name, x in weights.items()}, tmp_path / 'pytorch_model.bin')
  found, about = model_folder.load_params(str(tmp_path), made)
  assert found.keys() == expected.keys() and all((found[name] == x).all() for name, x in expected.items())
  assert about['sha256'].keys() == {'pytorch_model.bin'}


def test_all_ends_of_texts_are_written(tmp_path):
  tokenizer = json_tokenizer.train([pathlib.Path(__file__).read_text()], 400)
  params = {name: np.zeros(x.shape, 'f') for name, x in shapes_of(MODEL, 400).items()}
  for listed, written in ({'eos_token_id': [1, 5]}, [1, 5, 0]), ({}, 0):
    made = tokenizer_files.load(tokenizer | {'generation_config.json': json.dumps(listed).encode()})
    found = model_folder.make_files(params, MODEL, made, 'float32', {})
    for name in ('config.json', 'generation_config.json'):
      assert json.loads(found[name])['eos_token_id'] == written


def test_a_run_starts_from_it(undisturbed, tmp_path):
  """The stage of a run, with what its record says; the digest of the stage tells where it started."""
  values = json.loads((undisturbed / 'config.json').read_text())
  theirs = settings.from_dict(values)
  params = module_store.load_path(undisturbed, trained_run.TrainedRun(str(undisturbed)).layout, 0)
  made = model_folder.make_files(
    params, theirs.model, tokenizer_files.open_file(undisturbed / 'tokenizer.model'), 'float32', {}
  )
  for name, data in made.items():
    files.write_file(tmp_path / 'llama' / name, data)
  values['pretrain'] |= {'steps': 0, 'init': str(tmp_path / 'llama')}
  s = settings.from_dict(values)
  assert stage.digest(s, 'pretrain') != stage.digest(theirs, 'pretrain')
  (tmp_path / 'run').mkdir()
  for name in ('sequences', 'tokenizer.model', 'stages/tokenize.json'):
    (tmp_path / 'run' / name).parent.mkdir(exist_ok=True)
    (tmp_path / 'run' / name).symlink_to(undisturbed / name)
  run = run_lib.unattended(tmp_path / 'run', s)
  result = stages.pretrain(run)
  run.metrics.close()
  assert all((x == params[name]).all() for name, x in run.base().items()) and run.base().keys() == params.keys()
  assert result['init']['folder'] == str(tmp_path / 'llama') and result['steps'] == 0
  assert result['init']['sha256'] == {'model.safetensors': hashlib.sha256(made['model.safetensors']).hexdigest()}
