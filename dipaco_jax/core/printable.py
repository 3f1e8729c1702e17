"""Text from outside (domains, names, prompts) as text: what a terminal, a page or a picture obeys is made visible.

Those are control characters, as escape sequences begin with; orders to write from right to left, which turn round what
stands beside them; and lone surrogates, which no file can hold. Scripts, accents, emoji and their joiners stay.
"""

import re

from dipaco_jax.core.errors import InputError

MAX_NAME = 200  # characters
TURNS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]  # what follows is written in another direction
SHOWN = {c: 0x2400 + c for c in range(32) if chr(c) not in '\n\t'}  # their pictures
SHOWN |= dict.fromkeys([*range(127, 160), 0x2028, 0x2029, *TURNS, *range(0xD800, 0xE000)], 0xFFFD)

# What stands between a colon and an @, as passwords do in URLs; in the place of a port, but no number; and what follows
# `password=`. A URL that is misspelt may have no scheme or no slashes, and a password an @ of its own.
SECRET = re.compile(
  r"""((?:://[^\s:/@[]*|[^\s:/@'"]):)(?!//|PASSWORD@)\S{1,256}(?=@)"""
  r"""|(://[^\s:/@[]*:)(?![\d/]|PASSWORD@)[^\s/'"]{1,256}|(password=)[^&\s'"]{1,256}"""
)


def text(words: str) -> str:
  """Lines as they are, of characters that only show themselves."""
  return words.translate(SHOWN)


def redacted(words: str) -> str:
  """Without passwords."""
  return SECRET.sub(lambda found: f'{found[1] or found[2] or found[3]}***', words)


def name(words: str, most: int = MAX_NAME) -> str:
  """One line, of so many characters at most: the end of a longer one is '…'."""
  line = text(' '.join(words.split()) if not words.isprintable() else words)
  return line if len(line) <= most else line[: most - 1] + '…'


def check(option: str, words: str, most: int = MAX_NAME):
  """Raises InputError where what a user calls something cannot be shown and kept as it is."""
  if words != text(words) or {*'\n\t'} & {*words} or len(words) > most:
    words = name(words)
    raise InputError(f'--{option}={words}: give a name without control characters, of {most} characters at most')
