"""Every file of a finished run is sealed, and damaged files are neither read nor reused."""

import json
import os
import shutil

import bits
import made_run
import numpy as np
import pytest
import slow

from dipaco_jax.inference import trained_run
from dipaco_jax.pipeline import preflight, reuse, run as run_lib, stage_records
from dipaco_jax.storage import seals, tensors


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
    (lambda: trained_run.TrainedRun(str(workdir)).router, r'base/params\.safetensors'),
  ):
    with pytest.raises(seals.Damaged, match=words):
      read()
  run.metrics.close()


def test_every_file_of_a_finished_run_has_a_seal(undisturbed):
  """But those of checkpoints, which have their own, those that nothing is read from, and seals."""
  known = {'events', 'plots', 'lock', 'report.html', 'checkpoints', 'command.txt', 'environment.json'}
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
  reuse.take_stages(run, workdir)
  assert (other / 'base' / seals.SUMS).read_bytes() == (workdir / 'base' / seals.SUMS).read_bytes()
  bits.flip_in_middle(other / 'base' / 'params.safetensors')
  with pytest.raises(seals.Damaged, match=rf'{other}/base/params\.safetensors'):
    run.base()
  run.metrics.close()


@pytest.mark.parametrize(
  'name', ['base/inner.safetensors', 'shards/0/1/train.array_record', 'sequences/meta.json', 'tokenizer.model']
)
def test_what_is_damaged_is_not_reused(name, undisturbed, workdir, tmp_path_factory):
  run = run_lib.unattended(tmp_path_factory.mktemp('other'), stage_records.read_settings(undisturbed))
  bits.flip_in_middle(workdir / name)
  with pytest.raises(seals.Damaged, match=f'{workdir}/{name}.* is damaged'):
    reuse.take_stages(run, workdir)
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
  assert caplog.text.count('train.seconds does not hold a number') == 3
  assert caplog.text.count('environment.json is damaged') == 4
  run.metrics.close()


SERVED = ['base/params.safetensors', 'routing/0/router.safetensors', 'tokenizer.model']


@pytest.mark.parametrize('name', slow.all_but(SERVED, SERVED[1]))
def test_what_serves_checks_what_it_reads(name, tmp_path):
  workdir = made_run.write(tmp_path, made_run.settings())
  trained_run.TrainedRun(workdir).router.path('The fox')
  bits.flip_in_middle(tmp_path / name)
  with pytest.raises(seals.Damaged, match=f'{name}.* is damaged'):
    trained_run.TrainedRun(workdir).router.path('The fox')
  (tmp_path / name).unlink()
  with pytest.raises(ValueError, match=r'missing|no router'):
    trained_run.TrainedRun(workdir).router.path('The fox')


def test_a_run_without_seals_is_read(tmp_path):
  workdir = made_run.write(tmp_path, made_run.settings())
  for file in tmp_path.rglob('*'):
    if file.name == seals.SUMS or file.suffix == '.sha256':
      file.unlink()
    elif file.suffix == '.json':
      value = json.loads(file.read_text())
      value.pop('seal', None)
      file.write_text(json.dumps(value))
  assert trained_run.TrainedRun(workdir).path(0).version == 2
  file = tmp_path / 'base' / 'params.safetensors'
  file.write_bytes(file.read_bytes()[:100])
  with pytest.raises(seals.Damaged, match='base/params'):
    trained_run.TrainedRun(workdir).router.path('The fox')
