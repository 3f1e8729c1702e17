"""Text from outside (domains, names, prompts), safe to show: characters that a terminal or page obeys become visible.

Those are control characters, with which escape sequences begin; bidirectional controls, which reverse the text beside
them; and lone surrogates, which no file can hold. Scripts, accents, emoji and their joiners stay.
"""

import re

from dipaco_jax.core.errors import InputError

MAX_NAME = 200  # characters
TURNS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]  # bidirectional controls
SHOWN = {c: 0x2400 + c for c in range(32) if chr(c) not in '\n\t'}  # the Unicode pictures of controls
SHOWN |= dict.fromkeys([*range(127, 160), 0x2028, 0x2029, *TURNS, *range(0xD800, 0xE000)], 0xFFFD)

# Text between a colon and an @, as passwords stand in URLs; text in place of a port that is no number; and text after
# `password=`. A misspelt URL may lack its scheme or slashes, and a password may contain an @.
SECRET = re.compile(
  r"""((?:://[^\s:/@[]*|[^\s:/@'"]):)(?!//|PASSWORD@)\S{1,256}(?=@)"""
  r"""|(://[^\s:/@[]*:)(?![\d/]|PASSWORD@)[^\s/'"]{1,256}|(password=)[^&\s'"]{1,256}"""
)


def text(value: str) -> str:
  """Makes control characters visible; line breaks and tabs stay."""
  return value.translate(SHOWN)


def redacted(message: str) -> str:
  """Replaces passwords by ***."""
  return SECRET.sub(lambda match: f'{match[1] or match[2] or match[3]}***', message)


def name(value: str, most: int = MAX_NAME) -> str:
  """Returns the text as one line of at most `most` characters; a longer one ends in '…'."""
  line = text(' '.join(value.split()) if not value.isprintable() else value)
  return line if len(line) <= most else line[: most - 1] + '…'


def check_name(label: str, value: str, most: int = MAX_NAME) -> None:
  """Raises InputError if a name that a user gives as `label` has control characters or is too long."""
  if value != text(value) or {*'\n\t'} & {*value} or len(value) > most:
    value = name(value)
    raise InputError(f'{label}={value}: give a name without control characters, of {most} characters at most')
