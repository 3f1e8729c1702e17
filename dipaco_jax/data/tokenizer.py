"""The protocol of tokenizers, the sample of text for training one, and incremental decoding."""

import abc
import functools
import heapq
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dipaco_jax.core import seeded_hash
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import special_tokens

HALF = '\ufffd'  # a decoder's sign for bytes that are no character yet
LONGEST = 4  # bytes of a character
SPACE = '\u2581'  # SentencePiece's sign for one
CHARS = 32  # of a text that are encoded at first, for each token of its beginning
SURROGATES = re.compile('[\ud800-\udfff]')


def sample(documents: Iterable[Sequence[Any]], sample_bytes: int, seed: int) -> list[tuple[str, str]]:
  """Draws (id, text) of the documents (id, text, ...) with the lowest hashes of (seed, id), in any order.

  The sample has at least `sample_bytes` of UTF-8, if there are as many; nothing else is held in memory. A sample of
  samples of parts is one of the whole.
  """
  heap: list[tuple[int, int, str, str]] = []  # the highest hash on top
  total = 0
  for name, text, *_ in documents:
    heapq.heappush(heap, (-seeded_hash.of_name(f'{seed}/{name}'), size := len(text.encode()), text, name))
    total += size
    while total - heap[0][1] >= sample_bytes:
      total -= heapq.heappop(heap)[1]
  return [(name, text) for _, _, text, name in sorted(heap, reverse=True)]


def replace_surrogates(text: str) -> str:
  """Returns the text with U+FFFD for each lone surrogate (half a character), which UTF-8 cannot express."""
  return text if text.isascii() else SURROGATES.sub(HALF, text)


class Tokenizer(abc.ABC):
  """Maps text to ids and back; `sentencepiece_tokenizer`, `json_tokenizer` and `own_tokenizer` are its kinds.

  A document is `bos_id`, where the tokenizer's own config puts one in front, its text, and `eos_id`.
  """

  vocab_size: int
  eos_id: int
  bos_id: int  # put in front of every text; -1: none
  special_ids: dict[str, int]  # by 'bos', 'eos', 'unk', 'pad': of tokens that stand for no text, those that there are
  special: dict[str, int]  # all special tokens, by their spelling; in a text that is encoded they are text
  added: dict[str, int]  # other tokens that are cut out of a text before it is encoded, by their spelling
  turn_end: str | None  # the `eos_token` of the tokenizer's own config, which may end a turn of a chat
  files: Mapping[str, bytes]  # given files by name, which a run keeps and export writes

  def encode(self, text: str, eos: bool = True) -> np.ndarray:
    """Returns int32 ids; `eos` adds the end-of-text token, as behind a whole document."""
    if not text.isascii() and SURROGATES.search(text):
      raise InputError('the text has a lone surrogate (half a character): give valid UTF-8')
    return self.encode_batch([text], eos)[0]

  def encode_batch(self, texts: Sequence[str], eos: bool = True) -> list[np.ndarray]:
    """Encodes several texts; other Python threads run meanwhile."""
    before, after = [self.bos_id] * (self.bos_id >= 0), [self.eos_id] * eos
    return [np.array([*before, *ids, *after], np.int32) for ids in self._encode(list(texts))]

  @functools.cached_property
  def end_ids(self) -> tuple[int, ...]:
    """The tokens that end a text which is generated: ends of turns that the tokenizer's files name, and `eos_id`."""
    listed = [i for i in special_tokens.listed_ends(self.files) if i < self.vocab_size]
    own = [self.special[self.turn_end]] if self.turn_end in self.special else []
    return tuple(dict.fromkeys([*listed, *own, self.eos_id]))

  def encode_chat(self, text: str, mark: str = '') -> list[int]:
    """Encodes the output of a chat template. Unlike in `encode`, a special token that is spelled out is that token.

    Args:
      text: may have a character `mark` inside what spells a token and is text, as `special_tokens.break_up` puts it.
    """
    if not mark or mark not in text:
      return self._encode_spelled(text)
    ids: list[int] = []
    spelled = ''
    for part, _ in special_tokens.split(text, [*self.special, *self.added]):
      if mark in part:
        ids += self._encode_spelled(spelled) + self._encode_marked(part, mark)
        spelled = ''
      else:
        spelled += part
    return ids + self._encode_spelled(spelled)

  def _encode_marked(self, text: str, mark: str) -> list[int]:
    """Encodes a text without special or added tokens; in pieces, where it would have some otherwise."""
    plain = text.replace(mark, '')
    ids = self._encode([plain])[0]
    if {i for spelling, i in (self.special | self.added).items() if spelling in plain}.isdisjoint(ids):
      return ids
    return [i for piece in text.split(mark) for i in self._encode_spelled(piece)]

  def _encode_spelled(self, text: str) -> list[int]:
    """Encodes a text; special tokens that are spelled in it are those tokens."""
    ids: list[int] = []
    for part, is_special in special_tokens.split(text, self.special):
      ids += [self.special[part]] if is_special else self._encode([part])[0]
    return ids

  @abc.abstractmethod
  def _encode(self, texts: list[str]) -> list[list[int]]:
    """Encodes texts without special tokens: those that are spelled in a text are text."""

  @abc.abstractmethod
  def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
    """Returns the text of tokens, special ones left out; bytes that are no character are HALF."""

  @functools.cached_property
  def _piece_sizes(self) -> np.ndarray:
    return self.piece_bytes()

  def byte_ends(self, text: str | np.ndarray) -> np.ndarray:
    """Returns, for each token of a document, how many bytes of its text end with it: int64, the last is all of them.

    Bytes are those of the original text in UTF-8, before any normalization. The text of a document of tokens is the
    decoded text.
    """
    if not isinstance(text, str):
      return np.cumsum(self._piece_sizes[text], dtype=np.int64)
    tokens, num_bytes = self.encode(text), len(text.encode())
    ends = np.cumsum(self._piece_sizes[tokens], dtype=np.int64)
    if ends[-1] == num_bytes and self.decode(tokens) == text:
      return ends  # exact, also where tokens are parts of a character
    if (piece_ends := self._byte_ends_of_pieces(text)) is not None:
      ends = np.maximum.accumulate([*[0] * (self.bos_id >= 0), *piece_ends, num_bytes])
    else:  # each token has its share
      ends = ends * num_bytes // max(ends[-1], 1)
    ends[-1] = num_bytes
    return ends

  def _byte_ends_of_pieces(self, text: str) -> list[int] | None:
    """Returns where in the UTF-8 of a text each token but special ones ends; None if that is unknown."""
    return None

  @abc.abstractmethod
  def piece_bytes(self) -> np.ndarray:
    """Returns the UTF-8 bytes of text that each token stands for, int32 [V]; 0 for special, 1 for unknown tokens."""


def beginning(tokenizer: Tokenizer, text: str | Sequence[int], num_tokens: int) -> np.ndarray:
  """Returns the first tokens of a text, or of token ids. Of a long text only the beginning is encoded, where that does.

  Text that is far enough behind a token does not change it: here, as many tokens as are requested.
  """
  if isinstance(text, str) and len(text) > (most := CHARS * num_tokens):
    tokens = token_ids(tokenizer, text[:most])
    if len(tokens) >= 2 * num_tokens:
      return tokens[:num_tokens]
  return token_ids(tokenizer, text)[:num_tokens]


def token_ids(tokenizer: Tokenizer, text: str | Sequence[int]) -> np.ndarray:
  """Encodes a text, or takes its token ids; raises InputError if one is not in the vocabulary."""
  # Without a dtype, which could not hold all that may be given: an id may be larger than int64 holds.
  ids = np.asarray(tokenizer.encode(text, eos=False) if isinstance(text, str) else text)
  if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
    raise InputError(f'token ids should be from 0 to {tokenizer.vocab_size - 1}; given are {ids.min()} to {ids.max()}')
  return ids.astype(np.int32)


class Transcript:
  """The text of a growing list of tokens, up to the first stop string."""

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stop: Sequence[str] = ()):
    """Begins an empty text after the tokens `before`, on which a word's first space depends."""
    self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
    self._tokens = _context(tokenizer, list(before))
    self._start, self._read = 0, len(self._tokens)  # context to decode again, and new tokens
    self._shown = 0
    self.text = ''  # all of it
    self.stopped = False

  def add(self, token: int):
    """Appends a token; does nothing behind a stop string."""
    if self.stopped:
      return
    self._tokens.append(int(token))
    if not self._decoded(self._start).endswith(HALF):
      self._grow()

  def close(self):
    """Ends the text, with half a character if its tokens end in one."""
    if not self.stopped:
      self._grow()

  def take(self, final: bool = False) -> str:
    """Returns the new text since the last call. `final` also returns text that may begin a stop string."""
    held = 0 if final or self.stopped else max((_overlap(self.text, stop) for stop in self._stop), default=0)
    end = max(self._shown, len(self.text) - held)
    new, self._shown = self.text[self._shown : end], end
    return new

  def _decoded(self, start: int, end: int | None = None) -> str:
    return self._tokenizer.decode(self._tokens[start:end])

  def _grow(self):
    context, grown = self._decoded(self._start, self._read), self._decoded(self._start)
    same = os.path.commonprefix([context, grown])  # noqa: RUF071  # by character: it may have ended in half of one
    new = grown[len(same) :]
    if not context.endswith(HALF):  # otherwise, the new text begins inside a character
      self._start = self._read
    self._read = len(self._tokens)
    searched = max(0, len(self.text) - max(map(len, self._stop), default=0))
    self.text += new
    stops = [at for at in (self.text.find(stop, searched) for stop in self._stop) if at >= 0]
    if stops:
      self.text, self.stopped = self.text[: min(stops)], True


def _context(tokenizer: Tokenizer, before: list[int]) -> list[int]:
  """Returns the fewest last tokens that decode whole; where `before` ends in half a character, those of that half.

  Tokens that begin inside a character would not do: a decoder may take the whole run of bytes behind for none.
  """
  for half in range(LONGEST):
    complete = before[: len(before) - half]
    for n in range(1, min(LONGEST, len(complete)) + 1):
      if not tokenizer.decode(complete[-n:]).endswith(HALF):
        return before[-(half or n) :]
  return before[-LONGEST:]


def _overlap(text: str, stop: str) -> int:
  """Counts the characters at the end of `text` that begin `stop`."""
  return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
