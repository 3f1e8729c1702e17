"""User-defined tokenizers, 'package.module:name' in config.tokenizer.kind.

make(config.tokenizer) returns an object with

    encode(text) -> token ids           without special tokens; called by several threads
    decode(ids) -> text                 bytes that are no character as '\\ufffd'; special tokens are not among the ids
    vocab_size, eos_id                  ids are below the one, the other ends a document
    bos_id                              that begins one; left out or -1: none
    piece_bytes() -> [V]                bytes of text of each id; left out: those that it is decoded to by itself

A run keeps nothing of it but the reference.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data.tokenizer import HALF, Tokenizer

FIELD = 'tokenizer.kind'
TRIED = 'The quick brown fox jumps over 13 lazy dogs.\n\tZwölf Boxkämpfer: \U0001f98a'


class OwnTokenizer(Tokenizer):
  def __init__(self, config: settings.Tokenizer):
    """Makes the user's tokenizer, and tries it on a text; raises InputError if it does not follow the protocol."""
    self._reference = config.kind
    self._tokenizer = tokenizer = extension.make(FIELD, config.kind, config)
    for name in ('encode', 'decode'):
      if not callable(getattr(tokenizer, name, None)):
        raise self._wrong(f'returns a {type(tokenizer).__name__} without {name}(...)')
    self.vocab_size = self._number(tokenizer, 'vocab_size', 1)
    self.eos_id = self._number(tokenizer, 'eos_id', 0, self.vocab_size)
    self.bos_id = self._number(tokenizer, 'bos_id', -1, self.vocab_size) if hasattr(tokenizer, 'bos_id') else -1
    self.special_ids = {'eos': self.eos_id} | ({'bos': self.bos_id} if self.bos_id >= 0 else {})
    self.special = {}
    self.added = {}
    self.turn_end = None
    self.files = {}
    self.decode(self._encode([TRIED])[0])

  def _encode(self, texts: list[str]) -> list[list[int]]:
    with extension.blaming(FIELD, self._reference):
      encoded = [np.asarray(self._tokenizer.encode(text)) for text in texts]
    for ids in encoded:
      if ids.ndim != 1 or (ids.size and ids.dtype.kind not in 'iu'):
        raise self._wrong(f'encode returns {ids.dtype} {[*ids.shape]}: expected a list of integers')
      if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
        problem = f'encode returns ids from {ids.min()} to {ids.max()}'
        raise self._wrong(f'{problem}: they should be from 0 to {self.vocab_size - 1}, below its vocab_size')
    return [ids.tolist() for ids in encoded]

  def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
    special = self.special_ids.values()
    with extension.blaming(FIELD, self._reference):
      text = self._tokenizer.decode([int(token) for token in tokens if token not in special])
    if not isinstance(text, str):
      raise self._wrong(f'decode returns a {type(text).__name__}: expected a str')
    return text

  def piece_bytes(self) -> np.ndarray:
    """Returns the user's `piece_bytes`, or else the number of bytes of each token, decoded by itself."""
    if callable(count := getattr(self._tokenizer, 'piece_bytes', None)):
      with extension.blaming(FIELD, self._reference):
        counts = np.asarray(count(), np.int32)
      if counts.shape != (self.vocab_size,):
        raise self._wrong(
          f'piece_bytes returns {[*counts.shape]} numbers: expected one for each of {self.vocab_size} tokens'
        )
      return counts
    return np.array([len(self.decode([i]).replace(HALF, '?').encode()) for i in range(self.vocab_size)], np.int32)

  def _number(self, tokenizer: Any, name: str, least: int, below: int | None = None) -> int:
    """Returns an integer of the user's tokenizer."""
    number = getattr(tokenizer, name, None)
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
      raise self._wrong(f'its {name} is {number!r}: expected an integer')
    if number < least or (below is not None and number >= below):
      raise self._wrong(f'its {name}={number} should be {least} or more' + (f', and below {below}' if below else ''))
    return int(number)

  def _wrong(self, problem: str) -> InputError:
    return InputError(f'config.{FIELD}={self._reference!r}: {problem}')
