"""Errors that end a command with one line, and the causes of an error."""

import errno
import os

from dipaco_jax.algorithm.errors import Diverged as Diverged, InputError as InputError

NO_PERPLEXITY = 'training diverged: the perplexity is not finite'


class Unavailable(Exception):
  """A place that a run needs is gone or full for now; the same command continues when it is back."""


class Lost(Exception):
  """The task went to another owner; this claim is void."""


class Away(Unavailable):
  """A database or storage that has not answered for as long as was waited for it; what to do, `parting` says."""


def parting(error: Unavailable) -> str:
  """Returns the last line of a command that this error ends. A process that continues shows only the message."""
  message = getattr(error, 'strerror', None) or str(error)
  return f'{message}; run it again when it is back' if isinstance(error, Away) else message


def causes(error: BaseException) -> list[BaseException]:
  """Returns an error, the error that it was raised from, and so on."""
  chain = [error]
  while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
    chain.append(cause)
  return chain


def disk_is_full(error: BaseException) -> bool:
  """Returns whether an error was caused by a full disk; TensorStore reports that in its message only."""
  full = (errno.ENOSPC, errno.EDQUOT)
  messages = [os.strerror(number) for number in full]
  return any(getattr(e, 'errno', None) in full or any(w in str(e) for w in messages) for e in causes(error))
