"""Compressed files: several frames, large windows, and none that ends early in silence."""

import corpora
import pytest
from backports import zstd

from dipaco_jax.data import compressed_files

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


def test_names():
  assert [compressed_files.inner_name(name) for name in ('a.txt.GZ', 'a.txt', 'gz')] == ['a.txt', 'a.txt', 'gz']
