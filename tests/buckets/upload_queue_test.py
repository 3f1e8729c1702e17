"""The queue of uploads while the bucket is slower than training."""

import json
import pathlib
import threading

import pytest

from dipaco_jax.buckets.upload_queue import Upload, UploadQueue, without_useless


def version(folder: pathlib.Path, number: int, *best: int, root: str = '') -> Upload:
  """Returns an upload of a version of modules, and of the pointers to versions."""
  links = folder / f'{root.strip("/")}version-{number}'
  (links / root / 'paths').mkdir(parents=True)
  (links / root / 'paths' / 'best.json').write_text(json.dumps({'version': [*best]}))
  return Upload(links, [f'{root}modules/{number}', pointers := f'{root}paths/best.json'], pointers=pointers)


def checkpoint(folder: pathlib.Path, updates: int, stage: str = 'train') -> Upload:
  return Upload(
    folder / f'{stage}-{updates}', ['metrics.jsonl', f'checkpoints/{stage}/{updates}'], (), f'checkpoints/{stage}'
  )


def names(uploads: list[Upload]) -> list[str]:
  return [upload.links.name for upload in uploads]


def test_only_the_last_checkpoint_of_each_stage_waits(tmp_path):
  uploads = [
    checkpoint(tmp_path, 8, 'pretrain'),
    checkpoint(tmp_path, 4),
    Upload(tmp_path / 'record', ['stages/a.json']),
  ]
  uploads += [checkpoint(tmp_path, 8), Upload(tmp_path / 'nothing', [])]
  assert names(without_useless(uploads)) == ['pretrain-8', 'record', 'train-8', 'nothing']


def test_versions_wait_that_the_pointers_of_the_last_version_or_checkpoint_name(tmp_path):
  uploads = [
    version(tmp_path, 1, 1, 1),
    version(tmp_path, 2, 2, 1),
    version(tmp_path, 3, 2, 3),
    checkpoint(tmp_path, 3),
    version(tmp_path, 4, 4, 3),
    version(tmp_path, 5, 4, 5),
    version(tmp_path, 6, 4, 5),
    version(tmp_path, 7, 4, 5),
  ]
  assert names(without_useless(uploads)) == [f'version-{n}' for n in (2, 3)] + ['train-3'] + [
    f'version-{n}' for n in (4, 5, 7)
  ]
  assert names(without_useless(uploads[:3])) == ['version-2', 'version-3']


def test_versions_of_the_dense_control_are_separate(tmp_path):
  uploads = [
    version(tmp_path, 3, 3),
    version(tmp_path, 1, 1, root='control/'),
    version(tmp_path, 2, 2, root='control/'),
  ]
  assert names(without_useless(uploads)) == ['version-3', 'controlversion-2']


@pytest.mark.parametrize('every', [1, 3])  # phases
def test_versions_that_uploaded_pointers_name_are_uploaded(tmp_path, every):
  """As in a run, the thread takes all waiting uploads now and then; the run can resume from the bucket after each."""
  uploaded = set[int]()
  waiting = []
  best = [1, 1, 1]
  for number in range(1, 60):
    best[number * 7 % 5 % 3] = number
    waiting = without_useless([*waiting, version(tmp_path, number, *best)])
    if number % every == 0:
      waiting = without_useless([*waiting, checkpoint(tmp_path, number)])
      (tmp_path / f'train-{number}').mkdir()
      (tmp_path / f'train-{number}' / 'best').write_text(json.dumps({'version': best}))
    assert len(waiting) <= 8
    if number % 11 == 0:
      for upload in waiting:
        if upload.checkpoints:
          pointers = upload.links / 'best'
        else:
          uploaded.add(upload.version)
          pointers = upload.links / 'paths' / 'best.json'
        if len(upload.names) == 1:
          continue
        assert {*json.loads(pointers.read_text())['version']} <= uploaded, upload
      waiting = []


def test_a_checkpoint_is_uploaded_although_newer_ones_arrive(tmp_path):
  may_end = threading.Semaphore(0)
  begun = threading.Semaphore(0)
  uploaded = []

  def upload(waiting: Upload):
    begun.release()
    may_end.acquire()
    uploaded.append(waiting.links.name)

  queue = UploadQueue(upload)
  queue.add(Upload(tmp_path / 'slow', ['sequences']))
  begun.acquire()
  for updates in (1, 2, 3):
    newer = checkpoint(tmp_path, updates)
    newer.links.mkdir()
    queue.add(newer)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['train-3'], 'the others are deleted'
  queue.add(Upload(tmp_path / 'record', ['stages/a.json']))
  may_end.release()
  begun.acquire()
  queue.add(checkpoint(tmp_path, 4))
  for _ in range(3):
    may_end.release()
  queue.wait()
  assert uploaded == ['slow', 'train-3', 'record', 'train-4']
  queue.close()
