"""User-defined tokenizers: the example of the page, and errors about faulty ones."""

import numpy as np
import own_modules
import pytest

from dipaco_jax import export
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer_files
from dipaco_jax.data.tokenizer import Transcript

SOURCE = """
class Bytes:
  vocab_size, eos_id = 257, 256

  def encode(self, text):
    return list(text.encode())

  def decode(self, ids):
    return bytes(ids).decode(errors='replace')

class Begun(Bytes):
  vocab_size, bos_id = 258, 257

  def piece_bytes(self):
    return [1] * 256 + [0, 0]

def wrong(**values):
  return lambda config: type('Wrong', (Bytes,), values)()

make, begun = lambda config: Bytes(), lambda config: Begun()
unsized, endless = wrong(vocab_size='many'), wrong(eos_id=257)
silent, above, nested = wrong(encode=None), wrong(vocab_size=100, eos_id=9), wrong(encode=lambda self, text: [[1]])
bare, failing = wrong(decode=lambda self, ids: ids), wrong(encode=lambda self, text: text.colour)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
  """The user's module, under a name that no other test has."""
  return own_modules.write(tmp_path, monkeypatch, SOURCE)


def opened(module: str, name: str = 'make'):
  wanted = settings.from_dict({'tokenizer': {'kind': f'{module}:{name}'}}).tokenizer
  return tokenizer_files.read(wanted, lambda name: False, lambda name: b'')


def test_a_document_ends_and_comes_back(module):
  made, text = opened(module), 'Zwölf 漢'
  assert made.encode(text).tolist() == [*text.encode(), 256] and made.encode(text).dtype == np.int32
  assert made.decode(made.encode(text)) == text and made.special_ids == {'eos': 256} and not made.files
  assert made.piece_bytes().tolist() == [1] * 256 + [0]


def test_one_that_begins_documents(module):
  made = opened(module, 'begun')
  assert made.encode('a', eos=False).tolist() == [257, 97] and made.special_ids == {'eos': 256, 'bos': 257}
  assert made.decode([257, 97]) == 'a' and made.piece_bytes().sum() == 256


def test_characters_come_whole(module):
  made = opened(module)
  transcript = Transcript(made, ())
  parts = []
  for token in made.encode('漢字', eos=False):
    transcript.add(token)
    parts.append(transcript.take())
  assert parts == ['', '', '漢', '', '', '字']


@pytest.mark.parametrize('name, words', [
  ('unsized', "its vocab_size is 'many': expected an integer"),
  ('endless', 'its eos_id=257 should be 0 or more, and below 257'),
  ('silent', r'returns a Wrong without encode\(...\)'),
  ('above', r'encode returns ids from \d+ to 240: they should be from 0 to 99, below its vocab_size'),
  ('nested', r'encode returns int64 \[1, 1\]: expected a list of integers'),
  ('bare', 'decode returns a list: expected a str'),
  ('failing', r"raises AttributeError: 'str' object has no attribute 'colour' \(line \d+ of .*own_.*py\)"),
])  # fmt: skip
def test_what_goes_wrong_names_the_field(module, name, words):
  with pytest.raises(InputError, match=rf"config.tokenizer.kind='{module}:{name}'[: ].*{words}"):
    opened(module, name)


def test_what_does_not_go_together(module):
  with pytest.raises(InputError, match=r'and config.tokenizer.model_file are both set'):
    settings.from_dict({'tokenizer': {'kind': f'{module}:make', 'model_file': 'a.model'}})


def test_it_is_not_exported(module):
  s = settings.from_dict({'tokenizer': {'kind': f'{module}:make'}})
  with pytest.raises(InputError, match=rf"config.tokenizer.kind='{module}:make' is code of your own"):
    export.check_tokenizer(s)
