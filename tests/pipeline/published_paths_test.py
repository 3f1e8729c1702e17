"""Published paths of owners become a workdir with a router, from public text alone."""

import contextlib
import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import one_process
import owner_stores
import owners_run
import pytest
import serving as serving_lib

from dipaco_jax import assemble, export
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import model_folder
from dipaco_jax.inference import trained_run
from dipaco_jax.models import loss
from dipaco_jax.pipeline import published_paths, run as run_lib

pytestmark = pytest.mark.usefixtures('one_device')
PATHS = 'court', 'press'


@pytest.fixture(scope='module')
def one_device():
  with one_process.one_device():
    yield


def test_a_path_has_a_name_and_a_folder():
  assert assemble.parse_paths(['court=x/y/', 'press=z=1']) == {'court': 'x/y', 'press': 'z=1'}
  for given in (['x/y'], ['=x'], ['court='], ['the press=x'], ['court=x', 'court=y']):
    with pytest.raises(InputError, match=r'give a name and a folder|there is a path court already'):
      assemble.parse_paths(given)
  with pytest.raises(InputError, match='name two paths or more'):
    published_paths.make_settings({'court': 'x'}, 'base', ['public.txt'])


@pytest.fixture(scope='module')
def folder(one_device, tmp_path_factory) -> pathlib.Path:
  """Folders of a base and of two paths, and the text of both as public text.

  A path is the base with other rows of the tokens that only the other one's text has, on which it is worse then.
  """
  folder = tmp_path_factory.mktemp('published')
  run = owner_stores.keep(folder / 'owners')
  write(folder / 'base', run, run.base())
  texts = [owners_run.own_file(folder / 'owners', name).read_text() for name in PATHS]
  words = [' '.join(json.loads(line)['text'] for line in text.splitlines()) for text in texts]
  ids = [{*run.tokenizer.encode(text, eos=False).tolist()} for text in words]
  for name, own, others in zip(PATHS, ids, reversed(ids), strict=True):
    params = {key: x.copy() for key, x in run.base().items()}
    params['embed/tokens'][sorted(others - own)] *= 4
    write(folder / name, run, params)
  (folder / 'public.jsonl').write_text(''.join(texts))
  return folder


def write(out: pathlib.Path, run: run_lib.Run, params: dict[str, np.ndarray]):
  """Writes a model as `export` does."""
  export.write(out, model_folder.make_files(params, run.settings.model, run.tokenizer, 'float32', {}))


def settings(folder: pathlib.Path, **paths: pathlib.Path):
  named = {name: str(folder / name) for name in PATHS} | {name: str(path) for name, path in paths.items()}
  return published_paths.make_settings(named, str(folder / 'base'), [str(folder / 'public.jsonl')])


def assembled(folder: pathlib.Path, workdir: pathlib.Path) -> dict:
  return published_paths.assemble(workdir, settings(folder), {name: str(folder / name) for name in PATHS}, 'assemble')


@pytest.mark.slow
def test_published_paths_become_a_workdir_with_a_router(folder, tmp_path):
  report = assembled(folder, tmp_path / 'all')
  run = trained_run.TrainedRun(str(tmp_path / 'all'))
  assert run.settings.grid == (('path', PATHS),) and run.paths_here == [0, 1]
  made = run_lib.unattended(tmp_path / 'all', run.settings)
  for name in PATHS:
    params, _ = model_folder.load_params(str(folder / name), made.model)
    assert all((np.asarray(run.path(name).params[key]) == x).all() for key, x in params.items())
  validation = made.sequences('validation')
  sequences = validation.read(range(len(validation)))
  routed_N = [run.router.path(x.tokens) for x in sequences]
  assert report['sequences_by_path'] == np.bincount(routed_N, minlength=2).tolist() and min(np.bincount(routed_N)) > 0
  prefix, nats, count = made.settings.routing.prefix_tokens, np.zeros(3), 0
  for x, routed in zip(sequences, routed_N, strict=True):
    tokens_1L = jnp.asarray(x.tokens.astype(np.int32))[None]
    losses = [
      float(loss.row_losses(made.model, prefix, run.path(name).params, tokens_1L, jnp.ones_like(tokens_1L))[0][0])
      for name in PATHS
    ]
    nats += np.array([*losses, losses[routed]])
    count += len(x.tokens) - prefix
  by_path, routed = np.exp(nats[:2] / count), np.exp(nats[2] / count)
  np.testing.assert_allclose(report['perplexity_by_path'], by_path, rtol=1e-4)
  assert report['perplexity'] == pytest.approx(routed, rel=1e-4)
  assert report['ratio_to_best'] == pytest.approx(routed / by_path.min(), rel=1e-4)
  assert report['best_path'] == by_path.argmin() and report['perplexity'] < by_path.min(), 'it follows the losses'
  lines = assemble.in_words(report, [*PATHS])
  assert len(lines) == 4 and lines[3].startswith('routed: ')
  router = tmp_path / 'all' / 'routing' / '0' / 'router.safetensors'
  before = router.stat().st_mtime_ns
  assert assembled(folder, tmp_path / 'all') == report and router.stat().st_mtime_ns == before, 'it is only read again'
  (tmp_path / 'all' / published_paths.RESULT).unlink()
  assert assembled(folder, tmp_path / 'all') == report, 'after a kill it is made again'


def begin(stack: contextlib.ExitStack, *options, **of) -> serving_lib.Serving:
  """Starts a server, which ends with the stack."""
  server = serving_lib.Serving(*options, **of)
  stack.callback(server.process.communicate)
  stack.callback(server.process.kill)
  server.wait()
  return server


@pytest.mark.slow
def test_the_workdir_is_served_and_routed(folder, tmp_path):
  """By `serve`, and by `route` with that server as the engine of both paths."""
  workdir, prompts = tmp_path / 'published', ['aeiou ayce', 'bcdfg klmn', 'ehmno rtw']
  assembled(folder, workdir)
  with contextlib.ExitStack() as stack:
    server = begin(stack, workdir, tmp_path / 'serve.log')
    engine = {'url': f'http://127.0.0.1:{server.port}/v1', 'api_key_env': 'DIPACO_API_KEY'}
    engines = {str(path): [engine | {'model': f'published/path-{path}'}] for path in range(len(PATHS))}
    (tmp_path / 'engines.json').write_text(json.dumps({'paths': engines}))
    options = f'--engines={tmp_path / "engines.json"}', '--max_open=16'
    router = begin(stack, workdir, tmp_path / 'route.log', *options, command='route')
    body = {'model': 'published', 'prompt': prompts, 'max_tokens': 5, 'temperature': 0}
    status, answer = server.ask(body)
    assert status == 200 and len(answer['choices']) == len(prompts), answer
    assert router.ask(body)[1]['choices'] == answer['choices']


@pytest.mark.slow
def test_a_path_of_another_tokenizer_or_model_is_an_error_before_any_work(folder, tmp_path):
  shutil.copytree(folder / 'press', tmp_path / 'press')
  config = json.loads((tmp_path / 'press' / 'config.json').read_text())
  (tmp_path / 'press' / 'config.json').write_text(json.dumps(config | {'hidden_size': 32}))
  with pytest.raises(InputError, match=r'^--path=press=.*/press.*width'):
    settings(folder, press=tmp_path / 'press')
  shutil.copy(folder / 'press' / 'config.json', tmp_path / 'press')
  tokenizer = json.loads((tmp_path / 'press' / 'tokenizer.json').read_text())
  (tmp_path / 'press' / 'tokenizer.json').write_text(json.dumps(tokenizer | {'truncation': None}, indent=3))
  (tmp_path / 'press' / 'tokenizer.model').unlink()
  with pytest.raises(InputError, match=r'^--path=press=.*tokenizer'):
    settings(folder, press=tmp_path / 'press')
  with pytest.raises(InputError, match=r'^--base=.*nowhere'):
    published_paths.make_settings({name: str(folder / name) for name in PATHS}, str(tmp_path / 'nowhere'), ['x'])
