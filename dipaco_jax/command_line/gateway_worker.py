"""The options of a worker behind a gateway, which learns from there what it trains."""

import os
import re
from collections.abc import Collection, Sequence

from absl import flags

from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import gateway_link

OPTIONS = 'role', 'name', 'parent', 'profile', 'metrics_port', 'owner', 'data', 'store'
NAME = re.compile(r'[A-Za-z0-9._-]{1,64}')


def is_chosen() -> bool:
  """Returns whether this process is a worker behind a gateway. Raises InputError for other roles."""
  role = flags.FLAGS.role
  if not role or not os.environ.get(gateway_link.GATEWAY):
    return False
  if role != 'worker':
    fix = f'--role={role} needs the registry and the workdir themselves: unset it'
    raise InputError(f'{gateway_link.GATEWAY} is for workers, and {fix}')
  return True


def check(known: Sequence[str], rest: Collection[str]):
  """Raises InputError for options that a worker behind a gateway does not have.

  Args:
    known: names of the command's options.
    rest: what else was given: arguments that are no options, and fields of a config.
  """
  f = flags.FLAGS
  given = [f'--{name}' for name in known if f[name].present and name not in OPTIONS]
  for argument in [*given, *rest]:
    what = printable.redacted(argument.partition('=')[0])
    fix = f'leave it out, or unset {gateway_link.GATEWAY} for a worker that has the registry and the workdir itself'
    raise InputError(f'{what} is not for a worker behind a gateway, which tells it what to train: {fix}')
  if f.name and not NAME.fullmatch(f.name):
    raise InputError(f'--name={printable.name(f.name)}: use letters, digits, ".", "-" and "_", 64 at most')
  gateway_link.from_environment()
