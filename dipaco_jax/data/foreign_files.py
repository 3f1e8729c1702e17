"""Files of text, models and tokenizers in unsupported formats, with advice on each."""

import os

GGUF = b'GGUF'  # the first bytes of a file
TEKKEN = b'"default_vocab_size"'  # in the beginning of a tekken.json
BEGINNING = 2000  # bytes
LFS = b'version https://git-lfs'  # the first bytes of what `git clone` writes in place of a large file
LFS_ADVICE = 'is a pointer of Git LFS, not the file itself: run `git lfs pull` in its repository'
CONVERT_GGUF = (
  'is a GGUF file, which is not read: convert it with transformers, from_pretrained(folder, gguf_file=name, '
  'dtype="float32") of AutoModelForCausalLM and of AutoTokenizer, then save_pretrained (transformers 5 also needs '
  'quantization_config=GgufConfig(dequantize=True)); or name the folder that it was made from'
)
TOKENIZER_JSON = "use the tokenizer.json of the same model, which Hugging Face's version of its repository has"
OF_ONE_FOLDER = ('.safetensors', '.bin', '.json', '.pth', '.pt')

TEXT = {  # the first bytes of files whose names say that they are text, and what to do
  b'\x1f\x8b': 'is compressed by gzip: add .gz to its name',
  b'BZh': 'is compressed by bzip2: add .bz2 to its name',
  b'\xfd7zXZ\0': 'is compressed by xz: add .xz to its name',
  b'\x28\xb5\x2f\xfd': 'is compressed by zstd: add .zst to its name',
  b'PK\x03\x04': 'is a ZIP archive: unpack it',
  b'PAR1': 'is a Parquet file: name it .parquet',
  b'%PDF-': 'is a PDF: extract its text, for instance with pdftotext',
  b'\xff\xfe': 'is UTF-16: convert it, with iconv -f UTF-16 -t UTF-8',
  b'\xfe\xff': 'is UTF-16: convert it, with iconv -f UTF-16 -t UTF-8',
}


def explain_text(beginning: bytes) -> str:
  """Returns which format a file named as text has instead, by its first bytes; '' if it may be text."""
  return next((advice for first, advice in TEXT.items() if beginning.startswith(first)), '')


def explain_tokenizer(path: str, content: bytes) -> str:
  """Explains the kind of a file that was given as a tokenizer, and the fix; '' if it may be a tokenizer."""
  name = os.path.basename(path)
  if content.startswith(GGUF):
    return CONVERT_GGUF
  if content.startswith(LFS):
    return LFS_ADVICE
  if name.startswith('tekken') or TEKKEN in content[:BEGINNING]:
    return f"is Mistral's own format (tekken), which is not read: {TOKENIZER_JSON}"
  if name.endswith('.safetensors'):
    return 'holds weights: name the tokenizer.json or tokenizer.model next to it'
  return ''


def explain_model(path: str, names: list[str]) -> str:
  """Explains the kind of a path that was given as a model, and the fix; '' if it may be a folder of a model.

  Args:
    path: of a file or a folder without config.json.
    names: of the files in that folder.
  """
  if path.endswith('.gguf'):
    return CONVERT_GGUF
  if path.endswith(OF_ONE_FOLDER) or os.path.isfile(path):
    return f'is a file: name its folder, {os.path.dirname(path) or "."}'
  if files := sorted(name for name in names if name.endswith('.gguf')):
    return f'has no config.json, and {files[0]} {CONVERT_GGUF}'
  if files := sorted({'params.json', 'consolidated.safetensors', 'consolidated.00.pth'} & {*names}):
    return f"has no config.json, but {files[0]}, of its authors' own format: use Hugging Face's version of the model"
  if 'adapter_config.json' in names:
    return 'has no config.json, but adapter_config.json: merge the adapter with peft, merge_and_unload, and save that'
  return ''


def explain_missing_tokenizer(folder: str, names: list[str]) -> str:
  """Returns what to do for a folder of a model that has no tokenizer.json and no tokenizer.model.

  Args:
    folder, names: the folder, and the names of its files.
  """
  has = 'has no tokenizer.json and no tokenizer.model'
  if pieces := [name for name in names if '.model.v' in name or name.endswith('.model')]:
    named = f'config.tokenizer.model_file={folder}/{pieces[-1]}'
    return f'{has}, but {pieces[-1]}: {TOKENIZER_JSON}, and add it to the folder; or set {named}'
  if tekken := [name for name in names if name.startswith('tekken')]:
    return f"{has}, but {tekken[0]}, Mistral's own format: {TOKENIZER_JSON}, and add it to the folder"
  if {'vocab.json', 'merges.txt'} <= {*names}:
    make = f'AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})'
    return f'{has}, but vocab.json and merges.txt: make tokenizer.json of them with transformers, {make}'
  return f'{has}: add its own, name it in config.tokenizer.model_file, or start from another folder'
