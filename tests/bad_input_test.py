"""What a new user gets wrong: one line that names the fix, status 2, before any work, and nothing is left behind."""

import contextlib
import errno
import logging
import pathlib
import sys

import jax
import pytest
from absl import flags

from dipaco_jax import checks, command, main, tokenizing
from dipaco_jax.settings import Settings

ROOT = pathlib.Path(__file__).parent.parent
TINY, TEXT = f'--config={ROOT}/configs/tiny.py', f'--config={ROOT}/configs/text.py'

# ml_collections loads config files so, below Python 3.12.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:DeprecationWarning')


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
  """`run(option, ...)` runs the command in this process; returns (status, stderr)."""
  monkeypatch.setattr(logging.root, 'handlers', [])  # the command sets its own
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)  # of config files, beside them
  monkeypatch.chdir(tmp_path)

  def call(*options: str) -> tuple[int, str]:
    argv = ['main', *options]
    monkeypatch.setattr(sys, 'argv', argv)  # where ml_collections looks for overrides
    sys.modules.pop('config_config', None)  # the config before, which it would load anew into
    with pytest.raises(SystemExit) as stop:
      main.main(argv)
    return stop.value.code, capsys.readouterr().err

  yield call
  flags.FLAGS.unparse_flags()
  for name in list(flags.FLAGS):
    if name.startswith('config.'):
      delattr(flags.FLAGS, name)
  for name in ('config', 'workdir', 'name'):
    flags.FLAGS[name].unparse()


def refused(run, *options: str, workdir: str = 'new') -> str:
  """What is said of the options; fails where that is more than a line, or anything was written."""
  before = sorted(pathlib.Path().rglob('*'))
  status, said = run(*options, f'--workdir={workdir}')
  *waiting, said = said.splitlines(keepends=True)
  assert all(line.startswith(('loading JAX', 'looking ')) for line in waiting), waiting
  assert status == 2 and said.startswith('dipaco_jax: ') and said.count('\n') == 1 and len(said) < 400, said
  assert sorted(pathlib.Path().rglob('*')) == before
  return said


@pytest.mark.parametrize(
  'options, words',
  [
    ([], '--config is missing: for instance --config=configs/tiny.py'),
    ([TINY, '--wrkdir=x'], "Unknown command line flag 'wrkdir'. Did you mean: workdir ?"),
    ([TINY, 'train'], "'train' is not an option: write --name=value"),
    (['--config=nowhere.py'], '--config=nowhere.py: there is no such file'),
    (['--config='], '--config=: there is no such file'),
    (['--config=nowhere.py', '--config.seed=1'], '--config=nowhere.py: there is no such file'),
    ([f'{TINY}:dens'], "variant 'dens': there are 'grid' and 'dense'"),
    ([TINY, '--config.train.phaes=3'], '--config.train.phaes: there is no such field; the nearest is --config.train'),
    ([TINY, '--config.trian.phases=3'], 'the nearest is --config.train.phases'),
    ([TINY, '--config.grid.c=3'], '--config.grid.c: this config has no such axis'),
    ([TINY, '--config.train.phases=some'], '--config.train.phases=some: invalid literal for int()'),
    ([TINY, '--config.train.phases=-1'], 'config.train.phases=-1 should be above 0'),
    ([TINY, '--config.routing.method=means'], "config.routing.method='means': choose one of kmeans"),
    ([TEXT], 'config.data.train is empty: name the text'),
    ([TINY, "--config.levels=(('all','.*',('z',)),)"], "level 'all' varies over ['z'], but the grid has ['a', 'b']"),
    ([TINY, "--config.levels=(('all','block',()),)"], "parameter 'embed/tokens' matches no level; add a pattern"),
    ([TINY, "--config.levels=(('all','.*',()),('x','nothing',()))"], "level 'x': 'nothing' matches no parameter"),
    ([TINY, '--config.mesh.data=3'], 'is not divided by config.mesh.data=3: change one of them'),
    ([TINY, '--config.mesh.data=9'], 'config.mesh.data=9 is more than the 8 devices'),
    ([TINY, '--config.grid.a=9000', '--config.data.max_documents=60'], 'use a smaller grid or batch, or more text'),
    ([TINY, '--config.pretrain.init=no'], 'config.pretrain.init=no: config.json: No such file'),
    ([TINY, '--config.tokenizer.model_file=no.model'], "tokenizer 'no.model': No such file"),
    ([TEXT, '--config.data.train=no/*.txt'], "'no/*.txt' matches no file: mend config.data.train"),
  ],
  ids=lambda x: x if isinstance(x, str) else None,
)
def test_options(run, options, words):
  assert jax.device_count() == 8
  assert words in refused(run, *options)


def test_no_workdir(run):
  assert run(TINY) == (2, 'dipaco_jax: --workdir is missing: name a directory to keep the run in\n')


@pytest.mark.parametrize('option', ['workdir=\x1b[2Jrun', 'workdir=half\udcff', 'name=worker\n0', 'name=' + 'x' * 201])
def test_names_that_cannot_be_shown(run, option):
  status, said = run(TINY, '--workdir=x', f'--{option}')
  assert status == 2 and 'a name without control characters' in said and '\x1b' not in said and said.count('\n') == 1


def test_a_bucket_is_no_workdir_of_one_job(run, tmp_path):
  status, words = run(TINY, '--workdir=gs://bucket/run')
  assert status == 2 and 'mount the bucket' in words and not (tmp_path / 'gs:').exists()


START = 'from ml_collections import ConfigDict\nfrom dipaco_jax import settings\n'
DEFAULTS = START + 'def get_config():\n  c = ConfigDict(settings.Settings().to_dict())\n'


@pytest.mark.parametrize(
  'source, words',
  [
    ('def get_config(:\n', '--config=c.py, line 1: invalid syntax'),
    ('import nothing_of_that_name\n', "c.py, line 1: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ('x = 1\n', "c.py: AttributeError: module 'config_config' has no attribute 'get_config'"),
    ('def get_config():\n  return 3\n', 'get_config() should return a ConfigDict'),
    (DEFAULTS + '  return d\n', "c.py, line 5: NameError: name 'd' is not defined"),
    (DEFAULTS + '  c.seed = "x"\n  return c\n', 'c.py, line 5: TypeError: Could not override'),
    (DEFAULTS + '  c.train.phaes = 3\n  return c\n', 'config.train.phaes: there is no such field'),
    (START + 'def get_config():\n  return ConfigDict({"train": 3})\n', 'config.train=3 should be a dict of fields'),
    (START + 'def get_config():\n  return ConfigDict({"seed": "x"})\n', "config.seed='x' should be of type int"),
  ],
)
def test_config_files(run, tmp_path, source, words):
  (tmp_path / 'c.py').write_text(source)
  assert words in refused(run, '--config=c.py')


@pytest.mark.parametrize(
  'content, words',
  [
    (b'', 'there is no text in it: fill it, or leave out this file'),
    (b'abc\0def', 'byte 3 is NUL, so this is no plain text'),
    ('caf\u00e9'.encode('latin1'), 'not UTF-8 at byte 3: convert it'),
    (b'A short text.', 'no document is left for validation'),
  ],
)
def test_text_files(run, tmp_path, content, words):
  (tmp_path / 'mine.txt').write_bytes(content)
  assert words in refused(run, TEXT, '--config.data.train=*.txt')


@pytest.mark.parametrize('config', ['{"a": ', '[1]', '{"architectures": ["Llama"]}'])
def test_a_workdir_of_something_else(run, tmp_path, config):
  (tmp_path / 'old').mkdir()
  (tmp_path / 'old' / 'lock').touch()
  (tmp_path / 'old' / 'config.json').write_text(config)
  said = refused(run, TINY, workdir='old')
  assert '--workdir=old: its config.json is not that of a run' in said and 'another' in said
  assert (tmp_path / 'old' / 'config.json').read_text() == config


def test_a_workdir_that_cannot_be(run, tmp_path):
  (tmp_path / 'file').touch()
  for workdir in ('file', 'file/below', '/proc/nothing', '/proc/self'):
    assert 'name a directory that can be made and written' in refused(run, TINY, workdir=workdir)


def test_what_proves_wrong_in_the_first_stage_leaves_nothing(tmp_path):
  for workdir in (tmp_path / 'a' / 'new', tmp_path / 'empty'):
    (tmp_path / 'empty').mkdir(exist_ok=True)
    with pytest.raises(ValueError, match='use a smaller grid'), main.kept(workdir):
      (workdir / 'tokenizer.model').touch()
      tokenizing.check_rows(Settings(), 1000)
    assert not workdir.exists()


def test_what_was_there_before_stays(tmp_path):
  (tmp_path / 'mine').touch()
  with pytest.raises(ValueError), main.kept(tmp_path):
    raise ValueError
  assert (tmp_path / 'mine').exists()


def test_whose_error_it_is():
  def caught(call, *args):
    with pytest.raises(Exception) as info:
      call(*args)
    return info.value

  assert checks.is_input_error(caught(tokenizing.check_rows, Settings(), 1000))
  assert not checks.is_input_error(caught(jax.numpy.zeros, -1))
  with contextlib.suppress(ValueError):
    assert not checks.is_input_error(caught(main.pathlib.Path, 3))


def test_a_full_disk_by_whatever_name():
  full, wrapped = OSError(errno.ENOSPC, 'No space left on device'), RuntimeError('cannot save')
  wrapped.__cause__ = full
  assert all(map(command.disk_is_full, (full, wrapped, ValueError('RESOURCE_EXHAUSTED: x: No space left on device'))))
  assert not command.disk_is_full(OSError(errno.EACCES, 'Permission denied'))
