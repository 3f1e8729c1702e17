"""What a new user gets wrong: one line that names the fix, status 2, before any work, and nothing is left behind."""

import functools
import json
import logging
import pathlib
import socket
import subprocess
import tempfile

import jax
import object_server
import pytest
import slow
from absl import flags
from backends import small_disk
from repository import ROOT

from dipaco_jax import main
from dipaco_jax.command_line import bucket_copy, command, from_python
from dipaco_jax.config import settings
from dipaco_jax.islands import roles

TINY, TEXT = f'--config={ROOT}/configs/tiny.py', f'--config={ROOT}/configs/text.py'


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
  """`run(option, ...)` runs the command in this process; returns (status, stderr)."""
  monkeypatch.setattr(logging.root, 'handlers', [])  # the command sets its own
  monkeypatch.chdir(tmp_path)

  def call(*options: str) -> tuple[int, str]:
    argv = ['main', *options]
    flags.FLAGS.unparse_flags()
    with pytest.raises(SystemExit) as stop:
      main.main(argv)
    return stop.value.code, capsys.readouterr().err

  yield call
  flags.FLAGS.unparse_flags()
  for name in main.OPTIONS:
    flags.FLAGS[name].unparse()


def refused(run, *options: str, workdir: str = 'new') -> str:
  """What is said of the options; fails where that is more than a line, or anything was written."""
  before = sorted(pathlib.Path().rglob('*'))
  status, said = run(*options, f'--workdir={workdir}')
  *waiting, said = said.splitlines(keepends=True)
  assert all(line.startswith(('loading JAX', 'devices: ', 'looking ')) for line in waiting), waiting
  assert status == 2 and said.startswith('dipaco_jax: ') and said.count('\n') == 1 and len(said) < 400, said
  assert sorted(pathlib.Path().rglob('*')) == before
  return said


@pytest.mark.parametrize(
  'options, words',
  [
    ([], '--config is missing: a file, or one of c4_1300m_dense, '),
    ([TINY, '--wrkdir=x'], '--wrkdir: there is no such option; did you mean --workdir?'),
    ([TINY, 'train'], "'train' is not an option: write --name=value"),
    (['tiny'], "'tiny' is not an option: write --name=value"),
    ([TINY, '--config.data.train', 'a.txt', 'b.txt'], "'b.txt' is not an option: write --name=value, with patterns"),
    ([TINY, '--epochs=3'], '--epochs: there is no such option; set --config.train.phases or --config.'),
    ([TINY, '--lr=0.1'], '--lr: there is no such option; use --config.inner.learning_rate or --'),
    ([TINY, '--top_n=2'], '--top_n: there is no such option; use --config.routing.top_n'),
    ([TINY, '--resume'], '--resume: there is no such option; run the same command again'),
    ([TINY, '--gpus=2'], '--gpus: there is no such option; all devices are used'),
    ([TINY, '--nothing'], '--nothing: there is no such option; --help lists all options'),
    ([TINY, '--lease_s=abc'], '--lease_s=abc should be a number'),
    ([TINY, '--lease_s=-1', '--role=worker'], '--lease_s=-1.0 should be above 0'),
    ([TINY, '--process_id=x'], '--process_id=x should be a whole number'),
    ([TINY, '--reuse=nothing'], '--reuse=nothing: there is no run (no config.json); name the directory of one'),
    ([TINY, '--topology=v5e:2x2'], '--topology is for runs with --compile_only: add that, or leave it out'),
    ([TINY, '--registry=sqlite:////x'], '--registry is for runs with --role'),
    ([TINY, '--profile=5'], '--profile=5: write START:STEPS, a global step from 0 and how many, as --profile=100:8'),
    ([TINY, '--profile=216:1'], '--profile=216:1: the steps of this run are 0 to 215, those of the base model first'),
    ([TINY, '--profile=1:1', '--role=outer'], '--profile is for processes that train: leave it out with --role=outer'),
    ([TINY, '--metrics_port=99999'], '--metrics_port=99999 should be from 0 to 65535; 0 means any free port'),
    ([TINY, '--coordinator=h:1'], '--coordinator is for runs with --distributed'),
    ([TINY, '--distributed', '--num_processes=2'], '--distributed needs all of --coordinator=HOST:PORT, '),
    ([TINY, '--distributed', '--coordinator=h', '--num_processes=2', '--process_id=0'], '--distributed needs all of'),
    ([TINY, '--distributed', '--coordinator=h:1', '--num_processes=2', '--process_id=2'], 'should be from 0 to 1'),
    (
      [TINY, '--role=worker', '--registry=foo'],
      'the registry cannot be used: give sqlite:////ABSOLUTE/FILE.db or postgresql://USER:PASSWORD@HOST/',
    ),
    ([TINY, '--role=outer', '--share=5/4'], '--share=5/4: write i/n, i from 0 to n - 1'),
    ([TINY, '--role=trainer'], '--role=trainer: there are worker, outer, evaluator, monitor'),
    ([TINY, '--role=worker', '--config.outer.lost=0.5'], 'config.outer.lost=0.5 is for runs in one process'),
    ([TINY, '--replay=facts.json'], '--replay=facts.json cannot be read: No such file or directory'),
    ([TINY, '--replay=sqlite:////nowhere.db'], '--replay=sqlite:////nowhere.db cannot be read: No such file or dir'),
    ([TINY, '--replay=facts.json', '--distributed'], '--distributed is for other runs than replays: leave it out'),
    ([TINY, '--config.train.phase_s=60'], 'config.train.phase_s=60.0 is for islands, whose workers end a phase at'),
    ([TINY, '--config.outer.quorum=0.75'], 'config.outer.quorum=0.75 is for islands, whose paths are done at'),
    ([TINY, '--config.outer.floor=0.5'], 'config.outer.floor=0.5 is for islands, whose evaluator judges paths'),
    (
      [TINY, '--config.outer.row_weights=True', '--config.outer.rescale=True'],
      'config.outer.row_weights requires config.outer.rescale=False',
    ),
    ([TINY, '--compile_only', '--topology=v5e:3x5'], '--topology=v5e:3x5 is not known: write v5e:SHAPE or v5e:SHAPE*'),
    ([TINY, '--compile_only', '--topology=tpu'], 'KIND:SHAPE or KIND:SHAPE*SLICES, as v5e:4x4; kinds are v4, v5e'),
    (['--config=nowhere.py'], '--config=nowhere.py: there is no such file'),
    (['--config='], '--config is missing: a file, or one of '),
    (['--config=nowhere.py', '--config.seed=1'], '--config=nowhere.py: there is no such file'),
    ([f'{TINY}:dens'], "variant 'dens': there are 'grid' and 'dense'"),
    ([TINY, '--config.train.phaes=3'], '--config.train.phaes: there is no such field; the nearest is --config.train'),
    ([TINY, '--config.trian.phases=3'], 'the nearest is --config.train.phases'),
    ([TINY, '--config.grid.c=3'], 'the axes of this config are a, b; to have others, give all, as --config.grid='),
    ([TINY, '--config.train.phases=some'], '--config.train.phases=some should be a whole number'),
    ([TINY, '--config.train.phases=-1'], 'config.train.phases=-1 should be above 0'),
    ([TINY, '--config.routing.method=means'], "config.routing.method='means': choose one of kmeans"),
    ([TEXT], 'config.data.train is empty: name the text'),
    ([TINY, '--config.data.train=no/*.md'], "'no/*.md' matches no file: correct config.data.train"),
    ([TINY, '--config.data.source=stdlib', '--config.data.train=no/*.md'], "='stdlib' does not read it, 'files' does"),
    ([TINY, '--config.data.validation=no/*.md'], 'config.data.train is empty: name the text'),
    ([TINY, "--config.levels=(('all','.*',('z',)),)"], "level 'all' varies over ['z'], but the grid has ['a', 'b']"),
    ([TINY, "--config.levels=(('all','block',()),)"], "parameter 'embed/tokens' matches no level; add a pattern"),
    ([TINY, "--config.levels=(('all','.*',()),('x','nothing',()))"], "level 'x': 'nothing' matches no parameter"),
    ([TINY, '--config.mesh.data=3'], 'is not divided by config.mesh.data=3: change one of them'),
    ([TINY, '--config.mesh.data=9'], 'config.mesh.data=9 is more than the 8 devices'),
    ([TINY, '--config.grid.a=9000', '--config.data.max_documents=60'], 'use a smaller grid or batch, or more text'),
    ([TINY, '--config.pretrain.init=no'], 'config.pretrain.init=no: config.json: No such file'),
    ([TINY, '--config.tokenizer.model_file=no.model'], "tokenizer 'no.model': No such file"),
    ([TEXT, '--config.data.train=no/*.txt'], "'no/*.txt' matches no file: correct config.data.train"),
    ([TEXT, "--config.data.train={'a': 'no/*.txt'}"], "'no/*.txt' matches no file: correct config.data.train"),
    ([TEXT, "--config.data.train={'a': ('no/*.txt', 0)}"], 'should map names to globs and weights, such as {'),
    (
      [TEXT, "--config.data.train={'a': ('no/*.txt', 'x', 'y', 1.5, 2)}"],
      "config.data.train['a'][3]=1.5 should be a text",
    ),
    (
      [TEXT, "--config.data.train=(('a', 'b.txt', 1), ('a', 'c.txt', 1))"],
      'config.data.train names a source twice: a, a',
    ),
    (
      [TEXT, "--config.data.train={'a': 'b.txt'}", "--config.data.validation={'c': 'd.txt'}"],
      'of config.data.train, a',
    ),
    ([TEXT, '--config.data.train=http://x/y.txt'], "'http://x/y.txt' is neither a local file nor gs:// or s3://"),
    ([TEXT, '--config.data.train=.'], "'.' is a folder: write a pattern of files, as './*.txt', in config.data"),
    ([TINY, '--config.data.source=tfds', '--config.data.name=x/y:1.0.0', '--config.data.data_dir=no'], 'no such'),
  ],
  ids=lambda x: x if isinstance(x, str) else None,
)
def test_options(run, options, words):
  assert jax.device_count() == 8
  assert words in refused(run, *options)


def test_a_port_in_use(run):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    assert f'--metrics_port={port}: Address already in use; choose another' in refused(
      run, TINY, f'--metrics_port={port}'
    )


def test_no_workdir(run):
  assert run(TINY) == (2, 'dipaco_jax: --workdir is missing: name a directory to keep the run in\n')


@pytest.mark.parametrize('option', ['workdir=\x1b[2Jrun', 'workdir=half\udcff', 'name=worker\n0', 'name=' + 'x' * 201])
def test_names_that_cannot_be_shown(run, option):
  status, said = run(TINY, '--workdir=x', f'--{option}')
  assert status == 2 and 'a name without control characters' in said and '\x1b' not in said and said.count('\n') == 1


def test_a_bucket_that_cannot_be_used(run, monkeypatch, tmp_path):
  """Wrong names; then without a server, and without credentials."""
  monkeypatch.setattr(bucket_copy, 'START_PATIENCE_S', 0)
  here = [TINY, f'--scratch={tmp_path}/scratch']
  assert 'give a folder, file:///FOLDER, s3://BUCKET/' in refused(run, *here, workdir='ftp://bucket/run')
  assert 'is no URL of a bucket' in refused(run, *here, workdir='s3://my bucket/run')
  assert '--scratch=here is for a --workdir in a bucket' in refused(run, TINY, '--scratch=here')
  assert f'--scratch={TINY[9:]}: ' in refused(run, TINY, f'--scratch={TINY[9:]}', workdir='s3://bucket/run')
  for name, value in object_server.environment('http://127.0.0.1:9').items():
    monkeypatch.setenv(name, value)
  for url in ('s3://bucket/run', 'gs://bucket/run'):
    status, said = run(*here, f'--workdir={url}')
    assert status == 2 and f'dipaco_jax: --workdir={url}: ' in said, said
    assert 'check the name of the bucket, the network and your credentials' in said and 'again' not in said
  assert not [*tmp_path.glob('scratch/*/run')]


def test_a_full_disk_is_named(run, tmp_path, monkeypatch):
  """That of the workdir, or where what a role fetches from a bucket lies."""
  with small_disk(tmp_path / 'disk', 1 << 20, num_inodes=1) as disk:
    status, said = run(TINY, f'--workdir={disk}/run')
    assert status == command.TRY_AGAIN and f'the disk of --workdir={disk}/run is full' in said
    monkeypatch.setattr(tempfile, 'tempdir', str(disk))
    status, said = run(TINY, '--workdir=s3://bucket/run', '--role=worker', '--registry=postgresql://host/runs')
    assert status == command.TRY_AGAIN and f'the disk of TMPDIR={disk} is full' in said


def test_main_does_not_train_into_a_run_of_islands(run, tmp_path):
  (tmp_path / 'islands').mkdir()
  (tmp_path / 'islands' / 'registry.id').write_text('a1')
  said = refused(run, TINY, workdir='islands')
  assert '--workdir=islands is a run of islands: add its --role, or run `python -m dipaco_jax.local`' in said
  with pytest.raises(ValueError, match='is a run of islands'):
    from_python.train('tiny', tmp_path / 'islands')
  said = run(TINY, '--workdir=islands', '--role=worker')[1].splitlines()[-1]
  assert 'there is no registry' in said and 'a run with another --registry' in said
  assert not [*tmp_path.glob('**/registry.db*')]


def test_a_role_that_may_not_write_says_so_in_one_line(run, tmp_path):
  with small_disk(tmp_path / 'disk', 1 << 20) as disk:
    (disk / 'run').mkdir()
    subprocess.run(['mount', '-o', 'remount,ro', str(disk)], check=True)
    for where in ('run',), ('new',), ('run', f'--registry=sqlite:///{tmp_path}/registry.db'):
      status, said = run(TINY, '--role=monitor', f'--workdir={disk}/{where[0]}', *where[1:])
      assert status == 2 and 'Read-only file system' in said.splitlines()[-1] and 'Traceback' not in said, said


def test_a_role_whose_registry_or_storage_is_away_is_to_be_started_again(run, tmp_path, monkeypatch):
  for name, value in object_server.environment('http://127.0.0.1:9').items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  monkeypatch.setattr(roles, 'Registry', functools.partial(roles.Registry, patience_s=0))
  monkeypatch.setattr(roles, 'open_storage', functools.partial(roles.open_storage, patience_s=0))
  away, here = f'postgresql://me@/x?host={tmp_path}', f'sqlite:///{tmp_path}/registry.db'
  for where in ('--workdir=run', f'--registry={away}'), ('--workdir=s3://bucket/run', f'--registry={here}'):
    status, said = run(TINY, '--role=monitor', *where)
    assert status == command.TRY_AGAIN and said.splitlines()[-1].endswith('run it again when it is back'), said
    assert 'Traceback' not in said


START = 'from ml_collections import ConfigDict\nfrom dipaco_jax import settings\n'
DEFAULTS = START + 'def get_config():\n  c = ConfigDict(settings.Settings().to_dict())\n'


@pytest.mark.parametrize(
  'source, words',
  [
    ('def get_config(:\n', '--config=c.py, line 1: invalid syntax'),
    ('import nothing_of_that_name\n', "c.py, line 1: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ('x = 1\n', '--config=c.py: a config is a Python file with a function get_config()'),
    ('def get_config():\n  return 3\n', '--config=c.py: get_config() returns int; it should return ConfigDict('),
    (DEFAULTS + '  return d\n', "c.py, line 5: NameError: name 'd' is not defined"),
    (DEFAULTS + '  c.seed = "x"\n  return c\n', '--config=c.py, line 5: seed=x should be a whole number'),
    (DEFAULTS + '  c.train.phaes = 3\n  return c\n', 'config.train.phaes: there is no such field'),
    (START + 'def get_config():\n  return ConfigDict({"train": 3})\n', 'config.train=3 should be a dict of fields'),
    (START + 'def get_config():\n  return ConfigDict({"seed": "x"})\n', "config.seed='x' should be a whole number"),
  ],
)
def test_config_files(run, tmp_path, source, words):
  (tmp_path / 'c.py').write_text(source)
  assert words in refused(run, '--config=c.py')


@pytest.mark.parametrize(
  'content, words',
  [
    (b'', 'it has no text: add text, or leave out this file'),
    (b'abc\0def', 'byte 3 is NUL, so this is not plain text'),
    ('caf\u00e9'.encode('latin1'), 'not UTF-8 at byte 3: convert it'),
    (b'A short text.', 'no document is left for validation'),
  ],
)
def test_text_files(run, tmp_path, content, words):
  (tmp_path / 'mine.txt').write_bytes(content)
  assert words in refused(run, TEXT, '--config.data.train=*.txt')


@pytest.mark.parametrize(
  'content, where, words',
  [
    ('[{"text": "a"}]', '', "instead of one object per line; jq -c '.[]' makes lines of an array"),
    ('[\n {"text": "a"}\n]', '', "instead of one object per line; jq -c '.[]' makes lines of an array"),
    ('{\n "text": "a"\n}', '1:', 'each line should be one object; jq -c . makes a line of each object'),
    ('"a"', '1:', 'not a JSON object, as each line should be'),
    ('{"content": "a", "id": 3}', '1:', "no text under 'text'; texts are under ['content']: set config.data.text_key"),
    ('{"id": 3}', '1:', "no text under 'text'; no other key has one: leave out this file"),
  ],
)
def test_json_files(run, tmp_path, content, where, words):
  (tmp_path / 'mine.json').write_text(content)
  said = refused(run, TEXT, '--config.data.train=*.json')
  assert words in said and f'mine.json:{where} ' in said


@pytest.mark.parametrize(
  'name, pattern', [('a.txt', '*.txt'), ('b/a.jsonl.gz', '**/*.jsonl.gz'), ('a.md', '*.md'), ('a.py', '*.txt')]
)
def test_a_folder_of_text(run, tmp_path, name, pattern):
  file = tmp_path / 'my' / name
  file.parent.mkdir(parents=True)
  file.touch()
  assert f"/my/{pattern}'" in refused(run, TEXT, f'--config.data.train={tmp_path}/my/')


@pytest.mark.parametrize(
  'error, said',
  [
    (RuntimeError("Unable to initialize backend 'tpu': no libtpu (set JAX_PLATFORMS='' to)\nmore"), 'no libtpu;'),
    (AssertionError(), 'JAX_PLATFORMS=cuda: JAX has no device: it has no such platform; unset it'),
  ],
)
def test_no_device(monkeypatch, error, said):
  def fail():
    raise error

  monkeypatch.setattr(jax, 'devices', fail)
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
  with pytest.raises(ValueError) as info:
    command.check_devices()
  assert said in str(info.value) and '\n' not in str(info.value)


def test_an_error_of_the_program_is_not_called_a_wrong_config(monkeypatch, run):
  def fail(values):
    raise ValueError('a bug')

  monkeypatch.setattr(settings, 'from_dict', fail)
  with pytest.raises(ValueError, match='a bug'):
    run(TINY, '--workdir=new')


def test_a_workdir_that_is_for_other_things(run, tmp_path):
  (tmp_path / 'notes').touch()
  assert '--workdir=. contains other files (notes) but no run: name a directory' in refused(run, TINY, workdir='.')


@pytest.mark.parametrize('config', slow.all_but(['{}', '{"a": ', '[1]', '{"architectures": ["Llama"]}'], '[1]'))
def test_a_workdir_of_something_else(run, tmp_path, config):
  (tmp_path / 'old').mkdir()
  (tmp_path / 'old' / 'lock').touch()
  (tmp_path / 'old' / 'config.json').write_text(config)
  said = refused(run, TINY, workdir='old')
  assert '--workdir=old: its config.json is not that of a run' in said and 'another' in said
  assert (tmp_path / 'old' / 'config.json').read_text() == config


def test_a_workdir_of_another_format(run, tmp_path):
  (tmp_path / 'old').mkdir()
  (tmp_path / 'old' / 'lock').touch()
  (tmp_path / 'old' / 'config.json').write_text(json.dumps(settings.Settings().to_dict()))  # as 0.1 wrote it
  said = refused(run, TINY, workdir='old')
  assert '--workdir=old: dipaco_jax 0.1 wrote this run in format 1' in said and 'use that version, or another' in said


@pytest.mark.slow
def test_a_workdir_that_cannot_be(run, tmp_path):
  (tmp_path / 'file').touch()
  for workdir in ('file', 'file/below', '/proc/nothing'):
    assert 'name a directory that can be made and written' in refused(run, TINY, workdir=workdir)
