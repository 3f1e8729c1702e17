"""What a federation is worth, in words, a table and a picture."""

import parsed_page
import pytest

from dipaco_jax.reports import worth_page


def figures(base: float, alone: float, federation: float, interval: tuple[float, float] | None) -> dict:
  """Figures of a path, or of all, as compare.json has them."""
  perplexity = {'base': base, 'alone': alone, 'federation': federation}
  ratio = {'federation_to_alone': federation / alone, 'federation_to_base': federation / base}
  ratio['alone_to_base'] = alone / base
  intervals = dict.fromkeys(ratio, None) | {'federation_to_alone': interval}
  return {
    'path': 0, 'steps': 1200, 'tokens': 2_000_000, 'phase_of_alone': 9, 'documents': 212, 'targets': 96_410,
    'perplexity': perplexity, 'perplexity_interval': {name: (0.9 * x, 1.1 * x) for name, x in perplexity.items()},
    'ratio': ratio, 'ratio_interval': intervals,
  }  # fmt: skip


def report(*of_paths: dict, together: dict | None = None) -> dict:
  by_path = {f'court,{number}': about for number, about in enumerate(of_paths)}
  return {'owner': 'court', 'phases': 12, 'by_path': by_path} | ({'all': together} if together else {})


PAID = figures(50.0, 40.0, 38.0, (0.93, 0.97))
NOT_PAID = figures(50.0, 40.0, 44.0, (1.05, 1.16))


@pytest.mark.parametrize(
  ('about', 'expected'),
  [
    (PAID, 'the federation paid: its perplexity is lower than alone (-5.0% (-7.0 to -3.0%))'),
    (NOT_PAID, 'the federation did not pay: its perplexity is higher than alone (+10.0% (+5.0 to +16.0%))'),
    (figures(50.0, 40.0, 38.0, (0.9, 1.01)), 'is not known: the difference may be chance (-5.0%, not significant'),
    (figures(50.0, 40.0, 38.0, None), 'is not known: the difference may be chance (-5.0%, too few documents)'),
  ],
)
def test_it_says_plainly_whether_the_federation_paid(about, expected):
  lines = worth_page.in_words(report(about))
  assert len(lines) == 3 and expected in lines[-1]
  assert lines[0] == 'perplexity on 212 held-back documents of court (96,410 tokens)'
  assert lines[1].startswith('court,0: base 50.00; alone 40.00; in the federation ')
  assert expected in ''.join(parsed_page.Page(worth_page.render(report(about))[0]).words)


def test_of_several_paths_all_together_decide():
  content = report(PAID, NOT_PAID, together=figures(50.0, 40.0, 39.0, (0.96, 0.99)))
  lines = worth_page.in_words(content)
  assert [line.partition(':')[0] for line in lines[1:4]] == ['court,0', 'court,1', 'all paths']
  assert lines[4].startswith('the federation paid')
  [ax] = worth_page.picture(content).figure.axes
  assert [label.get_text() for label in ax.get_yticklabels()] == ['court,0', 'court,1', 'all paths']
  assert [text.get_text() for text in ax.get_legend().get_texts()] == ['base', 'alone', 'in the federation']
  assert len(ax.texts) == 9 and len(ax.lines) == 18 + 3, 'a point and an interval each, and the legend'


def test_a_path_without_a_hold_out_is_shown_without_figures():
  nothing = figures(50.0, 40.0, 38.0, None)
  nothing |= {name: dict.fromkeys(nothing[name], None) for name in ('perplexity', 'perplexity_interval', 'ratio')}
  lines = worth_page.in_words(report(nothing))
  assert lines[1] == 'court,0: base -; alone -; in the federation -: -' and 'is not known' in lines[2]
  assert worth_page.render(report(nothing))[1].startswith(b'\x89PNG')
