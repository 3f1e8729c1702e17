"""Settings of text in files, lines of JSON, and both splits of a corpus as lists."""

import json

from dipaco_jax.core import settings
from dipaco_jax.data import corpus


def in_files(tmp_path, **kwargs) -> settings.Data:
  return settings.Data(source='files', train=(f'{tmp_path}/*.*',), **kwargs)


def lines(count: int) -> bytes:
  return ''.join(json.dumps({'text': f'line {i}', 'domain': 'ab'[i % 2]}) + '\n' for i in range(count)).encode()


def both(data: settings.Data) -> list[list[corpus.Document]]:
  """Training and validation documents."""
  return [list(corpus.documents(data, split)) for split in ('train', 'validation')]
