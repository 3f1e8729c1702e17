"""How a command starts and ends: flags, then status 0 when done, 2 with one clear line for a wrong flag or input."""

import sys
from collections.abc import Callable
from typing import NoReturn

from absl import app, flags


def run(main: Callable[[], int | None]):
  """Parses flags and runs `main`; a ValueError from it is the user's to mend. Define the flags first."""

  def parse(argv: list[str]) -> list[str]:
    try:
      rest = flags.FLAGS(argv)
    except flags.Error as e:
      fail(str(e))
    except SystemExit:  # --help was printed, which absl takes for a failure
      sys.exit(0)
    if rest[1:]:
      fail(f'{" ".join(rest[1:])}: every option starts with --')
    return rest

  def guarded(argv: list[str]) -> int | None:
    del argv
    try:
      return main()
    except ValueError as e:
      fail(str(e))

  app.run(guarded, flags_parser=parse)


def fail(words: str) -> NoReturn:
  print(words, file=sys.stderr)
  sys.exit(2)
