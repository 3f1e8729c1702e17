"""Errors that end a command with one line, and the causes of an error."""

import errno
import os

from dipaco_jax.algorithm.errors import Diverged as Diverged, InputError as InputError

NO_PERPLEXITY = 'training diverged: the perplexity is not finite'


class Unavailable(Exception):
  """A place that a run needs is gone or full for now; the same command goes on when it is back."""


class Away(Unavailable):
  """A database or storage that has not answered for as long as was waited for it; what to do, `parting` says."""


def parting(error: Unavailable) -> str:
  """Returns the line with which a command ends by this error; a process that goes on tells the message alone."""
  words = getattr(error, 'strerror', None) or str(error)
  return f'{words}; run it again when it is back' if isinstance(error, Away) else words


def causes(error: BaseException) -> list[BaseException]:
  """Returns an error, the error that it was raised from, and so on."""
  found = [error]
  while (cause := found[-1].__cause__ or found[-1].__context__) and cause not in found:
    found.append(cause)
  return found


def disk_is_full(error: BaseException) -> bool:
  """Returns whether an error was caused by a full disk; TensorStore reports that in its message only."""
  full = (errno.ENOSPC, errno.EDQUOT)
  words = [os.strerror(number) for number in full]
  return any(getattr(e, 'errno', None) in full or any(w in str(e) for w in words) for e in causes(error))
