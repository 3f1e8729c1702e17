"""What a stage has left is read as it was written, or named in a line that says what to remove."""

import json
import os
import pathlib
import shutil
import subprocess

import made_run
import numpy as np
import pytest
import small

from dipaco_jax.core import errors
from dipaco_jax.inference import trained_run
from dipaco_jax.pipeline import preflight, reuse, stage_records
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.storage import module_store, publishing, records, seals, tensors
from dipaco_jax.training import metrics_log


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
  return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def damage(file: pathlib.Path):
  """One bit, of a new file: the old one may be linked to from elsewhere."""
  data = file.read_bytes()
  file.unlink()
  file.write_bytes(flipped(data, len(data) // 2))


# -- each kind of seal


def test_no_changed_byte_of_json_is_read():
  value = {'losses': [1.5, None, 2e-7], 'name': 'a "b" \u00e4', 'nested': {'1': True}}
  data = seals.dumps(value).encode()
  assert seals.loads(data) == value and list(json.loads(data)) == [*value, 'seal']
  for at in range(len(data)):
    for bit in range(8):
      found = seals.loads(flipped(data, at, bit), 'losses')
      assert found is None or {name: found[name] for name in value} == value  # else of the seal's own name


OTHERS = b'', b'[]', b'null', b'{}', b'{"a": ', b'\xff\xfe', b'[' * 100_000, b'{"seal": "x", "a": 1}'


@pytest.mark.parametrize('data', OTHERS, ids=range(len(OTHERS)))
def test_json_of_something_else(data, tmp_path):
  (tmp_path / 'stages').mkdir()
  (tmp_path / 'stages' / 'train.json').write_bytes(data)
  with pytest.raises(seals.Damaged, match=r'made by the stage train, is not as it was written: remove .*train\.json,'):
    seals.read_json(tmp_path / 'stages' / 'train.json', 'a')


def test_a_directory_s_seal_is_as_coreutils_have_it(tmp_path):
  with publishing.publish_directory(tmp_path / 'base') as aside:
    (aside / 'params.safetensors').write_bytes(b'abc')
    (aside / 'inner').write_bytes(b'')
  said = subprocess.run(['sha256sum', '--check', seals.SUMS], cwd=tmp_path / 'base', capture_output=True, text=True)
  assert said.stdout.splitlines() == ['inner: OK', 'params.safetensors: OK']
  assert seals.read(tmp_path / 'base' / 'params.safetensors') == b'abc'
  (tmp_path / 'base' / 'params.safetensors').write_bytes(b'abd')
  with pytest.raises(seals.Damaged, match=r'base/params\.safetensors is not as it was written'):
    seals.read(tmp_path / 'base' / 'params.safetensors')


@pytest.mark.parametrize('text', ['', '\n', 'x', '0' * 64 + '  params', '0' * 64 + '  other\n', '\x00\xff'])
def test_a_damaged_seal_is_noticed(text, tmp_path):
  with publishing.publish_directory(tmp_path / 'base') as aside:
    (aside / 'params').write_bytes(b'abc')
  (tmp_path / 'base' / seals.SUMS).write_text(text)
  with pytest.raises(seals.Damaged):
    seals.read(tmp_path / 'base' / 'params')
  (tmp_path / 'base' / seals.SUMS).unlink()
  assert seals.read(tmp_path / 'base' / 'params') == b'abc'  # of a run from before there were any


def test_what_is_made_again_at_once_goes(tmp_path, caplog):
  file = tmp_path / 'features' / 'train.npy'
  assert not seals.is_whole(file) and not caplog.text
  publishing.write_array(file, np.arange(100))
  assert seals.is_whole(file)
  damage(file)
  assert not seals.is_whole(file) and not file.exists()
  assert 'train.npy is not as it was written: it is made again' in caplog.text
  parts = [file, tmp_path / 'features', tmp_path / 'none']
  for sha256, missing in ((None, [2]), ('0' * 64, [2]), ('0' * 64, [0, 2])):
    publishing.write_array(file, np.arange(100)) if not file.exists() else None
    if sha256:
      file.with_name('train.npy.sha256').write_text(seals.line('train.npy', sha256))
    assert publishing.missing(parts, (0, 1)) == missing
    if sha256:
      seals._checked.clear()  # a process looks at a file once


def test_no_changed_byte_of_a_record_is_read(tmp_path):
  """Which is why no process reads a file of records from end to end before it trains."""
  rng, file = np.random.default_rng(0), str(tmp_path / 'train.array_record')
  expected = [rng.bytes(128) for _ in range(100)]
  with records.record_writer(file) as writer:
    for record in expected:
      writer.write(record)
  data, damaged = pathlib.Path(file).read_bytes(), 0
  everywhere = [*range(0, 100 * 250, 97), *range(0, len(data), 1009)]  # records, and what is behind them
  for at in everywhere:
    pathlib.Path(file).write_bytes(flipped(data, at, at % 8))
    try:
      assert records.read_records(file, records.record_reader(file), list(range(100))) == expected
    except seals.Damaged:
      damaged += 1
  assert damaged > 100


def test_no_changed_byte_of_metrics_is_read(tmp_path, caplog):
  rows = [{'kind': 'step', 'stage': 'train', 'updates': n, 'time': 1.5, 'loss': [2.0 + n]} for n in range(3)]
  lines = [metrics_log.to_line(row) for row in rows]
  for at in range(len(lines[1]) - 1):
    found = metrics_log.from_line(flipped(lines[1], at, at % 8))
    assert found is None or rows[1].items() <= found.items()
  (tmp_path / 'metrics.jsonl').write_bytes(lines[0] + flipped(lines[1], 20) + lines[2] + b'{"kind": "st')
  assert list(metrics_log.read_rows(tmp_path)) == [rows[0], rows[2]]
  assert 'metrics.jsonl: 1 lines are not as they were written' in caplog.text
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(rows[0]) + '\n')  # of an older run
  assert list(metrics_log.read_rows(tmp_path)) == [rows[0]]


# -- what is said


TREES = (
  'config.json tokenizer.model sequences/0/x base/x shards/base/0/x shards/base/meta.json shards/0/meta.json '
  'shards/1/meta.json routing/0/x routing/1/x routing/1-scores/0.npy modules/3/low/0.safetensors '
  'modules/4/base/0.safetensors modules/4/index-0.json paths/best.json evaluation/validation/nll-0.npy '
  'checkpoints/train/96/x stages/tokenize.json stages/pretrain.json stages/route.json stages/train.json '
  'stages/evaluate.json report.json'
).split()


@pytest.mark.parametrize(
  'name, removed',
  {
    'config.json': 'config.json',
    'tokenizer.model': 'tokenizer.model stages/tokenize.json',
    'sequences/0/x': 'sequences stages/tokenize.json',
    'base/x': 'base stages/pretrain.json',
    'shards/base/meta.json': 'shards/base stages/pretrain.json',
    'shards/0/meta.json': 'shards/0 stages/route.json',
    'routing/0/x': 'routing/0 stages/route.json',
    'shards/1/meta.json': 'shards/1 stages/train.json',
    'routing/1/x': 'routing/1 stages/train.json',
    'modules/4/base/0.safetensors': 'modules/4 stages/train.json',
    'modules/4/index-0.json': 'modules/4 stages/train.json',
    'modules/3/low/0.safetensors': 'checkpoints/train modules routing/1 routing/1-scores shards/1 stages/train.json',
    'paths/best.json': 'paths/best.json stages/train.json',
    'evaluation/validation/nll-0.npy': 'evaluation stages/evaluate.json',
    'stages/train.json': 'stages/train.json',
    'report.json': 'report.json',
    'tokenize-1/sequences/0/x': 'tokenize-1 stages/tokenize.json',
  }.items(),
)
def test_what_is_to_be_removed(name, removed, tmp_path):
  workdir = tmp_path / 'shards' / 'run'  # where somebody keeps his runs
  for each in TREES:
    (workdir / each).parent.mkdir(parents=True, exist_ok=True)
    (workdir / each).touch()
  (workdir / 'tokenize-1' / 'sequences' / '0').mkdir(parents=True)
  (workdir / 'tokenize-1' / 'sequences' / '0' / 'x').touch()
  assert seals.place(workdir / name) == (workdir, name)
  said = seals.fault(workdir / name)
  assert said.startswith(f'{workdir / name}') and ': remove ' in said
  words = said.partition(': remove ')[2].partition(', and the command')[0].replace(' and ', ', ').split(', ')
  assert words == [str(workdir / each) for each in removed.split()]
  (workdir / 'registry.id').touch()
  assert 'read a copy of this run' in seals.fault(workdir / name)


def test_it_is_the_user_s_to_mend(tmp_path):
  for action in (
    lambda: seals.check(tmp_path / 'base' / 'none'),
    lambda: seals.read_json(tmp_path / 'stages' / 'train.json'),
    lambda: records.record_reader(str(tmp_path / 'none')),
    lambda: module_store.best_versions(tmp_path),
  ):
    with pytest.raises(seals.Damaged) as info:
      action()
    assert isinstance(info.value, errors.InputError) and 'is missing' in str(info.value) and info.value.errno is None


# -- a run


@pytest.fixture
def workdir(undisturbed, tmp_path):
  """A copy of a finished one; files are linked."""
  names = 'stages', 'base', 'routing', 'sequences', 'shards', 'features', 'modules', 'paths', 'evaluation'
  for name in names:
    shutil.copytree(undisturbed / name, tmp_path / name, copy_function=os.link)
  for name in ('config.json', 'tokenizer.model', 'tokenizer.model.sha256', 'report.json', 'metrics.jsonl'):
    shutil.copy2(undisturbed / name, tmp_path / name)
  return tmp_path


def test_flipped_signs_and_changed_routes_are_noticed(workdir):
  run = run_lib.unattended(workdir, stage_records.read_settings(workdir))
  base, routes = run.base(), run.routed('train', 0)
  file = workdir / 'base' / 'params.safetensors'
  file.unlink()
  file.write_bytes(tensors.to_bytes({name: -x for name, x in base.items()}))
  routes[:10] = (routes[:10] + 1) % 4
  (workdir / 'routing' / '0' / 'train.npy').unlink()
  np.save(workdir / 'routing' / '0' / 'train.npy', routes)
  for read, words in (
    (run.base, 'remove .*/base and .*/stages/pretrain.json,'),
    (lambda: run.routed('train', 0), 'routing/0/train.npy'),
    (lambda: trained_run.Trained(str(workdir)).router, r'base/params\.safetensors'),
  ):
    with pytest.raises(seals.Damaged, match=words):
      read()
  run.metrics.close()


def test_every_file_of_a_finished_run_has_a_seal(undisturbed):
  """But those of checkpoints, which have their own, those that nothing is read from, and seals."""
  known = {'cache', 'events', 'plots', 'lock', 'report.html', 'checkpoints', 'command.txt', 'environment.json'}
  unsealed = []
  for file in undisturbed.rglob('*'):
    name = str(file.relative_to(undisturbed))
    if file.is_file() and not {*name.split('/')} & {*known, 'metrics.jsonl'} and file.suffix != '.seconds':
      beside = [file.with_name(seals.SUMS), file.with_name(f'{file.name}.sha256')]
      has_seal = any(s.exists() and f'  {file.name}\n' in s.read_text() for s in beside)
      of_module = file.suffix == '.safetensors' and 'modules' in file.parts
      inside = file.suffix == '.json' and 'seal' in json.loads(file.read_text())
      if not (has_seal or of_module or inside or file.name == seals.SUMS or file.suffix == '.sha256'):
        unsealed.append(name)
  assert not unsealed


def test_seals_travel_with_what_is_reused(undisturbed, workdir, tmp_path_factory):
  s, other = stage_records.read_settings(undisturbed), tmp_path_factory.mktemp('other')
  run = run_lib.unattended(other, s)
  reuse.take(run, workdir)
  assert (other / 'base' / seals.SUMS).read_bytes() == (workdir / 'base' / seals.SUMS).read_bytes()
  damage(other / 'base' / 'params.safetensors')
  with pytest.raises(seals.Damaged, match=rf'{other}/base/params\.safetensors'):
    run.base()
  run.metrics.close()


@pytest.mark.parametrize(
  'name', ['base/inner.safetensors', 'shards/0/1/train.array_record', 'sequences/meta.json', 'tokenizer.model']
)
def test_what_is_damaged_is_not_reused(name, undisturbed, workdir, tmp_path_factory):
  run = run_lib.unattended(tmp_path_factory.mktemp('other'), stage_records.read_settings(undisturbed))
  damage(workdir / name)
  with pytest.raises(seals.Damaged, match=f'{workdir}/{name}.* is not as it was written'):
    reuse.take(run, workdir)
  run.metrics.close()


def test_seconds_and_the_environment_are_not_worth_an_end(undisturbed, tmp_path, caplog):
  run = run_lib.unattended(tmp_path, stage_records.read_settings(undisturbed))
  (tmp_path / 'stages').mkdir()
  for data in (b'', b'\xff', b'nan', b'12'):
    stage_records.seconds_file(tmp_path, 'train').write_bytes(data)
    (tmp_path / 'environment.json').write_bytes(data)
    preflight.note_environment(run)
    with stage_records.stopwatch(tmp_path, 'train') as elapsed:
      assert (elapsed() >= 12) == (data == b'12')
  assert caplog.text.count('train.seconds is no number') == 3 and caplog.text.count('environment.json is not as') == 4
  run.metrics.close()


def test_a_round_without_the_checkpoints_that_its_shards_were_made_from(tmp_path):
  (tmp_path / 'shards' / '1').mkdir(parents=True)
  job = small.make_job(small.make_programs(small.settings()), begin=2)
  with pytest.raises(seals.Damaged, match=rf'no checkpoint that can be read.*: remove .*{tmp_path}/shards/1, and'):
    small.train(job, tmp_path)


# -- commands that read


@pytest.mark.parametrize('name', ['base/params.safetensors', 'routing/0/router.safetensors', 'tokenizer.model'])
def test_what_serves_checks_what_it_reads(name, tmp_path):
  workdir = made_run.write(tmp_path, made_run.settings())
  trained_run.Trained(workdir).router.path('The fox')
  damage(tmp_path / name)
  with pytest.raises(seals.Damaged, match=f'{name}.* is not as it was written'):
    trained_run.Trained(workdir).router.path('The fox')
  (tmp_path / name).unlink()
  with pytest.raises(ValueError, match=r'missing|no router'):
    trained_run.Trained(workdir).router.path('The fox')


def test_a_run_without_seals_is_read(tmp_path):
  workdir = made_run.write(tmp_path, made_run.settings())
  for file in tmp_path.rglob('*'):
    if file.name == seals.SUMS or file.suffix == '.sha256':
      file.unlink()
    elif file.suffix == '.json':
      value = json.loads(file.read_text())
      value.pop('seal', None)
      file.write_text(json.dumps(value))
  assert trained_run.Trained(workdir).path(0).version == 2
  file = tmp_path / 'base' / 'params.safetensors'
  file.write_bytes(file.read_bytes()[:100])
  with pytest.raises(seals.Damaged, match='base/params'):
    trained_run.Trained(workdir).router.path('The fox')
