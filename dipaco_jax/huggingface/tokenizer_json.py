"""A SentencePiece model as Hugging Face's tokenizer.json: the same ids for any text, and the same text for ids.

SentencePiece's BPE joins two pieces where the result is a piece, the likeliest result first; tokenizer.json lists the
pairs instead, in that order. Unigram is the same algorithm in both. Text is normalized before either.
"""

import base64
import json
import re
from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import sentencepiece_tokenizer, tokenizer_files
from dipaco_jax.data.tokenizer import SPACE, Tokenizer

UNIGRAM, BPE = 1, 2  # kinds of models
# Kinds of pieces.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
NO_TEXT = (UNKNOWN, CONTROL, BYTE)  # which SentencePiece never finds in a text, even where their names are spelled
MANY = 1 << 20
OR_ANOTHER = 'use the tokenizer.json of its model if there is one, or train another'
# Of a tokenizer_config.json that was given; what else it says is of another class, or of tokens that the model lacks.
KEPT = ('chat_template', 'model_max_length', 'padding_side', 'truncation_side')

# Of a tokenizer_config.json, notes of where its files were on the machine of its author, which no program needs.
PLACES = ('name_or_path', '_name_or_path', 'tokenizer_file', 'special_tokens_map_file', 'cache_dir')


def make_files(tokenizer: Tokenizer) -> dict[str, bytes]:
  """Returns {name: bytes} of the tokenizer's files, as they were given; of a SentencePiece model tokenizer.json too.

  A chat_template.jinja is also in tokenizer_config.json, where programs look that do not read the former. Notes of
  local paths are left out of tokenizer_config.json.

  Raises InputError if tokenizer.json cannot express the model.
  """
  files = dict(tokenizer.files) if tokenizer_files.JSON in tokenizer.files else _convert_files(tokenizer)
  given = json.loads(files.get(tokenizer_files.CONFIG, b'{}'))
  config = {name: value for name, value in given.items() if name not in PLACES}
  if template := tokenizer.files.get(tokenizer_files.TEMPLATE):
    config['chat_template'] = template.decode()
    files[tokenizer_files.TEMPLATE] = template
  if config != given:
    files[tokenizer_files.CONFIG] = _json(config)
  return files


def _convert_files(tokenizer: Tokenizer) -> dict[str, bytes]:
  """Returns the files of a SentencePiece model."""
  model = tokenizer.files[tokenizer_files.MODEL]
  given = json.loads(tokenizer.files.get(tokenizer_files.CONFIG, b'{}'))
  proto = sentencepiece_tokenizer.parse(model, given)
  pieces = proto.pieces
  config = {
    **{name: given[name] for name in KEPT if name in given},
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'add_bos_token': tokenizer.bos_id >= 0,
    # For llama.cpp, whose converter reads it here and not in the model, and else puts a space before each text.
    'add_prefix_space': proto.normalizer_spec.add_dummy_prefix,
    **dict.fromkeys(('add_eos_token', 'clean_up_tokenization_spaces'), False),
    'model_input_names': ['input_ids', 'attention_mask'],
    # '</s>' in a text is four characters, unless a chat template writes it.
    'split_special_tokens': not (tokenizer_files.TEMPLATE in tokenizer.files or given.get('chat_template')),
  } | {f'{name}_token': pieces[i].piece for name, i in tokenizer.special_ids.items()}
  converted = convert(proto.SerializeToString())
  if tokenizer.bos_id >= 0:
    converted['post_processor'] = _in_front(pieces[tokenizer.bos_id].piece, tokenizer.bos_id)
  return {
    tokenizer_files.MODEL: model,
    tokenizer_files.JSON: json.dumps(converted, ensure_ascii=False, indent=1).encode(),
    tokenizer_files.CONFIG: _json(config),
  }


def _json(value: dict[str, Any]) -> bytes:
  return (json.dumps(value, indent=1) + '\n').encode()


def _in_front(piece: str, number: int) -> dict[str, Any]:
  """Returns the post-processor that puts a token in front of each text."""
  begin: list[dict[str, Any]] = [{'SpecialToken': {'id': piece, 'type_id': 0}}]
  texts: list[dict[str, Any]] = [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 1}}]
  return {
    'type': 'TemplateProcessing',
    'single': begin + texts[:1],
    'pair': begin + texts,
    'special_tokens': {piece: {'id': piece, 'ids': [number], 'tokens': [piece]}},
  }


def check(tokenizer: Tokenizer) -> None:
  """Raises as `make_files`."""
  if tokenizer_files.JSON not in tokenizer.files:
    given = json.loads(tokenizer.files.get(tokenizer_files.CONFIG, b'{}'))
    _check(sentencepiece_tokenizer.parse(tokenizer.files[tokenizer_files.MODEL], given))


def convert(model: bytes) -> dict[str, Any]:
  """Returns the content of tokenizer.json; raises as `make_files`."""
  proto = sentencepiece_tokenizer.parse(model, {})
  _check(proto)
  decoders = [_replace('String', SPACE, ' '), {'type': 'ByteFallback'}, {'type': 'Fuse'}]
  if spaces := _spaces_in_front(proto.normalizer_spec):
    decoders.append({'type': 'Strip', 'content': ' ', 'start': spaces, 'stop': 0})
  special = [(i, p) for i, p in enumerate(proto.pieces) if p.type in (UNKNOWN, CONTROL, USER_DEFINED)]
  added = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': [{'id': i, 'content': p.piece} | added | {'special': p.type != USER_DEFINED} for i, p in special],
    'normalizer': {'type': 'Sequence', 'normalizers': _normalizers(proto.normalizer_spec)},
    'pre_tokenizer': None if proto.trainer_spec.model_type == BPE else _cut_spelled_pieces(proto),
    'post_processor': None,
    'decoder': {'type': 'Sequence', 'decoders': decoders},
    'model': _bpe(proto) if proto.trainer_spec.model_type == BPE else _unigram(proto),
  }


def _check(proto):
  trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
  kinds = {p.type for p in proto.pieces}
  # `tokenizers` finds user-defined pieces first, and normalizes the text between them separately.
  is_cut = USER_DEFINED in kinds and (normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces)
  odd = {
    'its pieces are words or characters': trainer.model_type not in (UNIGRAM, BPE),
    'spaces are at the end of its pieces': trainer.treat_whitespace_as_suffix,
    'it keeps spaces as they are': not normalizer.escape_whitespaces,
    'it changes text that it decodes': proto.denormalizer_spec.precompiled_charsmap,
    'a control piece is one character': any(len(p.piece) == 1 for p in proto.pieces if p.type in NO_TEXT),
    'it has unused pieces': not kinds <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE},
    'it has user_defined_symbols and add_dummy_prefix or remove_extra_whitespaces': is_cut,
  }
  if why := [problem for problem, is_so in odd.items() if is_so]:
    raise InputError(f'the tokenizer cannot be written as {tokenizer_files.JSON}: {why[0]}; {OR_ANOTHER}')


def _spaces_in_front(spec) -> int:
  """Returns how many spaces are left out where a text that is decoded begins with them."""
  return MANY if spec.remove_extra_whitespaces else int(spec.add_dummy_prefix)


def _normalizers(spec) -> list[dict[str, Any]]:
  normalizers: list[dict[str, Any]] = []
  if spec.precompiled_charsmap:
    charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
    normalizers.append({'type': 'Precompiled', 'precompiled_charsmap': charsmap})
  if spec.remove_extra_whitespaces:
    normalizers += [_replace('Regex', r'\A +', ''), _replace('Regex', ' {2,}', ' ')]  # ^ and $ would be of every line
  normalizers.append(_replace('String', ' ', SPACE))
  if spec.remove_extra_whitespaces:
    normalizers.append(_replace('Regex', rf'{SPACE}+\z', ''))  # SentencePiece takes its own sign for a space there
  if spec.add_dummy_prefix:
    normalizers.append({'type': 'Prepend', 'prepend': SPACE})
  return normalizers


def _replace(kind: str, pattern: str, content: str) -> dict[str, Any]:
  return {'type': 'Replace', 'pattern': {kind: pattern}, 'content': content}


def _bpe(proto) -> dict[str, Any]:
  ids = {p.piece: i for i, p in enumerate(proto.pieces)}
  normal = [p for p in proto.pieces if p.type == NORMAL]
  known = {p.piece for p in normal}
  merges = []
  for p in sorted(normal, key=lambda p: -p.score):  # ties, which no trainer leaves, by id
    pairs = ((p.piece[:i], p.piece[i:]) for i in range(1, len(p.piece)))
    merges += sorted((pair for pair in pairs if known.issuperset(pair)), key=lambda pair: [ids[x] for x in pair])
  return {
    'type': 'BPE', 'dropout': None, 'unk_token': proto.trainer_spec.unk_piece, 'continuing_subword_prefix': None,
    'end_of_word_suffix': None, 'fuse_unk': True, 'byte_fallback': proto.trainer_spec.byte_fallback,
    'ignore_merges': False, 'vocab': ids, 'merges': merges,
  }  # fmt: skip


def _unigram(proto) -> dict[str, Any]:
  unknown = next(i for i, p in enumerate(proto.pieces) if p.type == UNKNOWN)
  normal = [p for p in proto.pieces if p.type == NORMAL]
  least = min(p.score for p in normal)  # unknown characters count as this less 10
  if {*''.join(p.piece for p in normal)} <= _characters(proto):
    # A text has as many unknown characters in whichever way it is cut, so that their score does not matter; pieces that
    # stand for no text get one with which they lose against their characters.
    least = -abs(least) * (1 + max(len(p.piece) for p in proto.pieces)) - 1
  vocab = [(p.piece, p.score if p.type == NORMAL else least) for p in proto.pieces]
  byte_fallback = proto.trainer_spec.byte_fallback
  return {'type': 'Unigram', 'unk_id': unknown, 'vocab': vocab, 'byte_fallback': byte_fallback}


def _characters(proto) -> set[str]:
  """Returns the characters that are pieces."""
  return {p.piece for p in proto.pieces if p.type == NORMAL and len(p.piece) == 1}


def _cut_spelled_pieces(proto) -> dict[str, Any] | None:
  """Returns the pre-tokenizer that cuts the names of pieces that stand for no text, or None if none needs to be cut.

  Names of known characters lose by their score. Others are cut between a known and an unknown character, which no piece
  joins.
  """
  known = _characters(proto)
  patterns = set()
  for name in (p.piece for p in proto.pieces if p.type in NO_TEXT):
    cuts = [i for i in range(1, len(name)) if (name[i - 1] in known) != (name[i] in known)]
    if cuts:
      patterns.add(f'{re.escape(name[: cuts[0]])}(?={re.escape(name[cuts[0] :])})')
  if not patterns:
    return None
  pattern = {'Regex': '|'.join(sorted(patterns))}
  return {'type': 'Split', 'pattern': pattern, 'behavior': 'MergedWithPrevious', 'invert': False}
