"""Exported folders as GGUF files: llama.cpp's converter reads them, and llama.cpp writes greedily what we write.

    LLAMA_CPP=DIR python -m pytest --slow tests/huggingface/gguf_test.py

DIR is llama.cpp's source, for its convert_hf_to_gguf.py, which no package installs; that of the package
llama-cpp-python (sdist, vendor/llama.cpp) will do. Needs torch, transformers, gguf and xllamacpp.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import made_run
import numpy as np
import pytest
import shapes_of_families
import small

from dipaco_jax.config import settings
from dipaco_jax.data import tokenizer_files
from dipaco_jax.huggingface import model_folder
from dipaco_jax.models import transformer

LLAMA_CPP = os.environ.get('LLAMA_CPP')
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LLAMA_CPP, reason='LLAMA_CPP names no source of llama.cpp')]

SIZES = {'width': 32, 'num_layers': 7, 'num_heads': 4, 'head_dim': 32, 'mlp_dim': 48, 'seq_len': 64, 'dtype': 'float32'}
PROMPT = 'The quick brown'
NUM_TOKENS = 12
RARE = slice(0, 3 + 256)  # ids of the tokenizer's special pieces and single bytes
# What llama.cpp has built in, or leaves out: windows of Mistral, every how many blocks have no rope or no window, the
# size of heads of Qwen 2.
AS_LLAMA_CPP = {
  'llama2': {},
  'llama3': {},
  'smollm2': {},
  'mistral': {'window': 64},
  'smollm3': {'no_rope_every': 4},
  'qwen2': {'width': 128, 'rope_scaling': 'none'},
  'qwen3': {},
  'gemma3': {'full_every': 6, 'rope_local_base': 1e4, 'query_scale': 32.0},
}
SPACE_IN_FRONT = ('qwen2', 'qwen3')  # whose converter does not read add_prefix_space

GENERATE = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = sys.argv[1], 128, 1, False, 10
server = xllamacpp.Server(params)
for prompt in json.loads(sys.argv[2]):
  asked = {'prompt': prompt, 'n_predict': int(sys.argv[3]), 'temperature': 0}
  answer = server.handle_completions(asked | {'ignore_eos': True, 'return_tokens': True})
  answer = answer if isinstance(answer, dict) else json.loads(answer)
  print(json.dumps(answer['__verbose']['tokens']), flush=True)
"""


def write(folder: pathlib.Path, family: str) -> tuple[list[int], list[int]]:
  """A folder of random weights; the ids of the prompt, and those that we write."""
  tokenizer = tokenizer_files.load({'tokenizer.model': made_run.tokenizer_bytes()})
  fields = SIZES | shapes_of_families.FAMILIES[family] | AS_LLAMA_CPP[family]
  model = dataclasses.replace(settings.Model(), **fields)
  made = transformer.make_model(model, tokenizer.vocab_size)
  params = small.base(made, 1)
  for name in params.keys() & {'embed/tokens', 'head/kernel'}:  # llama.cpp's JSON takes no half characters
    params[name][RARE if name == 'embed/tokens' else (slice(None), RARE)] *= 0.01
  for name, data in model_folder.make_files(params, model, tokenizer, 'float32', {}).items():
    (folder / name).write_bytes(data)
  ids = tokenizer.encode(PROMPT, eos=False).tolist()
  start, length = len(ids), len(ids) + NUM_TOKENS
  for end in range(start, length):  # what is behind a token does not change its logits
    tokens_1L = np.array([ids + [0] * (length - end)])
    x_1LD, head_DV = transformer.logit_factors(made, params, tokens_1L, np.ones_like(tokens_1L))
    ids.append(int(np.asarray(x_1LD[0, end - 1] @ head_DV).argmax()))
  return ids[:start], ids[start:]


@pytest.mark.parametrize('family', AS_LLAMA_CPP)
def test_llama_cpp_writes_what_we_write(family, tmp_path):
  gguf = pytest.importorskip('gguf')
  pytest.importorskip('xllamacpp')
  prompt, right = write(tmp_path, family)
  file = tmp_path / 'path.gguf'
  convert = [sys.executable, f'{LLAMA_CPP}/convert_hf_to_gguf.py', str(tmp_path), f'--outfile={file}', '--outtype=f32']
  done = subprocess.run(
    convert, cwd=LLAMA_CPP, capture_output=True, text=True, env=os.environ | {'HF_HUB_OFFLINE': '1'}
  )
  assert done.returncode == 0, done.stderr
  fields = gguf.GGUFReader(file).fields
  if family in SPACE_IN_FRONT:
    assert 'tokenizer.ggml.add_space_prefix' not in fields
    prompts = [prompt]
  else:
    assert fields['tokenizer.ggml.add_space_prefix'].contents() is False
    prompts = [prompt, PROMPT]
  generate = [sys.executable, '-c', GENERATE, str(file), json.dumps(prompts), str(NUM_TOKENS)]
  done = subprocess.run(generate, capture_output=True, text=True, errors='replace', timeout=300)  # logs have any bytes
  found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('[')]
  assert found == [right] * len(prompts), done.stderr[-2000:]
