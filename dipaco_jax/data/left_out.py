"""Counts and descriptions of what tokenizing leaves out: short sequences, bad records, copies of validation text.

The router reads the first `routing.prefix_tokens` tokens of a sequence, and no evaluation counts them [2.4]. Sequences
that are not longer are dropped, also with `train.loss_on_prefix`, so that this field changes no training text.
"""

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.data.cutting import Cutting

EARLY_DOCUMENTS = 1000  # number of records before the share left out is checked for the first time
LARGE = 0.05  # of documents or of tokens: a larger share is worth a warning


class Omitted(NamedTuple):
  """Counts of records and documents that are left out while reading."""

  bad_records: collections.Counter[str]  # by kind of file or source, with `data.skip_bad_records`
  copies: collections.Counter[str]  # by split: documents whose content is validation text already


REJECTED = 'conversations that the chat template rejects'
NOTHING = Omitted(collections.Counter(), collections.Counter())  # to read only

COUNTS = ('dropped', 'dropped_documents', 'dropped_tokens', 'dropped_ends')  # the first is of sequences


def count_bad_record(bad_records: collections.Counter[str], kind: str, reason: str) -> None:
  """Counts a bad record of a kind of file or source that is left out; logs the first."""
  if not bad_records:
    logging.warning('skipped this and every other bad record (config.data.skip_bad_records): %s', reason)
  bad_records[kind] += 1


def count(long: Sequence[np.ndarray], short: Sequence[np.ndarray]) -> dict[str, int]:
  """Returns the counts of a document's sequences that are dropped, `short`; `long` are the others."""
  return dict(zip(COUNTS, (len(short), int(not long), sum(map(len, short)), len(short) * bool(long)), strict=True))


def is_large(documents: int, dropped_documents: int, tokens: int, dropped_tokens: int) -> bool:
  """Returns whether the dropped documents, or the dropped tokens, are a LARGE share."""
  return dropped_documents > LARGE * documents or dropped_tokens > LARGE * (tokens + dropped_tokens)


def warn_early(counts: Mapping[str, int], cutting: Cutting) -> None:
  """Warns if a large share of the first training documents is dropped, hours before all of them are tokenized."""
  if is_large(counts['documents'], counts['dropped_documents'], counts['tokens'], counts['dropped_tokens']):
    about = dict(counts) | cutting._asdict()
    logging.warning('so far, %s', describe_dropped(about))


def describe_dropped(about: Mapping[str, Any]) -> str:
  """Describes the training text that is dropped, by `sequences.merge_meta`; '' if there is none."""
  documents, dropped, ends = (about.get(name, 0) for name in ('documents', 'dropped_documents', 'dropped_ends'))
  if not dropped and not ends:
    return ''
  prefix, share = about['prefix_tokens'], about['dropped_tokens'] / max(1, about['tokens'] + about['dropped_tokens'])
  if about.get('conversations'):
    parts_of = f'{dropped + ends:,} parts of {documents:,} conversations are left out'
    length = f'config.model.seq_len={about["seq_len"]}'
    return f'{parts_of} ({100 * share:.2g}% of the tokens): with its instructions, an exchange is longer than {length}'
  parts = [f'{dropped:,} of {documents:,} documents'] if dropped else []
  if ends:
    of_longer = 'a longer one' if ends == 1 else f'{ends:,} longer ones'
    parts.append(f'the end{"s" * (ends > 1)} of {of_longer if dropped else of_longer.replace("one", "document")}')
  is_one = dropped + ends == 1
  return (
    f'{" and ".join(parts)} {"has" if is_one else "have"} at most {prefix} tokens and {"is" if is_one else "are"} left '
    f'out ({100 * share:.2g}% of the tokens): the first {prefix} tokens of a sequence choose its path and are not '
    'scored. Join short records, or lower config.routing.prefix_tokens'
  )


def describe_skipped(about: Mapping[str, Any]) -> str:
  """Describes the bad records that are left out, by `sequences.merge_meta`; '' if there are none."""
  skipped = about.get('skipped_records') or {}
  by_kind = ', '.join(f'{number:,} of {kind or "files"}' for kind, number in sorted(skipped.items()))
  return f'bad records that are left out (config.data.skip_bad_records): {by_kind}' if by_kind else ''


def describe_copies(about: Mapping[str, Any]) -> str:
  """Describes the training documents that have text of validation documents; '' if there are none."""
  if not (count := about.get('copies_of_validation', 0)):
    return ''
  text = 'document has text of a validation document and is'
  if count > 1:
    text = 'documents have text of validation documents and are'
  return f'{count:,} training {text} left out'


def describe_equal_validation(about: Mapping[str, Any]) -> str:
  """Describes the validation documents that are equal to another one; '' if there are none."""
  if not (count := about.get('copies_in_validation', 0)):
    return ''
  is_equal = 'document is' if count == 1 else 'documents are'
  return f'{count:,} validation {is_equal} equal to another one and not counted again'


def describe_no_training_text(num_copies: int) -> str:
  """Describes a text whose training documents are all validation text too."""
  return (
    f'no document is left for training: all {num_copies} are validation text; name other text in '
    'config.data.train or in config.data.validation'
  )


def log_all(about: Mapping[str, Any], say: Callable[[str], object]) -> None:
  """Logs the counts of `sequences.merge_meta`: a large share as a warning, the rest through `say`."""
  if dropped := describe_dropped(about):
    large = is_large(*(about[name] for name in ('documents', 'dropped_documents', 'tokens', 'dropped_tokens')))
    if large:
      logging.warning('%s', dropped)
    else:
      say(dropped)
  if about['dropped_validation_documents'] > LARGE * about['read_validation_documents']:
    why = 'have at most {prefix_tokens} tokens'
    if about.get('conversations'):
      why = 'have no answer in their first {eval_len} tokens'
    counts = about['dropped_validation_documents'], about['read_validation_documents']
    logging.warning('%d of %d validation documents %s and are left out', *counts, why.format(**about))
  if copies := describe_copies(about):
    logging.warning('%s', copies)
  if equal := describe_equal_validation(about):
    say(equal)
  if skipped := describe_skipped(about):
    say(skipped)
