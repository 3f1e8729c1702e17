"""Config files and overrides on the command line: values that are accepted, and errors about others."""

import pathlib
import sys

import pytest
from repository import ROOT

from dipaco_jax.command_line import config_file
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError

START = """
from ml_collections import ConfigDict
from dipaco_jax import settings
def get_config():
  c = ConfigDict(settings.Settings().to_dict())
  c.grid = ConfigDict({'a': 2, 'b': 2})
"""


def read(*arguments: str, config: str = 'tiny') -> settings.Settings:
  rest, overrides = config_file.split(['main', *arguments])
  assert rest == ['main']
  return settings.from_dict(config_file.read(config, overrides))


@pytest.fixture
def write(tmp_path, monkeypatch):
  """`write(lines)` makes c.py, whose get_config() they are the end of."""
  monkeypatch.chdir(tmp_path)
  return lambda lines: pathlib.Path('c.py').write_text(START + lines)


@pytest.mark.parametrize(
  'arguments, name, value',
  [
    (['--config.train.phases=8'], 'phases', 8),
    (['--config.train.phases=1e3'], 'phases', 1000),
    (['-config.train.phases', '1_000'], 'phases', 1000),
    (['--config.train.phases=8', '--config.train.phases=9'], 'phases', 9),
    (['--config.train.offload'], 'offload', True),
    (['--config.train.offload', '--config.train.phases=8'], 'offload', True),
    (['--noconfig.train.early_stopping'], 'early_stopping', False),
    (['--config.train.early_stopping=no'], 'early_stopping', False),
    (['--config.train.schedule=((0, (1,)), (2, (0, 3)))'], 'schedule', ((0, (1,)), (2, (0, 3)))),
  ],
)
def test_overrides(arguments, name, value):
  found = getattr(read(*arguments).train, name)
  assert found == value and type(found) is type(value)


def test_text_that_the_command_line_names_is_read_whatever_the_config():
  assert read().data.source == 'stdlib'
  for config in ('tiny', 'tiny:dense', 'text'):
    data = read('--config.data.train=notes/**/*.md', config=config).data
    assert (data.source, data.train) == ('files', ('notes/**/*.md',))
  assert read('--config.data.name=c4/en:3.0.1', '--config.data.data_dir=d').data.source == 'tfds'
  with pytest.raises(InputError, match="source='stdlib' does not read it"):
    read('--config.data.source=stdlib', '--config.data.train=notes/*.md')


def test_a_given_tokenizer_leaves_nothing_to_train():
  for option in ('vocab_size=300', 'sample_bytes=3000', 'kind=bytes'):
    with pytest.raises(InputError, match=r'config.tokenizer.\w+ is for a tokenizer that is trained, and .*: leave one'):
      read('--config.tokenizer.model_file=x.model', f'--config.tokenizer.{option}')
  assert read('--config.tokenizer.model_file=x.model').tokenizer.model_file == 'x.model'


def test_overrides_of_other_kinds(write):
  assert read('--config.inner.learning_rate=1e-4').inner.learning_rate == 1e-4
  assert read('--config.inner.learning_rate=1').inner.learning_rate == 1.0
  assert read('--config.evaluate.reroute_every=64').evaluate.reroute_every == (64,)
  assert read('--config.evaluate.reroute_every=64,32').evaluate.reroute_every == (64, 32)
  assert read('--config.grid.a=4').grid == (('a', 4), ('b', 2))
  assert read("--config.grid={'a': 3, 'b': 1, 'worker': 2}").grid == (('a', 3), ('b', 1), ('worker', 2))
  assert read('--config.metrics.run=').metrics.run == ''
  write('  return c\n')
  assert read('--config.seed=3', config='c.py').seed == 3


@pytest.mark.parametrize('words', [['x y/*.txt,b.txt'], ['x y/*.txt', 'b.txt'], ["('x y/*.txt', 'b.txt')"]])
def test_globs_together_or_one_by_one(words):
  data = read('--config.data.source=files', *(f'--config.data.train={word}' for word in words)).data
  assert data.train == ('x y/*.txt', 'b.txt')


@pytest.mark.parametrize(
  'word, sinks',
  [
    ('wandb,tensorboard', ('wandb', 'tensorboard')),
    ("('wandb', 'my.sink:make')", ('wandb', 'my.sink:make')),
    ('mlflow', ('mlflow',)),
    ('', ()),
  ],
)
def test_sinks_of_metrics(word, sinks):
  assert read(f'--config.metrics.sinks={word}').metrics.sinks == sinks


def test_the_example_of_a_tuple_is_its_own():
  with pytest.raises(InputError, match=r"as --config\.metrics\.sinks='tensorboard,wandb'"):
    read('--config.metrics.sinks')


def test_a_source_may_have_a_dot_in_its_name():
  data = read('--config.data.source=files', "--config.data.train={'books.v2': 'b/*.txt'}").data
  assert data.train == (('books.v2', ('b/*.txt',), 1.0),)


def test_fields_that_follow_others_follow_overrides(write):
  write("  c.evaluate.seq_len = c.model.get_oneway_ref('seq_len') * 2\n  return c\n")
  assert read('--config.model.seq_len=96', config='c.py').evaluate.seq_len == 192


def test_a_config_may_import_a_module_called_config(tmp_path, write, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'config', raising=False)
  pathlib.Path('config.py').write_text('PHASES = 7')
  write('  import config\n  c.train.phases = config.PHASES\n  return c')
  assert read(config='c.py').train.phases == 7
  pathlib.Path('d.py').write_text('import config\nPHASES = config.PHASES\n' + pathlib.Path('c.py').read_text())
  assert read(config='d.py').train.phases == 7


def test_a_config_that_comes_with_the_package(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert set(config_file.shipped()) == {file.stem for file in (ROOT / 'configs').glob('*.py')}
  assert read(config='tiny') == read(config=str(ROOT / 'configs' / 'tiny.py'))
  assert read(config='tiny:dense').grid == ()
  (tmp_path / 'tiny').mkdir()
  assert read(config='tiny').grid  # a folder is no config
  (tmp_path / 'text').write_text(START + '  c.seed = 77\n  return c\n')
  assert read(config='text').seed == 77  # a file goes first


ONE, ALL = 'the size of one, as --config.grid.a=4', "\"{'a': 4, 'b': 4}\""


@pytest.mark.parametrize(
  'argument, words',
  [
    ('--config.train.phases=2.5', '--config.train.phases=2.5 should be a whole number'),
    ('--config.train.phases=1e400', '--config.train.phases=1e400 should be a whole number'),
    ('--config.train.phases=nan', 'should be a whole number'),
    ('--config.train.phases=', '--config.train.phases= should be a whole number'),
    ('--config.train.phases', '--config.train.phases: give a value, such as --config.train.phases=427'),
    ('--noconfig.train.phases', '--config.train.phases: give a value'),
    ('--config.inner.learning_rate=0,001', '--config.inner.learning_rate=0,001 should be a number'),
    ('--config.train.offload=maybe', '--config.train.offload=maybe should be True or False'),
    ('--config.train=4', '--config.train is a section: name a field of it, as --config.train.phases=427'),
    ('--config.phases=4', '--config.phases: there is no such field; the nearest is --config.train.phases'),
    ('--config.batch_size=4', 'is --config.pretrain.batch_size or --config.train.batch_size or --'),
    ('--config.=4', '--config.: there is no such field'),
    ('--config.grid=(4,4)', f'give all axes, by the names that config.levels has, as --config.grid={ALL}, or {ONE}'),
    ('--config.grid=4x4', ONE),
    ('--config.grid={a:4}', ONE),
    ('--config.grid={1:4}', ONE),
    ("--config.grid={'a':0}", 'config.grid.a=0 should be above 0'),
    ("--config.grid={'a':'x'}", "config.grid.a='x' should be a whole number"),
    ('--config.grid.a=two', '--config.grid.a=two should be a whole number'),
    ('--config.grid.c=3', "are a, b; to have others, give all, as --config.grid=\"{'a': 2, 'b': 2, 'c': 3}\""),
    ('--config.levels=all', "--config.levels=all: write it as --config.levels=\"(('all', '.*', ()),)\""),
    ("--config.levels=('all','.*',())", "config.levels[0]='all' should be a tuple: config.levels is"),
    ('--config.evaluate.reroute_every=64,x', 'write it as --config.evaluate.reroute_every="(64, 32)"'),
    ('--config.train.schedule=0', 'config.train.schedule is written as ((0, (0, 1)), (8, (2, 3)))'),
  ],
)
def test_overrides_that_cannot_be(argument, words):
  with pytest.raises(ValueError) as info:
    read(argument)
  assert words in str(info.value) and '\n' not in str(info.value)


@pytest.mark.parametrize(
  'lines, words',
  [
    ('', '--config=c.py: get_config() returns nothing: end it with `return c`'),
    ('  return [c]\n', '--config=c.py: get_config() returns list; it should return ConfigDict('),
    ('  c.data.train = "x.txt"\n  return c\n', 'line 7: train=x.txt should be a tuple: config.data.train is'),
    ('  c.train.update(phases=1e3)\n  return c\n', 'line 7: phases=1000.0 should be a whole number: write 1000'),
    ('  c.train.phases = 2.5\n  return c\n', 'line 7: phases=2.5 should be a whole number'),
    ('  c.inner.learning_rate = "x"\n  return c\n', 'line 7: learning_rate=x should be a number'),
    ('  c.train = 3\n  return c\n', 'line 7: train=3 should be'),
    ('  c.trian.phases = 3\n  return c\n', "line 7: 'trian': there is no such field; the nearest is 'train'"),
    ('  print(c.train.phaes)\n  return c\n', "line 7: 'phaes': there is no such field; the nearest is 'phases'"),
    ('  raise KeyError("x")\n', "line 7: KeyError: 'x'"),
    ('  return c\nget_config = 3\n', 'a config is a Python file with a function get_config()'),
  ],
)
def test_files_that_cannot_be(write, lines, words):
  write(lines)
  with pytest.raises(ValueError) as info:
    config_file.read('c.py')
  assert str(info.value).startswith('--config=c.py') and words in str(info.value) and '\n' not in str(info.value)


@pytest.mark.parametrize(
  'named, words',
  [
    ('c.py:big', 'get_config(): it has no variants: leave out :big'),
    ('tiny.py', '--config=tiny.py: there is no such file; --config=tiny is included in dipaco_jax'),
    ('configs/tiny.py', '--config=configs/tiny.py: there is no such file; --config=tiny is included'),
    ('.', '--config=. is a folder; name a file, or one of c4_1300m_dense, '),
    ('tiny:big', ": variant 'big': there are 'grid' and 'dense'"),
    ('c.yaml', '--config=c.yaml: a config is a Python file with a function get_config()'),
    ('c.txt', '--config=c.txt, line 1: '),
  ],
)
def test_names_that_cannot_be(write, named, words):
  write('  return c\n')
  pathlib.Path('c.yaml').write_text('seed: 3\n')
  pathlib.Path('c.txt').write_text('Once upon a time\n')
  with pytest.raises(ValueError) as info:
    config_file.read(named)
  assert words in str(info.value) and '\n' not in str(info.value)


def test_a_variant_that_is_needed(tmp_path):
  (tmp_path / 'c.py').write_text('def get_config(size):\n  return {}\n')
  with pytest.raises(ValueError, match=r'get_config\(size\): name a variant, as --config=FILE:VARIANT'):
    config_file.read(f'{tmp_path}/c.py')
  assert config_file.read(f'{tmp_path}/c.py:x') == {}
