"""The card of an exported path says what its run was, in Markdown that no name breaks."""

from dipaco_jax.config import settings
from dipaco_jax.huggingface import families
from dipaco_jax.reports import model_card

REPORT = {
  'perplexity': 10.0,
  'perplexity_by_path': [9.0, None],
  'base_perplexity': 13.5,
  'control_perplexity': 11.5,
  'validation_tokens': 12_345,
}


def card(values: dict, number: int = 0, measured: bool = True, report: dict = REPORT, **others) -> str:
  s = settings.from_dict({'grid': {'a': 2}, 'levels': (('all', '.*', ('a',)),)} | values)
  coordinates = (number,) if s.grid else ()
  others = {'family': families.FAMILIES[0], 'adds_bos': False, 'has_pieces': True} | others
  modules = {'all': f'all/{number}'}
  return model_card.render(
    model_card.Facts(s, number, coordinates, 2, modules, measured, report, 'float32', 1234, **others)
  )


def rows(text: str) -> dict[str, str]:
  """Returns the second cell of each row of two by its first."""
  return dict(line[2:-2].split(' | ', 1) for line in text.splitlines() if line.startswith('| ') and line[2] != '|')


def test_a_path_of_several_names_its_place_and_its_router():
  text = card({'routing': {'method': 'kmeans', 'prefix_tokens': 16}}, number=1)
  assert '# Path 1 of 2\n\nA language model of 1,234 parameters' in text
  assert 'by its first 16 tokens; it is not in this folder' in text
  assert rows(text)['this path'] == '1, at a=1' and rows(text)['modules'] == '`all/1`'


def test_the_path_of_an_owner_names_the_owner_and_no_text_of_others():
  own = {'source': 'files', 'train': ('public.txt',), 'validation': ('held.txt',), 'own_text': True}
  text = card({'grid': {'owner': ('clinic', 'court')}, 'levels': (('all', '.*', ('owner',)),), 'data': own,
               'routing': {'method': 'owner'}}, number=1, report={})  # fmt: skip
  assert '# Path 1 of 2, of court\n' in text and 'A router decides' not in text
  assert 'It was trained on text of court, and is meant for it.' in text
  assert rows(text)['text'] == 'that of court, which stays with it'
  assert rows(text)['routing'] == 'none: each owner has its own paths'
  assert rows(text)['base model'].endswith('on public text') and 'public.txt' not in text


def test_parts_of_the_trainers_own_are_named():
  text = card({'routing': {'method': 'my.router:make'}, 'data': {'source': 'my_source:make'}})
  assert "a text belongs to\n(`my.router:make`, of its trainer's own); it is not in this folder" in text
  assert rows(text)['routing'] == "`my.router:make`, of its trainer's own; the first 32 tokens are not scored"
  assert rows(text)['text'] == "documents of `my_source:make`, of its trainer's own"


def test_random_paths_have_no_router():
  text = card({'routing': {'method': 'random'}})
  assert 'dealt out to the paths at random' in text and 'load_router' not in text


def test_the_only_path_of_a_run_has_no_place():
  text = card({'grid': {}, 'levels': (('all', '.*', ()),), 'routing': {'method': 'single'}})
  assert '# A model of one path\n' in text and 'this path' not in rows(text.split('## Evaluation')[0])


def test_perplexities_are_those_that_were_measured():
  assert rows(card({}).split('## Evaluation')[1]) == {
    'this path, on the documents routed to it': '9.00',
    'all paths, each document under its own': '10.00',
    'the base model, on all documents': '13.50',
    'the dense control (as many steps), on all documents': '11.50',
  }
  assert 'on 12,345 tokens of text held back' in card({})
  assert '| none was |' in card({}, number=1) and '| measured of another version only |' in card({}, measured=False)
  assert 'Nothing was measured yet' in card({}, report={}) and 'perplexity |' not in card({}, report={})


def test_a_name_is_one_cell_and_is_not_escaped_as_html():
  text = card({'data': {'source': 'files', 'train': ('a|b.txt', 'c&d.txt')}})
  assert '| text | `a\\|b.txt`, `c&d.txt` |' in text


def test_what_stands_before_a_text_and_which_files_a_tokenizer_has():
  assert 'No token is put before a text' in card({}) and '`tokenizer.model` is the same' in card({})
  other = card({}, adds_bos=True, has_pieces=False)
  assert 'A begin-of-text token is put before a text' in other and 'tokenizer.model' not in other


UPCYCLED = {'pretrain': {'init': '/home/me/models/small', 'steps': 0}, 'model': {'seq_len': 256}}
KNOWN = {'name': 'who/small', 'license': 'apache-2.0', 'max_positions': 8192}


def test_the_card_of_an_upcycled_path_names_its_base_and_license():
  text = card(UPCYCLED, origin=KNOWN)
  heading = text.split('---\n')[1]
  assert 'base_model: who/small\nlicense: apache-2.0  # of the base model\n' in heading
  assert '# license' not in heading
  of_folder = card(UPCYCLED, origin={}).split('---\n')[1]
  assert 'base_model: small  # a folder: write its name on the Hub' in of_folder
  assert '# license: not known; name one' in of_folder
  odd = card(UPCYCLED, origin={'name': 'a: "b"'})
  assert 'base_model: "a: \\"b\\""' in odd
  assert 'base_model' not in card({}) and '# license: not known' in card({})


def test_the_card_of_an_upcycled_path_claims_no_more_than_is_known():
  text = card(UPCYCLED, origin=KNOWN)
  assert 'trained on rows of 256 tokens; its base takes texts of up to 8,192 tokens.' in ' '.join(text.split())
  assert 'has seen no longer text' not in text and 'has seen no longer text' in card({})
  assert rows(text)['tokens read in this run'].endswith(', after those of `who/small`')
  assert 'tokens read, with the base' not in text and 'tokens read, with the base' in card({})
  assert rows(text)['base model'] == 'no steps, from `who/small`'


def test_a_card_shows_no_local_path():
  text = card(
    UPCYCLED | {'data': {'source': 'files', 'train': ('/home/me/text/*.txt', '/home/me/a.jsonl', 'gs://b/c/d.txt')}}
  )
  assert '/home' not in text and 'gs://' not in text
  assert rows(text)['text'] == '`text/*.txt`, `a.jsonl`, `d.txt`'
  of_hub = 'hf://datasets/who/what/*.parquet'
  assert rows(card({'data': {'source': 'files', 'train': (of_hub,)}}))['text'] == f'`{of_hub}`'
