"""Compressed files: several frames, large windows, and none that ends early in silence."""

import errno
import io
import os
import types

import corpora
import pytest
from backports import zstd

from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.data import compressed_files
from dipaco_jax.storage import object_store, remote_files

WORDS = b''.join(b'%d some words\n' % i for i in range(50_000))


def read(path) -> bytes:
  return b''.join(compressed_files.chunks(str(path)))


@pytest.mark.parametrize('ending', corpora.COMPRESS)
def test_files_in_several_frames_are_read_whole(ending, tmp_path):
  """As `cat a.gz b.gz` makes them."""
  compress = corpora.COMPRESS[ending]
  (tmp_path / f'a.{ending}').write_bytes(compress(WORDS) + compress(b'the end'))
  assert read(tmp_path / f'a.{ending}') == WORDS + b'the end'


@pytest.mark.parametrize('ending', corpora.COMPRESS)
@pytest.mark.parametrize('share', [0.3, 0.99])
def test_no_cut_file_ends_in_silence(ending, share, tmp_path):
  content = corpora.COMPRESS[ending](WORDS)
  (tmp_path / f'a.{ending}').write_bytes(content[: int(share * len(content))])
  with pytest.raises(ValueError, match=rf'a\.{ending}: damaged or cut short'):
    read(tmp_path / f'a.{ending}')


def test_zstd_of_a_long_window(tmp_path):
  """As `zstd --long=31` makes it of much text."""
  options = {zstd.CompressionParameter.window_log: 30, zstd.CompressionParameter.enable_long_distance_matching: 1}
  with zstd.open(tmp_path / 'a.zst', 'wb', options=options) as f:
    f.write(WORDS)
  assert read(tmp_path / 'a.zst') == WORDS


def of_hub(status: int | None) -> OSError:
  """As the errors of the Hub's library are: with the response, if there was any."""
  error = OSError('the Hub says no')
  error.response = types.SimpleNamespace(status_code=status) if status else None
  return error


@pytest.mark.parametrize('number', [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_file_whose_disk_does_not_answer_is_reported_and_may_be_read_later(number, monkeypatch):
  class Gone(io.RawIOBase):
    def read(self, size=-1):
      raise OSError(number, os.strerror(number))

  monkeypatch.setattr(remote_files, 'open_file', lambda path: Gone())
  with pytest.raises(Unavailable, match=rf'a\.txt: {os.strerror(number)}; run the same command again when it can be'):
    read('a.txt')


@pytest.mark.parametrize(
  'path, error, is_away',
  [
    ('s3://b/x.txt', object_store.Away(errno.EIO, 'patience is over'), True),
    ('s3://b/x.txt', OSError(errno.EIO, 'status code: 403'), False),  # as Storage.retry names what it does not wait for
    ('hf://datasets/x', of_hub(503), True),
    ('hf://datasets/x', of_hub(403), False),
    ('hf://datasets/x', of_hub(None), True),
    ('hf://datasets/x', FileNotFoundError(errno.ENOENT, 'none'), False),
    ('x.txt', PermissionError(errno.EACCES, 'not yours'), False),
  ],
)
def test_what_is_rejected_is_not_away(path, error, is_away, monkeypatch):
  class Failing(io.RawIOBase):
    def read(self, size=-1):
      raise error

  monkeypatch.setattr(remote_files, 'open_file', lambda path: Failing())
  with pytest.raises(Unavailable if is_away else InputError, match=path):
    read(path)


def test_names():
  assert [compressed_files.inner_name(name) for name in ('a.txt.GZ', 'a.txt', 'gz')] == ['a.txt', 'a.txt', 'gz']
