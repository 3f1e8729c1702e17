"""Hugging Face's tokenizer.json, by their library `tokenizers`: any one used; byte-level BPE trained on a sample."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from dipaco_jax.core.errors import InputError
from dipaco_jax.data.tokenizer import SPACE, Tokenizer

JSON, CONFIG = 'tokenizer.json', 'tokenizer_config.json'
SPECIAL = ('bos', 'eos', 'unk', 'pad')
END = '<|endoftext|>'  # of a tokenizer that is trained here, and of GPT-2's, whose tokenizer_config.json names none


def train(texts: Iterable[str], vocab_size: int) -> dict[str, bytes]:
  """Trains byte-level BPE, as GPT-2's, with digits apart; returns its files, the same for the same texts.

  Raises InputError where the text is too small for so many pieces, or these are fewer than the bytes.
  """
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  parts = tokenizers.pre_tokenizers
  digits = parts.Digits(individual_digits=True)
  made.pre_tokenizer = parts.Sequence([digits, parts.ByteLevel(add_prefix_space=False)])  # type: ignore[assignment]
  made.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
  alphabet = parts.ByteLevel.alphabet()
  option = f'config.tokenizer.vocab_size={vocab_size}'
  if vocab_size <= len(alphabet):
    raise InputError(f'{option} is less than all bytes and an end-of-text token take: set it to {len(alphabet) + 1}')
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
  )
  made.train_from_iterator(texts, trainer)
  if made.get_vocab_size() < vocab_size:
    raise InputError(
      f'{option} is more than this text can fill: set it to {made.get_vocab_size()} or less, or add text'
    )
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    **dict.fromkeys(('add_bos_token', 'clean_up_tokenization_spaces'), False),
    'eos_token': END,
    'split_special_tokens': True,  # in a text it is text
  }
  return {JSON: made.to_str(pretty=True).encode(), CONFIG: (json.dumps(config, indent=1) + '\n').encode()}


class JsonTokenizer(Tokenizer):
  def __init__(self, files: Mapping[str, bytes]):
    """Loads tokenizer.json and what is beside it; raises InputError where it cannot be read or has no end of text.

    Which tokens are special, and whether one stands in front of a text, is taken from tokenizer_config.json; where it
    does not say, from tokenizer.json's own template.
    """
    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(files[JSON].decode())
      config = json.loads(files.get(CONFIG, b'{}'))
    except Exception as e:  # the library raises plain Exception
      raise InputError(f'no tokenizer.json ({str(e)[:100]})') from e
    if not isinstance(config, dict):
      raise InputError(f'{CONFIG} beside it is no JSON object')
    self.files = dict(files)
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True  # those that are spelled in a text are text
    self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
    given = {'eos_token': END} | config
    named = {name: self._id_of(given.get(f'{name}_token')) for name in SPECIAL}
    self.special_ids = {name: i for name, i in named.items() if i is not None}
    if 'eos' not in self.special_ids:
      words = 'it has no end-of-text token: give it the tokenizer_config.json of its model, with eos_token'
      raise InputError(words)
    self.eos_id = self.special_ids['eos']
    self.bos_id = self._in_front(config)
    if self.bos_id >= 0:
      self.special_ids['bos'] = self.bos_id

  def _id_of(self, token: Any) -> int | None:
    """Returns the id of a special token as tokenizer_config.json names it."""
    content = token.get('content') if isinstance(token, Mapping) else token
    return self._tokenizer.token_to_id(content) if isinstance(content, str) else None

  def _in_front(self, config: Mapping[str, Any]) -> int:
    """Returns the id that stands in front of a text, -1 if none does."""
    if isinstance(config.get('add_bos_token'), bool):
      return self.special_ids.get('bos', -1) if config['add_bos_token'] else -1
    template = self._tokenizer.encode('a', add_special_tokens=True)
    special = template.special_tokens_mask
    return template.ids[0] if special and special[0] and template.ids[0] != self.eos_id else -1

  def _encode(self, texts: list[str]) -> list[list[int]]:
    return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

  def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
    return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

  def piece_bytes(self) -> np.ndarray:
    sizes = np.zeros(self.vocab_size, np.int32)
    parts = json.loads(self.files[JSON])
    by_bytes = '"ByteLevel"' in json.dumps(parts.get('decoder'))
    added = {token['id']: token for token in parts.get('added_tokens', [])}
    unknown = {self.special_ids.get('unk'), self._id_of(parts['model'].get('unk_token'))}
    for piece, i in self._tokenizer.get_vocab().items():
      if i in unknown:
        sizes[i] = 1
      elif i in added:
        sizes[i] = 0 if added[i].get('special') else len(piece.encode())
      elif len(piece) == 6 and piece.startswith('<0x') and piece.endswith('>'):
        sizes[i] = 1
      else:
        sizes[i] = len(piece) if by_bytes else len(piece.replace(SPACE, ' ').encode())
    return sizes
