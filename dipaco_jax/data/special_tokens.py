"""Special tokens: those that end a document or a turn of a chat, and those whose spelling occurs in a text.

A model that was tuned for chats often names the end of a turn as its `eos_token`. Its pretraining ended documents with
another token, and so do documents here.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError

GENERATION = 'generation_config.json'
# Ends of turns, and the ends of documents in the pretraining of models that have such turns.
TURN_ENDS = frozenset({
  '<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|eot|>', '<end_of_turn>', '<turn|>', '<|end|>', '<|end_of_turn|>',
  '<|END_OF_TURN_TOKEN|>', '<|return|>',
})  # fmt: skip
DOCUMENT_ENDS = '<|endoftext|>', '<|end_of_text|>', '<eos>', '</s>', '<EOS_TOKEN>'


def document_end(eos_token: Any, special: Mapping[str, int], listed: Collection[int] = ()) -> Any:
  """Returns the token that ends a document of a tokenizer with this `eos_token` and these special tokens.

  That is `eos_token`, unless it is known to end a turn of a chat, and the tokenizer also has a known end of documents.
  Of several, it is one of the `listed` ends.
  """
  if eos_token not in TURN_ENDS:
    return eos_token
  known = sorted((token for token in DOCUMENT_ENDS if token in special), key=lambda token: special[token] not in listed)
  return known[0] if known else eos_token


def listed_ends(files: Mapping[str, bytes | None]) -> list[int]:
  """Returns the token ids of `eos_token_id` in generation_config.json; raises InputError if they are none."""
  try:
    return end_ids(json_text.parse(files.get(GENERATION) or b'{}'))
  except InputError as e:
    raise InputError(f'{GENERATION} next to it: {e}') from e
  except (ValueError, AttributeError) as e:
    raise InputError(f'{GENERATION} next to it is not a JSON object') from e


def end_ids(config: Mapping[str, Any]) -> list[int]:
  """Returns the token ids of `eos_token_id`: one, a list, or none; raises InputError for anything else."""
  given = config.get('eos_token_id')
  ids = given if isinstance(given, list) else [] if given is None else [given]
  if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
    raise InputError(f'eos_token_id={given!r} should be a token id or a list of token ids')
  return ids


def split(text: str, spellings: Collection[str]) -> Iterator[tuple[str, bool]]:
  """Yields the parts of a text, each with whether it is one of `spellings`; of those that overlap, the longest."""
  longest_first = sorted(spellings, key=len, reverse=True)
  parts = re.split(f'({"|".join(map(re.escape, longest_first))})', text) if longest_first else [text]
  yield from ((part, i % 2 == 1) for i, part in enumerate(parts) if part)


def break_up(text: str, spellings: Collection[str], mark: str) -> str:
  """Returns a text with `mark` inside each of `spellings` in it, so that the text spells none of them.

  Upper and lower case count as the same, since a chat template may change one into the other.
  """
  breakable = [re.escape(spelling) for spelling in spellings if len(spelling) > 1]
  if not breakable:
    return text
  pattern = f'(?=(?:{"|".join(breakable)}))(.)'
  return re.sub(pattern, lambda match: match[1] + mark, text, flags=re.DOTALL | re.IGNORECASE)
