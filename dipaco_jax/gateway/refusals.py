"""The error with which the gateway answers a request: a status, a cause that is counted, and one line."""


class Refused(Exception):
  """A request that is not accepted; the message says no more than its sender may know."""

  def __init__(self, status: int, cause: str, message: str):
    super().__init__(message)
    self.status, self.cause = status, cause


def forbidden(message: str = 'the token does not allow this') -> Refused:
  """Returns the error of a request beyond what a token allows."""
  return Refused(403, 'forbidden', message)


def malformed(message: str) -> Refused:
  """Returns the error of a request that says something impossible."""
  return Refused(422, 'malformed', message)


def lost() -> Refused:
  """Returns the error of a request for a task that its worker does not hold."""
  return Refused(409, 'lost', 'the task is no longer owned by this worker')
