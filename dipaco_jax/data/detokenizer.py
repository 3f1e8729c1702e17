"""Streaming detokenization: text of tokens as they come, without anything that a later token could change."""

import os.path
from collections.abc import Sequence

from dipaco_jax.data.tokenizer import Tokenizer

HALF = '\ufffd'  # SentencePiece's sign for bytes that are no character yet
LONGEST = 4  # bytes of a character


class Transcript:
  """The text of a growing list of tokens, up to the first stop string."""

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stop: Sequence[str] = ()):
    """Begins an empty text after the tokens `before`, on which a word's first space depends."""
    self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
    self._tokens = list(before[-1:])
    if tokenizer.decode(self._tokens).endswith(HALF):
      self._tokens = list(before[-LONGEST:])
    self._start, self._read = 0, len(self._tokens)  # where the context begins that is decoded again, and what is new
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
    """Returns what is new since the last call; `final` also returns what may begin a stop string, which else waits."""
    held = 0 if final or self.stopped else max((_overlap(self.text, stop) for stop in self._stop), default=0)
    end = max(self._shown, len(self.text) - held)
    new, self._shown = self.text[self._shown : end], end
    return new

  def _decoded(self, start: int, end: int | None = None) -> str:
    return self._tokenizer.decode(self._tokens[start:end])

  def _grow(self):
    context, whole = self._decoded(self._start, self._read), self._decoded(self._start)
    same = os.path.commonprefix([context, whole])  # noqa: RUF071  # by character: it may have ended in half of one
    new = whole[len(same) :]
    self._start, self._read = self._read, len(self._tokens)
    searched = max(0, len(self.text) - max(map(len, self._stop), default=0))
    self.text += new
    found = [at for at in (self.text.find(stop, searched) for stop in self._stop) if at >= 0]
    if found:
      self.text, self.stopped = self.text[: min(found)], True


def _overlap(text: str, stop: str) -> int:
  """Counts the characters at the end of `text` that begin `stop`."""
  return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
