"""Conversations as sequences: the model learns to write the answers, and the tokens between them are given.

A sequence is as many exchanges of a conversation as fit, with its instructions in front: a long conversation becomes
several, each cut between exchanges, and what is too long in a single one is cut off. If a template writes earlier
answers differently than the last one, as without its thoughts, then each answer has a sequence of its own.

In an array of tokens, int32, a given token t is ~t, which is negative. Where a row is packed, its segment id is.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

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
      parts = [*_parts(self._template, self._tokenizer.end_ids, messages, length)]
    except InputError as e:
      raise InputError(f'{document.id}: {e}') from e
    if is_validation:
      parts = parts[:1]
    whole = [sequence for part in parts for sequence in part]
    sequences = [sequence[:length] for sequence in whole]
    long = [sequence for sequence in sequences if _has_target(sequence)]
    short = [plain(sequence) for sequence in sequences if not _has_target(sequence)]
    short += [plain(sequence[length:]) for sequence in whole if len(sequence) > length]
    num_bytes = [int(self._sizes[x[x >= 0]].sum()) for x in long] if is_validation else None
    return Cut(long, num_bytes, long, short, routed)


def _has_target(sequence: np.ndarray) -> bool:
  return bool((sequence[1:] >= 0).any())


def _parts(
  template: ChatTemplate, end_ids: Sequence[int], messages: Messages, length: int
) -> Iterator[list[np.ndarray]]:
  """Yields the sequences of as many exchanges as fit into `length`, from the first exchange to the last."""
  make = functools.partial(_sequences, template, end_ids)
  whole = make(messages)
  if _longest(whole) <= length:
    yield whole
    return
  instructions, exchanges = _exchanges(messages)
  part: list[np.ndarray] = []
  taken: Messages = []
  for exchange in exchanges:
    grown = make([*instructions, *taken, *exchange])
    if taken and _longest(grown) > length:
      yield part
      taken, grown = [], make([*instructions, *exchange])
    part, taken = grown, [*taken, *exchange]
  yield part


def _longest(sequences: list[np.ndarray]) -> int:
  return max(map(len, sequences), default=0)


def _exchanges(messages: Messages) -> tuple[Messages, list[Messages]]:
  """Returns the instructions in front, and the exchanges behind them, each up to the last of its answers."""
  roles = [message['role'] for message in messages]
  begin = next(i for i, role in enumerate(roles) if role not in conversation.INSTRUCTIONS)
  ends = [i + 1 for i, role in enumerate(roles) if role == 'assistant' and roles[i + 1 : i + 2] != ['assistant']]
  return messages[:begin], [messages[a:b] for a, b in zip([begin, *ends], ends, strict=False)]


def _sequences(template: ChatTemplate, end_ids: Sequence[int], messages: Messages) -> list[np.ndarray]:
  """Returns the answers with what is given before them, in one sequence as long as each continues the one before."""
  sequences: list[list[int]] = []
  so_far: list[int] = []
  for asked, answer in template.encode_answers(messages):
    if not sequences or asked[: len(so_far)] != so_far:
      sequences.append([])
      so_far = []
    end = max((i + 1 for i, token in enumerate(answer) if token in end_ids), default=len(answer))
    behind = [~token for token in answer[end:]]  # given, such as a line break after the end of a turn
    sequences[-1] += [*[~token for token in asked[len(so_far) :]], *answer[:end], *behind]
    so_far = asked + answer
  return [np.array(sequence, np.int32) for sequence in sequences]
