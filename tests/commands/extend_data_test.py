"""docs/extend.md: its router, source and tokenizer, as they are written there, in a run from text to text."""

import numpy as np
import own_modules
import pytest
import tiny_run

import dipaco_jax
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.inference import excerpts
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.storage import user_modules

pytestmark = pytest.mark.slow
NAMES = ('my_router', 'my_source', 'my_tokenizer')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Files of the page, documents, and the run in `run`."""
  folder = tmp_path_factory.mktemp('stranger')
  user_modules.trust(NAMES)
  for name in NAMES:
    (folder / f'{name}.py').write_text(own_modules.examples()[f'{name}.py'])
  rng = np.random.default_rng(0)
  for i in range(160):
    words = [''.join(rng.choice([*'aeiouy'], 4)) for _ in range(rng.integers(10, 90))]
    file = folder / 'text' / 'ab'[i % 2] / f'{i}.rst'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(' '.join(words))
  config = tiny_run.write_config(folder)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    patch.setenv('PYTHONPATH', str(folder))
    own = ['data.source=my_source:make', f'data.data_dir={folder}/text', 'data.train=', 'data.parts=2']
    own += ['routing.method=my_router:make', 'tokenizer.kind=my_tokenizer:make', 'train.phases=1', 'pretrain.steps=6']
    tiny_run.run(config, folder / 'run', *(f'--config.{x}' for x in own))
    yield folder


def test_all_of_it_trains_and_is_evaluated(folder):
  run = TrainedRun(str(folder / 'run'))
  assert 0 < run.report['perplexity'] < 257
  assert [module for module, _ in run.settings.extensions] == [*NAMES] and run.tokenizer.vocab_size == 257
  assert not [*(folder / 'run').glob('tokenizer*')]


def test_documents_go_by_their_length_whichever_part_of_them_it_is(folder):
  for split in ('train', 'validation'):
    routed = np.load(folder / 'run' / 'routing' / '0' / f'{split}.npy').reshape(-1)
    lengths = Sequences(folder / 'run' / 'sequences', split).lengths()
    assert {*routed} == {0, 1, 2, 3} and lengths.max() > 300  # of rows of 64
    highest = [lengths[routed == path].max() for path in range(4)]
    lowest = [lengths[routed == path].min() for path in range(4)]
    assert all(high < low for high, low in zip(highest[:-1], lowest[1:], strict=True))
    assert split == 'validation' or np.bincount(routed).min() > 0.7 * len(routed) / 4


def test_it_generates_by_the_length_of_what_there_is(folder):
  run = TrainedRun(str(folder / 'run'))
  router = dipaco_jax.load_router(str(folder / 'run'))
  edges = router.fitted.state['edges']
  assert [router.path([97] * int(n)) for n in (1, *(edges + 1))] == [0, 1, 2, 3]
  prompt = tuple(run.tokenizer.encode('aeiou', eos=False).tolist())
  (text,) = Engine(run).generate([Request(prompt, 8, None, reroute_every=4)])
  assert text.paths[0] == 0 and len(text.tokens) > 5


def test_any_text_is_read_in_chunks(folder):
  run = TrainedRun(str(folder / 'run'))
  found = excerpts.of_text(run, 'aeiou ' * 12, 32, None, None)
  assert found.by == 'router' and found.documents[0].chunks[0].path == run.router.path('aeiou ' * 12)
