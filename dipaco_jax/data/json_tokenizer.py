"""Tokenizers as tokenizer.json, by Hugging Face's `tokenizers`: existing ones, or trained byte-level BPE."""

import base64
import contextlib
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import special_tokens
from dipaco_jax.data.tokenizer import SPACE, Tokenizer

JSON, CONFIG = 'tokenizer.json', 'tokenizer_config.json'
SPECIAL = ('bos', 'eos', 'unk', 'pad')
NO_TEXT = ('bos', 'eos', 'pad')  # the special tokens that stand for no text at all
BYTES = [f'<0x{byte:02X}>' for byte in range(256)]  # as models with byte fallback name them
MOST_IDS = 1 << 24  # published vocabularies have 2^18 at most; arrays have an element for each id
END = '<|endoftext|>'  # of a tokenizer that is trained here, and of GPT-2's, whose tokenizer_config.json names none


def train(texts: Iterable[str], vocab_size: int) -> dict[str, bytes]:
  """Trains byte-level BPE, as GPT-2's, with digits apart; returns its files, the same for the same texts.

  Raises InputError if the text is too small for so many pieces, or these are fewer than the bytes.
  """
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  parts = tokenizers.pre_tokenizers
  digits = parts.Digits(individual_digits=True)
  tokenizer.pre_tokenizer = parts.Sequence([digits, parts.ByteLevel(add_prefix_space=False)])  # type: ignore[assignment]
  tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
  alphabet = parts.ByteLevel.alphabet()
  option = f'config.tokenizer.vocab_size={vocab_size}'
  if vocab_size <= len(alphabet):
    raise InputError(
      f'{option} is less than the number of bytes and an end-of-text token: set it to {len(alphabet) + 1}'
    )
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
  )
  tokenizer.train_from_iterator(texts, trainer)
  if tokenizer.get_vocab_size() < vocab_size:
    raise InputError(
      f'{option} is more than this text can fill: set it to {tokenizer.get_vocab_size()} or less, or add text'
    )
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    **dict.fromkeys(('add_bos_token', 'clean_up_tokenization_spaces'), False),
    'eos_token': END,
    'split_special_tokens': True,  # in a text it is text
  }
  return {JSON: tokenizer.to_str(pretty=True).encode(), CONFIG: (json.dumps(config, indent=1) + '\n').encode()}


def leave_out_without_row(files: Mapping[str, bytes], num_rows: int) -> dict[str, bytes]:
  """Returns a tokenizer's files without the added tokens that have no row in a model of `num_rows` rows.

  Gemma 3's tokenizer.json, for instance, has a token for images behind the vocabulary of the models of text. Raises
  InputError if a text can give such a token: it is not special, or tokenizer_config.json names it.
  """
  content, config = json.loads(files[JSON]), json.loads(files.get(CONFIG, b'{}'))
  rowless = [token for token in content['added_tokens'] if token['id'] >= num_rows]
  used = [_content(config.get(f'{name}_token')) for name in SPECIAL]
  template = json.dumps(content.get('post_processor'), ensure_ascii=False)
  for token in rowless:
    if not token['special'] or token['content'] in used or json.dumps(token['content'], ensure_ascii=False) in template:
      problem = f'{token["content"]!r} is token {token["id"]}, and a text can have it'
      size = max(token['id'] for token in rowless) + 1
      resize = f'in transformers, model.resize_token_embeddings({size}) and save_pretrained'
      advice = f'take it out of {JSON} and {CONFIG}, or {resize}'
      raise InputError(f'{problem}, but the model has {num_rows} rows: {advice}')
  content['added_tokens'] = [token for token in content['added_tokens'] if token not in rowless]
  names = {token['content'] for token in rowless}
  vocab = content['model']['vocab']  # which may have them too
  if isinstance(vocab, dict):
    content['model']['vocab'] = {piece: i for piece, i in vocab.items() if piece not in names}
  else:
    content['model']['vocab'] = [entry for i, entry in enumerate(vocab) if i < num_rows or entry[0] not in names]
  kept = {name: _without(names, value) for name, value in config.items() if _content(value) not in names}
  kept_files = {JSON: json.dumps(content, ensure_ascii=False).encode()}
  return {**files, **kept_files} | ({CONFIG: json.dumps(kept, indent=1).encode()} if CONFIG in files else {})


def _without(names: Collection[str], value: Any) -> Any:
  """Returns a list or object of tokenizer_config.json without the tokens of these names."""
  if isinstance(value, dict):
    return {key: token for key, token in value.items() if _content(token) not in names}
  return [token for token in value if _content(token) not in names] if isinstance(value, list) else value


@contextlib.contextmanager
def _naming_errors() -> Iterator[None]:
  """Raises InputError where the library fails: it raises plain Exception, and a panic of its Rust is not even one."""
  try:
    yield
  except InputError:
    raise
  except BaseException as e:
    if not isinstance(e, Exception) and type(e).__name__ != 'PanicException':
      raise
    raise InputError(f'tokenizer.json cannot be used ({" ".join(str(e).split())[:100]})') from e


class JsonTokenizer(Tokenizer):
  @_naming_errors()
  def __init__(self, files: Mapping[str, bytes]):
    """Loads tokenizer.json and what is next to it; raises InputError if it cannot be read or has no end of text.

    Special tokens are named by tokenizer_config.json. Whether one stands in front of a text is up to the post-processor
    of tokenizer.json alone, as in transformers 5, which does not read `add_bos_token` next to it.
    """
    try:
      _check_charsmaps(json.loads(files[JSON]).get('normalizer'))
      self._tokenizer = tokenizers.Tokenizer.from_str(files[JSON].decode())
      config = json.loads(files.get(CONFIG, b'{}'))
    except Exception as e:  # the library raises plain Exception
      raise InputError(f'no tokenizer.json ({str(e)[:100]})') from e
    if not isinstance(config, dict):
      raise InputError(f'{CONFIG} next to it is not a JSON object')
    self.files = dict(files)
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True  # those that are spelled in a text are text
    self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
    if self.vocab_size > MOST_IDS:
      raise InputError(f'{JSON} has the token id {self.vocab_size - 1}: number its tokens from 0, below {MOST_IDS}')
    given = {f'{name}_token': _content(config.get(f'{name}_token')) for name in SPECIAL}
    self.turn_end = given['eos_token'] if 'eos_token' in config else END
    ends = special_tokens.listed_ends(files)
    given['eos_token'] = special_tokens.document_end(self.turn_end, self._added_tokens(True), ends)
    named = {name: self._id_of(given[f'{name}_token']) for name in SPECIAL}
    self.special_ids = {name: i for name, i in named.items() if i is not None}
    if 'eos' not in self.special_ids:
      problem = 'it has no end-of-text token: add the tokenizer_config.json of its model, with eos_token'
      raise InputError(problem)
    self.eos_id = self.special_ids['eos']
    self.bos_id = self._id_in_front()
    if self.bos_id >= 0:
      self.special_ids['bos'] = self.bos_id
    self._mark_special()
    self.special, self.added = self._added_tokens(True), self._added_tokens(False)
    if (unknown := given['unk_token']) and 'unk' in self.special_ids:
      self.special.setdefault(unknown, self.special_ids['unk'])
    self._cut_spelled_tokens()

  def _added_tokens(self, special: bool) -> dict[str, int]:
    """Returns the added tokens that are special, or those that are not, by their spelling."""
    added = self._tokenizer.get_added_tokens_decoder().items()
    return {token.content: i for i, token in added if token.special == special}

  def _mark_special(self):
    """Marks the tokens that tokenizer_config.json names as special, where tokenizer.json does not."""
    ids = [i for name, i in self.special_ids.items() if name in NO_TEXT]
    spellings: list[Any] = [self._tokenizer.id_to_token(i) for i in ids]
    if self._id_of(self.turn_end) is not None:
      spellings.append(self.turn_end)
    tokens = [tokenizers.AddedToken(spelling, special=True, normalized=False) for spelling in spellings]
    self._tokenizer.add_special_tokens(tokens)

  def _cut_spelled_tokens(self):
    """Cuts a text behind the first character of each special token that is spelled in it, if the model would take it.

    `encode_special_tokens` keeps the library from looking for special tokens, but they may be pieces of the model too:
    Unigram takes the piece of the highest score, WordLevel, WordPiece and BPE with `ignore_merges` whole words.
    """
    spelled = [piece for piece in {*self.special, *BYTES} if len(piece) > 1 and self._takes(piece)]
    if not spelled:
      return
    parts = tokenizers.pre_tokenizers
    pattern = '|'.join(f'{re.escape(piece[0])}(?={re.escape(piece[1:])})' for piece in sorted(spelled))
    cut: Any = parts.Split(tokenizers.Regex(pattern), 'merged_with_previous')
    before: Any = self._tokenizer.pre_tokenizer
    self._tokenizer.pre_tokenizer = parts.Sequence([before, cut]) if before else cut

  def _takes(self, piece: str) -> bool:
    """Returns whether the model gives the token of this name where a text has its name."""
    number = self._tokenizer.model.token_to_id(piece)
    if number is None:
      return False
    texts = [piece, f'a {piece} b', f'a{piece}b', f'\n{piece}\n', piece * 2]
    ids, others = self._encode(texts), self._encode([text.replace(piece, '') for text in texts])
    return any(number in mine and number not in rest for mine, rest in zip(ids, others, strict=True))

  def _id_of(self, token: str | None) -> int | None:
    return None if token is None else self._tokenizer.token_to_id(token)

  def _id_in_front(self) -> int:
    """Returns the id that the post-processor puts in front of a text, -1 if it puts none there."""
    processed = self._tokenizer.encode('a', add_special_tokens=True)
    kinds = processed.special_tokens_mask  # 1: special, 0: of the text
    return processed.ids[0] if kinds[:1] == [1] and 0 in kinds else -1

  @functools.cached_property
  def _spelling_tokenizer(self) -> tokenizers.Tokenizer:
    """The tokenizer as chats need it: special tokens that are spelled in a text are those tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(self.files[JSON].decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = False
    known = tokenizer.get_added_tokens_decoder()
    tokenizer.add_special_tokens([token for token, i in self.special.items() if i not in known or not known[i].special])
    return tokenizer

  def _encode_spelled(self, text: str) -> list[int]:
    return self._spelling_tokenizer.encode(text, add_special_tokens=False).ids

  @_naming_errors()
  def _encode(self, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

  def _byte_ends_of_pieces(self, text: str) -> list[int]:
    num_bytes = np.cumsum([0, *(len(char.encode()) for char in text)])  # of so many characters
    offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
    return [int(num_bytes[end]) for _, end in offsets]

  def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
    return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

  def piece_bytes(self) -> np.ndarray:
    sizes = np.zeros(self.vocab_size, np.int32)
    parts = json.loads(self.files[JSON])
    by_bytes = '"ByteLevel"' in json.dumps(parts.get('decoder'))
    added = self._tokenizer.get_added_tokens_decoder()
    unknown = {self.special_ids.get('unk'), self._id_of(_content(parts['model'].get('unk_token')))}
    no_text, byte_pieces = {self.special_ids.get(name) for name in NO_TEXT}, {*BYTES}
    for piece, i in self._tokenizer.get_vocab().items():
      if i in no_text:
        sizes[i] = 0
      elif i in unknown or (piece in byte_pieces and i not in added):
        sizes[i] = 1
      elif i in added and added[i].special:
        sizes[i] = 0
      elif by_bytes:
        sizes[i] = len(piece.encode()) if i in added else len(piece)
      else:
        sizes[i] = len(piece.replace(SPACE, ' ').encode())
    return sizes


def _check_charsmaps(normalizer: Any):
  """Raises ValueError if a character map is shorter than the size in its first four bytes, which would be allocated."""
  parts = normalizer.values() if isinstance(normalizer, dict) else normalizer if isinstance(normalizer, list) else ()
  for part in parts:
    _check_charsmaps(part)
  if isinstance(normalizer, dict) and isinstance(encoded := normalizer.get('precompiled_charsmap'), str):
    charsmap = base64.b64decode(encoded)
    if int.from_bytes(charsmap[:4], 'little') > len(charsmap) - 4:
      raise ValueError('its precompiled_charsmap is cut off')


def _content(token: Any) -> str | None:
  """Returns a special token as tokenizer_config.json names it: its spelling, or an object that has it."""
  content = token.get('content') if isinstance(token, Mapping) else token
  return content if isinstance(content, str) else None
