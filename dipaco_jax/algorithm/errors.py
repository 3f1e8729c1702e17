"""Errors of the algorithm: wrong arguments, and training that cannot continue."""


class InputError(ValueError):
  """A mistake that the user can fix: the message names the option, field or file, and the fix; status 2."""


class Diverged(Exception):
  """Divergence: training cannot continue from its current state; earlier checkpoints remain."""
