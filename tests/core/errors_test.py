"""What is behind an error."""

import errno

from dipaco_jax.core import errors


def test_a_full_disk_is_found_by_whatever_name():
  full, wrapped = OSError(errno.ENOSPC, 'No space left on device'), RuntimeError('cannot save')
  wrapped.__cause__ = full
  assert all(map(errors.disk_is_full, (full, wrapped, ValueError('RESOURCE_EXHAUSTED: x: No space left on device'))))
  assert not errors.disk_is_full(OSError(errno.EACCES, 'Permission denied'))


def test_causes_that_go_round_in_a_circle_end():
  first, second = ValueError('first'), ValueError('second')
  first.__cause__, second.__cause__ = second, first
  assert errors.causes(first) == [first, second]


class AwayOSError(OSError, errors.Away):
  """As that of storage."""


def test_a_command_that_ends_says_what_to_do():
  for away in errors.Away('no answer'), AwayOSError(errno.EIO, 'no answer'):
    assert 'again' not in str(away) and errors.parting(away) == 'no answer; run it again when it is back'
  assert errors.parting(errors.Unavailable('the disk is full; clear it')) == 'the disk is full; clear it'
