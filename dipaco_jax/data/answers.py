"""Conversations as sequences: the model learns to write the answers, and the tokens between them are given.

A sequence is as many exchanges of a conversation as fit, with its instructions in front: a long conversation becomes
several, each cut between exchanges, and what is too long in a single one is cut off. If a template writes earlier
answers differently than the last one, as without its thoughts, then each answer has a sequence of its own.

In an array of tokens, int32, a given token t is ~t, which is negative. Where a row is packed, its segment id is.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import chat_template, conversation
from dipaco_jax.data.chat_template import ChatTemplate
from dipaco_jax.data.cutting import Cut, Cutting
from dipaco_jax.data.tokenizer import Tokenizer, beginning
from dipaco_jax.data.tokenizer_files import TEMPLATE

Messages = Sequence[dict[str, str]]


def plain(tokens: np.ndarray) -> np.ndarray:
  """Returns the tokens, of which given ones are ~t in `tokens`."""
  return np.where(tokens < 0, ~tokens, tokens)


class Encoder:
  """Cuts conversations into sequences by the chat template of a tokenizer."""

  def __init__(self, tokenizer: Tokenizer):
    """Raises InputError if the tokenizer has no template."""
    template = chat_template.load(tokenizer)
    if template is None:
      problem = "the tokenizer has no chat template, which config.data.format='messages' needs"
      raise InputError(
        f'{problem}: name an instruct model in config.pretrain.init, or put {TEMPLATE} beside the tokenizer'
      )
    self._template, self._tokenizer = template, tokenizer
    self._sizes = tokenizer.piece_bytes()

  def cut(self, document: Any, cutting: Cutting, is_validation: bool) -> Cut:
    """Cuts a conversation; for validation, only its beginning is kept. Raises InputError if the template fails."""
    messages, length = document.text.messages, cutting.eval_len if is_validation else cutting.seq_len
    routed = beginning(self._tokenizer, conversation.routing_text([*messages]), cutting.prefix_tokens)
    try:
      every_part = _parts(self._template, self._tokenizer.end_ids, messages, length)
      parts = [next(every_part)] if is_validation else [*every_part]
    except InputError as e:
      raise InputError(f'{document.id}: {e}') from e
    whole = [sequence for part in parts for sequence in part]
    sequences = [sequence[:length] for sequence in whole]
    long = [sequence for sequence in sequences if _has_target(sequence)]
    short = [plain(sequence) for sequence in sequences if not _has_target(sequence)]
    short += [plain(sequence[length:]) for sequence in whole if len(sequence) > length]
    num_bytes = [int(self._sizes[x[1:][x[1:] >= 0]].sum()) for x in long] if is_validation else None
    return Cut(long, num_bytes, long, short, routed)


def _has_target(sequence: np.ndarray) -> bool:
  return bool((sequence[1:] >= 0).any())


class _Part(NamedTuple):
  """Some exchanges, in one sequence as long as each answer continues what was before it."""

  messages: Messages
  sequences: list[list[int]]
  so_far: list[int]  # the tokens of the last sequence, none of them as ~t


def _parts(
  template: ChatTemplate, end_ids: Sequence[int], messages: Messages, length: int
) -> Iterator[list[np.ndarray]]:
  """Yields the sequences of as many exchanges as fit into `length`, from the first exchange to the last."""
  instructions, exchanges = _exchanges(messages)
  empty = _Part(instructions, [], [])
  part = empty
  for exchange in exchanges:
    grown = _grow(template, end_ids, part, exchange)
    if part.sequences and _longest(grown) > length:
      yield _arrays(part)
      grown = _grow(template, end_ids, empty, exchange)
    part = grown
  yield _arrays(part)


def _grow(template: ChatTemplate, end_ids: Sequence[int], part: _Part, exchange: Messages) -> _Part:
  """Returns a part with one more exchange."""
  messages, sequences, so_far = part.messages, [*part.sequences], part.so_far
  for message in exchange:
    messages = [*messages, message]
    if message['role'] != 'assistant':
      continue
    asked, answer = template.encode_answer(messages)
    if not sequences or asked[: len(so_far)] != so_far:
      sequences.append([])
      so_far = []
    end = max((i + 1 for i, token in enumerate(answer) if token in end_ids), default=len(answer))
    behind = [~token for token in answer[end:]]  # given, such as a line break after the end of a turn
    before = [~token for token in asked[len(so_far) :]]
    sequences[-1] = [*sequences[-1], *before, *answer[:end], *behind]
    so_far = asked + answer
  return _Part(messages, sequences, so_far)


def _arrays(part: _Part) -> list[np.ndarray]:
  return [np.array(sequence, np.int32) for sequence in part.sequences]


def _longest(part: _Part) -> int:
  return max(map(len, part.sequences), default=0)


def _exchanges(messages: Messages) -> tuple[Messages, list[Messages]]:
  """Returns the instructions in front, and the exchanges behind them, each up to the last of its answers."""
  roles = [message['role'] for message in messages]
  begin = next(i for i, role in enumerate(roles) if role not in conversation.INSTRUCTIONS)
  ends = [i + 1 for i, role in enumerate(roles) if role == 'assistant' and roles[i + 1 : i + 2] != ['assistant']]
  return messages[:begin], [messages[a:b] for a, b in zip([begin, *ends], ends, strict=False)]
