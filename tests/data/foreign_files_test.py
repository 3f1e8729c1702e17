"""Files in unsupported formats are rejected with the name of the format and fitting advice."""

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import foreign_files, tokenizer_files
from dipaco_jax.huggingface import pretrained

TEKKEN = b'{"config": {"pattern": "x", "num_vocab_tokens": 1, "default_vocab_size": 1}, "vocab": []}'


@pytest.mark.parametrize(
  ('name', 'content', 'words'),
  [
    ('small.gguf', b'GGUF\3\0\0\0', 'is a GGUF file, which is not read: convert it with transformers'),
    ('tokenizer.json', b'GGUF\3\0\0\0', 'is a GGUF file'),
    ('tekken.json', TEKKEN, "is Mistral's own format (tekken), which is not read: use the tokenizer.json of the same"),
    ('tokenizer.json', TEKKEN, "is Mistral's own format (tekken)"),
    ('tekken_240911.json', b'{', "is Mistral's own format (tekken)"),
    ('tokenizer.json', b'version https://git-lfs.github.com/spec/v1\n', 'is a pointer of Git LFS, not the file itself'),
    ('model.safetensors', b'x', 'holds weights: name the tokenizer.json or tokenizer.model next to it'),
  ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, name, content, words):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError) as e:
    tokenizer_files.open_file(tmp_path / name)
  assert str(e.value).startswith(f'config.tokenizer.model_file={tmp_path / name} {words}')


def test_a_folder_is_no_tokenizer(tmp_path):
  with pytest.raises(InputError, match=r'is a folder: name its tokenizer\.json or tokenizer\.model'):
    tokenizer_files.open_file(tmp_path)


@pytest.mark.parametrize(
  ('init', 'names', 'words'),
  [
    ('small.gguf', ['small.gguf'], 'is a GGUF file, which is not read: convert it with transformers'),
    ('model.safetensors', ['config.json', 'model.safetensors'], 'is a file: name its folder, '),
    ('config.json', ['config.json'], 'is a file: name its folder, '),
    ('tokenizer.model.v3', ['tokenizer.model.v3'], 'is a file: name its folder, '),
    ('', ['small.Q4_1.gguf', 'README.md'], 'has no config.json, and small.Q4_1.gguf is a GGUF file'),
    ('', ['params.json', 'consolidated.safetensors', 'tekken.json'], "of its authors' own format: use Hugging Face's"),
    ('', ['adapter_config.json', 'adapter_model.safetensors'], 'merge the adapter with peft'),
    ('', [], "config.json: No such file or directory; name a folder as Hugging Face's transformers writes it"),
  ],
)
def test_a_path_that_is_no_model_is_named(tmp_path, init, names, words):
  for name in names:
    (tmp_path / name).touch()
  with pytest.raises(InputError) as e:
    pretrained.read_model(pretrained.located(str(tmp_path / init)))
  assert str(e.value).startswith('config.pretrain.init=') and words in str(e.value)


@pytest.mark.parametrize(
  ('names', 'words'),
  [
    (['tokenizer.model.v3'], 'but tokenizer.model.v3: use the tokenizer.json of the same model'),
    (['tokenizer.model.v3'], 'or set config.tokenizer.model_file=DIR/tokenizer.model.v3'),
    (['tekken.json'], "but tekken.json, Mistral's own format: use the tokenizer.json of the same model"),
    (['vocab.json', 'merges.txt'], "with transformers, AutoTokenizer.from_pretrained('DIR').save_pretrained('DIR')"),
    ([], 'add its own, name it in config.tokenizer.model_file, or start from another folder'),
  ],
)
def test_what_to_do_without_a_tokenizer(names, words):
  assert words in foreign_files.explain_missing_tokenizer('DIR', names)
