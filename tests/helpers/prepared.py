"""A dataset as TensorFlow Datasets itself prepares it, and the same documents as files."""

import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

NAME = 'my_text:1.0.0'
KINDS = {'vowels': 'aeiouyäö', 'consonants': 'bcdfgklmnprst'}


def documents(count: int, seed: int) -> list[dict[str, str]]:
  """Texts of two domains with words of their own."""
  rng = np.random.default_rng(seed)
  made = []
  for i in range(count):
    domain = list(KINDS)[i % 2]
    words = [''.join(rng.choice(list(KINDS[domain]), rng.integers(2, 6))) for _ in range(rng.integers(20, 60))]
    made.append({'text': ' '.join(words) + '.', 'domain': domain})
  return made


def prepare(
  folder: pathlib.Path, splits: Mapping[str, Sequence[dict]], file_format: str, *, label: bool = False, files: int = 3
):
  """Writes the splits as NAME into a data dir, in the order of the documents.

  Args:
    label: the domain is a class label, else a text.
    files: of each split.
  """
  import tensorflow_datasets as tfds

  domain = tfds.features.ClassLabel(names=list(KINDS)) if label else tfds.features.Text()
  features = tfds.features.FeaturesDict({'text': tfds.features.Text(), 'domain': domain, 'number': np.int64})

  class MyText(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
      return {name: self._generate_examples(given) for name, given in splits.items()}

    def _generate_examples(self, given):
      yield from ((number, document | {'number': number}) for number, document in enumerate(given))

  builder = MyText(data_dir=folder, file_format=file_format)
  builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=files))


def write_lines(folder: pathlib.Path, splits: Mapping[str, Sequence[dict]]):
  """The splits as `<name>.jsonl`."""
  folder.mkdir(exist_ok=True)
  for name, given in splits.items():
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(document) + '\n' for document in given))
