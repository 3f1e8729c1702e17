"""Whether runs have the same text, tokenizer and validation set, by what these hold and not by their names."""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.config import settings
from dipaco_jax.data import tokenizer_files
from dipaco_jax.pipeline import document_losses, input_records, stage_records
from dipaco_jax.pipeline.document_losses import Documents
from dipaco_jax.storage import seals


class Contents(NamedTuple):
  """Digests of the text, tokenizer and validation set of a run."""

  tokenizer: str  # digest
  files: str  # digest of the files of training text; '' if that is not known
  text: Any  # documents of training text by kind, which no tokenizer changes
  sequences: str  # digest of the tokenized training text; '' if it is not here, as in a copy of a bucket
  cut: tuple[int, ...]  # what decides how text is cut into them
  documents: Documents | None  # of validation; None before evaluation
  domains: list[str]


def read(workdir: pathlib.Path) -> Contents:
  """Reads the contents of a run."""
  s, tokenized = stage_records.read_settings(workdir), stage_records.read_results(workdir).get('tokenize', {})
  by_kind = {kind: counts['documents'] for kind, counts in (tokenized.get('by_domain') or {}).items()}
  return Contents(
    _tokenizer(workdir, s),
    input_records.read_inputs(workdir).digests('tokenize').get('data.train', ''),
    by_kind or tokenized.get('documents'),
    _sequences(workdir, s),
    (s.data.parts, s.model.seq_len, s.routing.prefix_tokens),
    document_losses.read(workdir),
    tokenized.get('domains', []),
  )


def _tokenizer(workdir: pathlib.Path, s: settings.Settings) -> str:
  """Returns a digest of a tokenizer's files; of one of the user, which has none, of its settings."""
  digest = hashlib.sha256()
  kept = [workdir / name for name in tokenizer_files.FILES if (workdir / name).exists()]
  for file in kept:
    digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
  return digest.hexdigest() if kept else settings.digest(s, 'tokenizer')


def _sequences(workdir: pathlib.Path, s: settings.Settings) -> str:
  """Returns a digest of the seals of all parts of the training text."""
  lines = []
  for k in range(s.data.parts):
    file = workdir / 'sequences' / str(k) / seals.SUMS
    if not file.exists():
      return ''
    lines += [line for line in file.read_text().splitlines() if line.endswith(' train.array_record')]
  return hashlib.sha256('\n'.join(lines).encode()).hexdigest()


def differences(runs: Sequence[Contents]) -> list[str]:
  """Returns which contents differ between runs: 'tokenizer', 'training text', 'validation set'."""
  first, differing = runs[0], []
  if any(run.tokenizer != first.tokenizer for run in runs):
    differing.append('tokenizer')
  if any(_has_other_text(first, run) for run in runs):
    differing.append('training text')
  if any(_has_other_validation(first, run) for run in runs):
    differing.append('validation set')
  return differing


def _has_other_text(a: Contents, b: Contents) -> bool:
  if a.text != b.text:
    return True
  if a.files and b.files:
    return a.files != b.files
  is_comparable = a.tokenizer == b.tokenizer and a.cut == b.cut and a.sequences and b.sequences
  return bool(is_comparable) and a.sequences != b.sequences


def _has_other_validation(a: Contents, b: Contents) -> bool:
  if a.documents is None or b.documents is None:
    return False  # nothing is known
  return sorted(keys(a, b).tolist()) != sorted(keys(b, a).tolist())


def keys(run: Contents, other: Contents) -> np.ndarray:
  """Returns a number for each validation document of a run by which another run knows the same one, uint64 [N].

  With the same tokenizer it stands for all of the text that is read; with another one, which cuts it elsewhere, for its
  beginning.
  """
  assert run.documents is not None
  return run.documents.text if run.tokenizer == other.tokenizer else run.documents.beginning
