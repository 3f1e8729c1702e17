"""Parts that pages have in common."""

import jinja2
import parsed_page
import pytest

from dipaco_jax.reports import pages


def table(*args) -> str:
  return pages.environment().get_template('parts.html').module.table(*args)


def test_a_table_is_never_cut_off():
  few, many = table([('a', 'b')]), table([('a', 'b', 'c', 'd')], ('', 'x', 'y', 'z'))
  assert 'class="pairs"' in few and 'scroll' not in few  # its rows become blocks on a small screen
  assert many.strip().startswith('<div class="scroll" role="region" tabindex="0"')


def test_cells_are_escaped_and_name_their_columns():
  text = table([('<b>', '"&', 'x')], ('', 'a"b', 'c'))
  page = parsed_page.Page(text)
  assert {'<b>', '"&', 'x'} <= {*page.words} and 'b' not in page.tags
  assert 'data-of="a&#34;b"' in text and text.count('data-of') == 2


def test_what_a_template_lacks_is_an_error():
  with pytest.raises(jinja2.UndefinedError, match='workdir'):
    pages.render('inspect.html', excerpts={})


def test_characters_that_a_browser_obeys_are_shown():
  empty = {'how': '', 'prefix_tokens': 1, 'legend': [], 'texts': []}
  text = pages.render('inspect.html', excerpts=empty, workdir='\x1b[2J\u202e')
  assert '␛[2J\ufffd' in text and not {*'\x1b\u202e'} & {*text}


def test_a_cell_of_markdown_stays_one():
  assert pages.table_cell('a|b\nc') == 'a\\|b c'
