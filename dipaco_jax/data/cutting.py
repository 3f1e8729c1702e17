"""Cutting a document's tokens into sequences. Pure."""

from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.data import source


class Cutting(NamedTuple):
  """How documents are cut into sequences."""

  seq_len: int  # maximum number of tokens of a training sequence
  eval_len: int  # maximum number of tokens of a validation sequence
  prefix_tokens: int  # number of first tokens that no evaluation counts; sequences that are not longer are dropped
  pieces: int = 1  # maximum number of validation sequences from a piece of a longer text
  conversations: bool = False  # whether documents are conversations, which `answers` cuts


class Cut(NamedTuple):
  """The sequences of a document."""

  kept: list[np.ndarray]
  num_bytes: list[int] | None  # bytes of text of each kept sequence, after the prefix; None in training
  long: list[np.ndarray]  # sequences longer than the prefix, which include `kept`
  short: list[np.ndarray]  # other sequences
  routed: np.ndarray | None = None  # of a conversation: the tokens that choose its path


def cut_document(document: Any, tokens: np.ndarray, byte_ends: np.ndarray | None, cutting: Cutting) -> Cut:
  """Cuts a training document or, if `byte_ends` is given, a validation document into sequences."""
  prefix_tokens = cutting.prefix_tokens
  if byte_ends is None:
    long, short = _cut(tokens, cutting.seq_len, prefix_tokens)
    return Cut(long, None, long, short)
  in_pieces = document.draw >= 0
  end = len(tokens) if in_pieces else cutting.eval_len
  long, short = _cut(tokens[:end], cutting.eval_len, prefix_tokens)
  ends, _ = _cut(byte_ends[:end], cutting.eval_len, prefix_tokens)
  kept = _spread(long, cutting.pieces, document.id) if in_pieces else long
  kept_ends = _spread(ends, cutting.pieces, document.id) if in_pieces else ends
  return Cut(kept, [int(x[-1] - x[max(prefix_tokens, 1) - 1]) for x in kept_ends], long, short)


def _cut(tokens: np.ndarray, length: int, prefix_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Cuts tokens into sequences; returns those that are longer than the prefix, and the others."""
  sequences = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
  long = [sequence for sequence in sequences if len(sequence) > prefix_tokens]
  return long, [sequence for sequence in sequences if len(sequence) <= prefix_tokens]


def _spread(sequences: list[np.ndarray], count: int, name: str) -> list[np.ndarray]:
  """Chooses `count` evenly spaced sequences. The first one depends on the name."""
  if count >= len(sequences):
    return sequences
  first = source.uniform(f'first of {name}')
  return [sequences[int((first + i) * len(sequences) / count)] for i in range(count)]
