"""Texts by the paths that read them, in a terminal."""

import re

from excerpts_of_four import FOUND, FOUR

from dipaco_jax.reports import excerpts_text, palette


def test_paths_are_marks_in_plain_text_and_colours_in_a_terminal():
  plain = excerpts_text.render(FOUND, FOUR, False)
  assert '[path 1]if a < b:\n[path 3]<script>alert("x")</script>␛[31m & so on' in plain and '\x1b' not in plain
  assert re.search(r'^ +4 +3 +2\.250 +3\.000 +-0\.750$', plain, re.MULTILINE)
  assert re.search(r'^ +0 +1 +2\.000 +2\.500 +-0\.500  not counted$', plain, re.MULTILINE)
  coloured = excerpts_text.render(FOUND, FOUR, True)
  blue = ';'.join(str(c) for c in bytes.fromhex(palette.path_colours(FOUR, 1)[0][1:]))
  assert f'48;2;{blue}m¹if a < b:\x1b[0m\n' in coloured  # the line's rest is not coloured
  assert '³<script>' in coloured and '³ & so on' not in coloured
  assert re.sub(r'\x1b\[[\d;]*m', '', coloured).count('\x1b') == 0


def test_means_are_over_the_tokens_of_all_texts():
  (one,) = FOUND.documents
  two = one._replace(counted=1, nats=0.5, rerouted=4.25, base=1.0)
  short = one._replace(counted=0, nats=None, rerouted=None, base=None)
  told = excerpts_text.render(FOUND._replace(documents=[one, two, short]), FOUR, False)
  words = 'All 4 tokens: 2.500 nats a token under the base, 2.000 routed once, 2.750 with paths chosen anew.'
  assert told.endswith(words) and 'All ' not in excerpts_text.render(FOUND, FOUR, False)
  diverged = excerpts_text.render(FOUND._replace(documents=[one, two._replace(nats=None)]), FOUR, False)
  assert '2.500 nats a token under the base, - routed once' in diverged
