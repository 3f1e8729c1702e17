"""One path of a run: its bytes and no others, from a folder and from a bucket."""

import hashlib
import json
import pathlib
import shutil

import made_run
import numpy as np
import object_server
import pytest
import safetensors.numpy

import dipaco_jax
from dipaco_jax import export
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import sentencepiece_tokenizer
from dipaco_jax.inference import engine, excerpts, request, run_files, trained_run
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import stage_records
from dipaco_jax.storage import object_store, publishing, seals


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return made_run.write(tmp_path_factory.mktemp('made'), made_run.settings())


def test_three_lines_give_logits(workdir):
  path = dipaco_jax.load(workdir, path=3)
  tokens_1L = path.tokenizer.encode('The lazy dog', eos=False)[None]
  found = path.logits('The lazy dog')
  params = made_run.parameters(workdir, 3)
  x_1LD, head_DV = transformer.logit_factors(path.model, params, tokens_1L, np.ones_like(tokens_1L))
  np.testing.assert_allclose(found, (x_1LD @ head_DV)[0], atol=1e-4)
  assert (path.number, path.coordinates, path.version) == (3, (1, 1), 1)


@pytest.mark.parametrize('number', range(4))
def test_parameters_are_those_that_training_published(workdir, number):
  found, expected = dipaco_jax.load(workdir, number).params, made_run.parameters(workdir, number)
  assert list(found) == list(expected)
  for name, x in expected.items():
    np.testing.assert_array_equal(found[name], x)


def bytes_of(path: trained_run.Path) -> int:
  return sum(x.nbytes for x in path.params.values())


def test_reads_a_path_s_bytes_and_hardly_more(tmp_path):
  workdir = made_run.write(tmp_path, made_run.settings(model={'width': 128, 'mlp_dim': 512}))
  path = dipaco_jax.load(workdir, (0, 1))
  assert path.run.files.storage.bytes_in <= 1.05 * bytes_of(path)
  before = path.run.files.storage.bytes_in
  other = path.run.path((1, 1), 2)
  assert path.run.files.storage.bytes_in - before < bytes_of(path) / 2  # the shared level and the low one are in memory
  assert other.params['embed/tokens'] is path.params['embed/tokens']


def test_paths_differ_from_the_lowest_block_that_they_do_not_share(workdir):
  run = trained_run.TrainedRun(workdir)
  paths = [run.path(number, 2) for number in range(4)]  # (0, 0), (0, 1), (1, 0), (1, 1)
  assert [paths[0].first_difference(other.marks) for other in paths] == [3, 1, 0, 0]
  assert paths[0].first_difference(run.path(0, 1).marks) == 0  # the embedding of another version


@pytest.mark.slow
def test_a_path_from_a_bucket_is_that_of_the_folder(workdir, monkeypatch):
  with object_server.s3_server() as endpoint:
    for name, value in object_server.environment(endpoint).items():
      monkeypatch.setenv(name, value)
    for scheme in ('s3', 'gs'):
      url = f'{scheme}://{object_server.BUCKET}/{scheme}/run'
      place = object_store.open_storage(url)
      for file in pathlib.Path(workdir).rglob('*'):
        if file.is_file():
          place.write(str(file.relative_to(workdir)), file.read_bytes())
      found = dipaco_jax.load(url, 2).params
      for name, x in made_run.parameters(workdir, 2).items():
        np.testing.assert_array_equal(found[name], x)


def test_what_is_not_there_is_an_error_that_says_what_there_is(workdir, tmp_path):
  with pytest.raises(ValueError, match='there is no run'):
    dipaco_jax.load(str(tmp_path / 'none'))
  with pytest.raises(ValueError, match='there is no version 7'):
    dipaco_jax.load(workdir, 0, 7)
  with pytest.raises(ValueError, match=r'there is no version 7; there are 1, 2$'):
    dipaco_jax.load(workdir, 0, 7)
  half = tmp_path / 'half'
  shutil.copytree(workdir, half)
  (half / 'modules' / '.3.old').mkdir()  # as a kill leaves one
  (half / 'modules' / '.3.old' / 'x').touch()
  (half / 'modules' / '1.index.json').touch()  # as a bucket has them
  with pytest.raises(ValueError, match=r'there is no version 7; there are 1, 2$'):
    dipaco_jax.load(str(half), 0, 7)
  for path in (4, -1, (0,), (0, 2), 'x', ('0', 'x'), (0.5, 0)):
    with pytest.raises(ValueError, match='the paths are 0 to 3, of a grid of 2 x 2'):
      dipaco_jax.load(workdir, path)
  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy)
  (copy / 'paths' / 'best.json').unlink()
  with pytest.raises(ValueError, match='no path is published yet'):
    dipaco_jax.load(str(copy))
  (copy / 'routing' / '0' / 'router.safetensors').unlink()
  with pytest.raises(ValueError, match='there is no router yet: let the run train on'):
    dipaco_jax.load_router(str(copy))


def test_what_is_loaded_shows_itself_in_a_line(workdir):
  path, router = dipaco_jax.load(workdir, 3), dipaco_jax.load_router(workdir)
  size = sum(x.size for x in path.params.values())
  assert repr(path) == f'<path 3 of {workdir}, version 1: {size:,} parameters>'
  assert repr(path.run) == f'<run {workdir}: 4 paths>' and repr(router) == '<router to 4 paths, by the first 8 tokens>'
  assert len(repr(path.modules)) < 2000 and 'final_norm/scale' in repr(path.modules)


def test_a_run_may_continue_while_it_is_read(workdir, tmp_path):
  """Versions come and go; before the last round of sharding an earlier router is the router."""
  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy)
  config = json.loads((copy / 'config.json').read_text())
  config['routing'] |= {'method': 'discriminative', 'router_fraction': 0.2, 'rounds': 1, 'phases_per_round': 1}
  publishing.write_json(copy / 'config.json', config)
  run = trained_run.TrainedRun(str(copy))
  run.path(0)
  assert 0 <= run.router.path('The lazy dog') < 4
  (copy / 'modules' / '2').rename(copy / 'modules' / '3')
  (copy / 'paths' / 'best.json').write_text('{"version": [3, 3, 3, 3]}')
  assert run.path(1).version == 3


def test_numbers_may_be_of_numpy_and_tokens_only_of_the_vocabulary(workdir):
  path = dipaco_jax.load(workdir, np.int64(2))
  assert path.number == 2
  for ids in ([3, 330], [-1]):
    with pytest.raises(ValueError, match='token ids should be from 0 to 329'):
      path.logits(ids)


def test_damaged_modules_are_noticed(workdir, tmp_path):
  shutil.copytree(workdir, tmp_path / 'copy')
  file = tmp_path / 'copy' / 'modules' / '2' / 'low' / '0.safetensors'
  data = bytearray(file.read_bytes())
  data[-3] ^= 1
  file.write_bytes(data)
  with pytest.raises(OSError, match=r'low/0.safetensors, made by the stage train, is damaged'):
    dipaco_jax.load(str(tmp_path / 'copy'), 0)
  assert json.loads((tmp_path / 'copy' / 'paths' / 'best.json').read_text())['version'] == [2, 2, 2, 1]


@pytest.mark.parametrize(
  'change',
  [
    lambda arrays: arrays.pop('embed/tokens'),
    lambda arrays: arrays.update({'embed/tokens': np.zeros((), np.float32)}),
    lambda arrays: arrays.update({'embed/tokens': arrays['embed/tokens'][:, :-1].copy()}),
    lambda arrays: arrays.update({'embed/tokens': arrays['embed/tokens'][:0].copy()}),
    lambda arrays: arrays.update({'block_x/y': np.zeros(3, np.float32)}),
  ],
)
def test_modules_that_are_not_of_the_model_are_rejected(change, workdir, tmp_path):
  """Also where whoever made the workdir has written their digests."""
  shutil.copytree(workdir, copy := tmp_path / 'copy')
  for file in copy.glob('modules/2/**/*.safetensors'):
    arrays = safetensors.numpy.load_file(file)
    if 'embed/tokens' in arrays:
      change(arrays)
      safetensors.numpy.save_file(arrays, file)
      digest = hashlib.sha256(file.read_bytes()).hexdigest()
      name = str(file.relative_to(copy / 'modules' / '2'))
  index = copy / 'modules' / '2' / 'index-0.json'
  index.write_text(json.dumps(json.loads(index.read_text()) | {name: digest}))
  (index.parent / 'SHA256SUMS').unlink(missing_ok=True)
  words = 'modules of path 0, version 2: .* by config.model: these are not the files of this run'
  with pytest.raises(InputError, match=words):
    dipaco_jax.load(str(copy), 0)
  with pytest.raises(InputError, match=words):
    export.export(trained_run.TrainedRun(str(copy)), 0, 2, tmp_path / 'out', 'float32')


def test_a_tokenizer_that_is_not_of_the_model_is_rejected(workdir, tmp_path):
  shutil.copytree(workdir, copy := tmp_path / 'copy')
  publishing.write_sealed(copy / 'tokenizer.model', sentencepiece_tokenizer.train(made_run.TEXT * 20, 320))
  run, rows = trained_run.TrainedRun(str(copy)), 'embed/tokens has 330 rows, and the tokenizer of this run 320 tokens'
  for use in (
    lambda: run.path(0),
    lambda: run.router,
    lambda: excerpts.of_text(run, 'The lazy dog', 8, 0, None),
    lambda: export.export(run, 0, 2, tmp_path / 'out', 'float32'),
    lambda: export.export_base(run, tmp_path / 'out', 'float32'),
  ):
    with pytest.raises(InputError, match=f'(modules of path 0, version 2|base/params.safetensors): {rows}'):
      use()


@pytest.mark.parametrize('number', [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_named(number, workdir, tmp_path, caplog):
  shutil.copytree(workdir, copy := tmp_path / 'copy')
  name = 'low/0.safetensors'
  arrays = safetensors.numpy.load_file(copy / 'modules' / '2' / name)
  arrays['block_0/mlp/up'][1, 2] = number
  safetensors.numpy.save_file(arrays, copy / 'modules' / '2' / name)
  index = copy / 'modules' / '2' / 'index-0.json'
  digest = hashlib.sha256((copy / 'modules' / '2' / name).read_bytes()).hexdigest()
  index.write_text(json.dumps(json.loads(index.read_text()) | {name: digest}))
  (index.parent / 'SHA256SUMS').unlink(missing_ok=True)
  run, words = trained_run.TrainedRun(str(copy)), f'modules/2/{name}: block_0/mlp/up holds NaN or infinities'
  assert run.path(0).version == 2 and words in caplog.text
  with pytest.raises(InputError, match=words):
    engine.Engine(run).generate([request.Request((1, 2), 1, 0)])
  with pytest.raises(InputError, match=words):
    export.export(run, 0, 2, tmp_path / 'out', 'float32')
  run.path(2, 1).check_finite()


@pytest.mark.parametrize('versions', ['2222', [2, 2, 2], [2, 2, 2, -1], [2, 2, 2, '1'], [2, 2, 2, 10**9]])
def test_versions_that_are_none_are_damage(versions, workdir, tmp_path):
  shutil.copytree(workdir, copy := tmp_path / 'copy')
  publishing.write_json(copy / 'paths' / 'best.json', {'version': versions})
  with pytest.raises(seals.Damaged, match=r'best\.json'):
    _ = trained_run.TrainedRun(str(copy)).best_versions


@pytest.mark.parametrize('result', [[], {'init': 3}, {'init': {'max_positions': 'many'}}])
def test_a_forged_record_of_the_base_is_damage(result, workdir, tmp_path):
  shutil.copytree(workdir, copy := tmp_path / 'copy')
  publishing.write_json(copy / 'stages' / 'pretrain.json', {'result': result})
  with pytest.raises(seals.Damaged, match=r'pretrain\.json, made by the stage pretrain, is damaged'):
    _ = trained_run.TrainedRun(str(copy)).max_positions


def test_files_whose_text_is_copied_may_not_be_links_out_of_the_run(workdir, tmp_path):
  shutil.copytree(workdir, copy := tmp_path / 'copy')
  (tmp_path / 'secret').write_text('a key')
  (tmp_path / 'link').symlink_to(copy)
  (copy / 'command.txt').write_text('dipaco train')
  assert trained_run.TrainedRun(str(tmp_path / 'link')).tokenizer and stage_records.read_command(tmp_path / 'link')
  for name, use in {
    'chat_template.jinja': lambda: trained_run.TrainedRun(str(copy)).tokenizer,
    'command.txt': lambda: stage_records.read_command(copy),
    'refused.txt': lambda: stage_records.read_refusal(copy),
  }.items():
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(tmp_path / 'secret')
    with pytest.raises(InputError, match=rf'{name} is a symbolic link to a file outside of the run: put a copy'):
      use()


def test_a_forged_report_is_named(workdir, tmp_path):
  shutil.copytree(workdir, copy := tmp_path / 'copy')
  publishing.write_json(copy / 'report.json', {'phases': 'many'})
  with pytest.raises(seals.Damaged, match=r'^report\.json or stages/pretrain\.json holds what no run writes there'):
    export.export(trained_run.TrainedRun(str(copy)), 0, 2, tmp_path / 'out', 'float32')


def test_a_version_that_is_removed_while_it_is_read_gives_way_to_the_next(workdir, tmp_path, monkeypatch):
  shutil.copytree(workdir, tmp_path / 'copy')
  folder, before = tmp_path / 'copy' / 'modules', json.loads((tmp_path / 'copy' / 'paths' / 'best.json').read_text())
  read = run_files.RunFiles.read_arrays

  def read_late(self, name, *sha256):
    if name.startswith('modules/2/') and (folder / '2').exists():
      (folder / '2').rename(folder / '3')
      publishing.write_json(tmp_path / 'copy' / 'paths' / 'best.json', before | {'version': [3] * 4})
    return read(self, name, *sha256)

  publishing.write_json(tmp_path / 'copy' / 'paths' / 'best.json', before | {'version': [2] * 4})
  monkeypatch.setattr(run_files.RunFiles, 'read_arrays', read_late)
  assert dipaco_jax.load(str(tmp_path / 'copy'), 0).version == 3
  shutil.rmtree(folder / '3')
  with pytest.raises(dipaco_jax.InputError, match='there is no version 3'):
    dipaco_jax.load(str(tmp_path / 'copy'), 1)
