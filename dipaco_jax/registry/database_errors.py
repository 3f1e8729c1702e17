"""What an error of the database means: it may succeed later, or somebody has to mend something first."""

import errno

import sqlalchemy as sa

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import backends, retry
from dipaco_jax.storage.lock import Held

SQLITE_TRANSIENT = 5, 6, 10, 13, 14  # BUSY, LOCKED, IOERR, FULL, CANTOPEN
SQLITE_READ_ONLY = 3, 8  # PERM, READONLY
SQLITE_DAMAGED = 11, 26  # CORRUPT, NOTADB
SQLITE_LACKING = 'no such table', 'no such column'  # code 1, as of any wrong statement
# The same of the files beside it: a share that is not mounted, one without its locks, a full disk.
TRANSIENT = backends.TRANSIENT | {errno.ENOENT, errno.ENOLCK, errno.ENOSPC, errno.EDQUOT}
READ_ONLY = errno.EROFS, errno.EACCES, errno.EPERM
STANDBY = '25006'  # PostgreSQL's code for a change that a standby rejects
NOT_ALLOWED = '42501', '3F000'  # insufficient privilege, no schema that the user may use
LACKING = '42P01', '42703'  # undefined table, undefined column
DAMAGED = 'XX001', 'XX002'  # corrupted data, corrupted index

REBUILD = (
  'stop all roles and run `python -m dipaco_jax.registry --workdir=DIR rebuild`, with the --registry of the run if it '
  'has one: it takes the newest backup in the workdir'
)


class Unusable(InputError):
  """A registry that no process of the run can use until somebody mends it; the message says how."""


class Damaged(Unusable):
  """A registry whose pages are damaged, or that lacks tables; `fault` says it without the way to mend it."""

  def __init__(self, fault: str):
    super().__init__(f'{fault}: {REBUILD}')
    self.fault = fault


def is_transient(error: Exception) -> bool:
  """Returns whether the call may succeed later: the database is unreachable, starting, full, or resolved a deadlock.

  Or it has become a standby, another process holds its lock, or this process's other threads hold all connections that
  it may have.
  """
  if isinstance(error, Held):
    return True
  if not isinstance(error, sa.exc.DBAPIError) or is_refused(error):
    return isinstance(error, sa.exc.TimeoutError) or (isinstance(error, OSError) and error.errno in TRANSIENT)
  code = getattr(error.orig, 'sqlite_errorcode', None)
  if code is not None:
    return code & 0xFF in SQLITE_TRANSIENT
  return error.connection_invalidated or isinstance(error, sa.exc.OperationalError)


def is_refused(error: Exception) -> bool:
  """Returns whether a connection was rejected for its user, password or database. The error has a text, but no code."""
  refusals = 'authentication failed', 'does not exist'
  return isinstance(error, sa.exc.OperationalError) and any(refusal in str(error.orig) for refusal in refusals)


def is_damaged(error: Exception) -> bool:
  """Returns whether pages of the database are damaged, or tables or columns are missing."""
  if not isinstance(error, sa.exc.DBAPIError):
    return False
  code, message = getattr(error.orig, 'sqlite_errorcode', None), str(error.orig)
  if code is not None:
    return code & 0xFF in SQLITE_DAMAGED or message.startswith(SQLITE_LACKING)
  return getattr(error.orig, 'sqlstate', None) in LACKING + DAMAGED


def is_read_only(error: Exception) -> bool:
  """Returns whether this user may not write into the database."""
  if not isinstance(error, sa.exc.DBAPIError):
    return isinstance(error, OSError) and error.errno in READ_ONLY
  code = getattr(error.orig, 'sqlite_errorcode', 0)
  return code & 0xFF in SQLITE_READ_ONLY or getattr(error.orig, 'sqlstate', None) in NOT_ALLOWED


def to_unusable(error: Exception, name: str) -> Unusable | None:
  """Returns the error that explains how to mend a registry of this name, or None if it has another cause."""
  reason = getattr(error, 'strerror', None) or retry.first_line(error)
  if is_refused(error):
    return Unusable(f'the registry rejects the connection ({reason}): check its user, password and database')
  if is_damaged(error):
    return Damaged(f'the registry {name} is damaged ({reason})')
  if is_read_only(error):
    return Unusable(f'the registry {name} cannot be written ({reason}): check permissions, and whether it is read-only')
  return None
