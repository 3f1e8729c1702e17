"""Tokenized sequences before routing, in ArrayRecord, in parts that are made and kept one by one.

A training document is cut into sequences of at most `seq_len` tokens; a sequence is what is routed, by its own first
tokens [2.4]. A validation document gives its first `eval_len` tokens, or, if it is a piece of a longer text, some
sequences from all over it. Those of `prefix_tokens` or fewer are dropped, as no loss would count them, and counted
(`left_out`).

The folder of a part has `<split>.array_record`, in which a record is one sequence with the number of its document, so
that hold-outs are drawn by document, and the index of its domain; `<split>.documents` and `<split>.domains`, arrays of
the same numbers; `<split>.contents`, digests of the documents, by which equal ones are held back together;
`<split>.lengths`, the tokens of the whole document; `<split>.draws`, if any document has a draw, by which neighbouring
pieces are held back together; and, for validation, `<split>.bytes`, the UTF-8 bytes of the original text that the
tokens after the prefix stand for.
Memory for tokens does not grow with the text. Nothing here imports JAX.
"""

import collections
import contextlib
import functools
import itertools
import os
import pathlib
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import equality, left_out, prefetching, source
from dipaco_jax.storage import seals
from dipaco_jax.storage.records import read_across, read_meta, read_records, record_reader, record_writer, write_meta

BATCH_CHARS = 250_000  # of text tokenized by a thread at one time
MAX_DOMAINS = 256  # further ones count as 'other'
HEADER = struct.Struct('<IHH')  # document, domain, bytes of a token

Progress = Callable[[int, int | None], None]  # done, of how many where that is known


class Sequence(NamedTuple):
  """A sequence: tokens [at most seq_len], the number of their document, the index of its domain."""

  tokens: np.ndarray
  document: int
  domain: int


def write_part(
  make_documents: Callable[[str], Iterable],
  tokenizer,
  out_dir: str,
  *,
  seq_len: int,
  eval_len: int,
  prefix_tokens: int,
  pieces: int = 1,
  part: tuple[int, int] = (0, 1),
  progress: Progress = lambda done, total: None,
  threads: int = 0,
  skipped: collections.Counter[str] | None = None,
  copies: collections.Counter[str] | None = None,
) -> dict[str, Any]:
  """Writes the sequences of a part of the text, both splits, and `meta.json`, whose content it returns.

  Args:
    make_documents: maps 'train' or 'validation' to the part's documents (id, text, domain, draw).
    tokenizer: has `encode_batch`, `byte_ends` and `vocab_size`.
    pieces: how many sequences a piece of a longer text gives in validation.
    part: (k, n) for documents with the numbers k, k + n, k + 2n...
    progress: called after each document with the number done, of both splits, and None.
    threads: how many tokenize; 0: one per core. The result is the same.
    skipped: the bad records that `make_documents` has left out so far, by kind.
    copies: the documents that it has left out so far as their content is validation text already, by split.
  """
  dtype = np.dtype('<u2' if tokenizer.vocab_size <= 1 << 16 else '<u4')
  domains: dict[str, int] = {}
  counts, done = {'train': no_counts(), 'validation': no_counts()}, itertools.count(1)
  by_domain = collections.defaultdict[str, collections.Counter[str]](collections.Counter)  # of training text
  for split, length in (('train', seq_len), ('validation', eval_len)):
    with _writer(os.path.join(out_dir, split)) as write:
      tokenized = _tokenized(make_documents(split), tokenizer, threads, split == 'validation')
      for number, (document, tokens, byte_ends) in enumerate(tokenized):
        cut = _cut_document(document, tokens.astype(dtype), byte_ends, length, prefix_tokens, pieces)
        domain = _counted_as(domains, document.domain)
        numbers = part[0] + part[1] * number, domains.setdefault(domain, len(domains))
        write(*numbers, document.content, document.draw, len(tokens), cut.kept, cut.num_bytes)
        size = sum(map(len, cut.kept))
        if split == 'train':
          by_domain[domain].update(documents=1, tokens=size, repeated=int(document.times > 0))
        counts[split].update(documents=1, sequences=len(cut.kept), tokens=size, **left_out.count(cut.long, cut.short))
        if (split, part[0], number + 1) == ('train', 0, left_out.EARLY_DOCUMENTS):
          left_out.warn_early(counts[split], prefix_tokens)
        progress(next(done), None)
    counts[split].update(copies=copies[split] if copies else 0)
  meta = counts | {'domains': list(domains), 'by_domain': by_domain, 'vocab_size': tokenizer.vocab_size}
  meta |= {'seq_len': seq_len, 'eval_len': eval_len, 'prefix_tokens': prefix_tokens}
  return write_meta(out_dir, meta | ({'skipped_records': skipped} if skipped else {}))


def merge_meta(folder: str, parts: int) -> dict[str, Any]:
  """Returns what `meta.json` holds of the parts in `folder`/<k>. Raises InputError where no document is long enough."""
  by_domain = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
  domains: dict[str, None] = {}
  train, validation = no_counts(), no_counts()
  skipped: collections.Counter[str] = collections.Counter()
  for k in range(parts):
    meta = read_meta(os.path.join(folder, str(k)))
    train.update(meta['train'])
    validation.update(meta['validation'])
    skipped.update(meta.get('skipped_records', {}))
    for name in meta['domains']:
      domains.setdefault(_counted_as(domains, name))
    for name, counts in meta.get('by_domain', {}).items():
      by_domain[_counted_as(domains, name)].update(counts)
  for split, count in (('train', train), ('validation', validation)):
    if not count['sequences']:
      prefix = meta['prefix_tokens']
      if split == 'train' and count['copies'] and not count['documents']:
        raise InputError(left_out.describe_no_training_text(count['copies']))
      fix = 'name longer ones in config.data.validation, or use more text' if split == 'validation' else 'use more text'
      raise InputError(f'no document of {split} is longer than config.routing.prefix_tokens={prefix} tokens: {fix}')
  return {
    'documents': train['documents'], 'sequences': train['sequences'], 'tokens': train['tokens'],
    'dropped_sequences': train['dropped'], 'dropped_documents': train['dropped_documents'],
    'dropped_tokens': train['dropped_tokens'], 'dropped_ends': train['dropped_ends'],
    'dropped_validation_documents': validation['dropped_documents'], 'skipped_records': skipped,
    'copies_of_validation': train['copies'], 'copies_in_validation': validation['copies'],
    'read_validation_documents': validation['documents'], 'validation_documents': validation['sequences'],
    'validation_tokens': validation['tokens'], 'vocab_size': meta['vocab_size'], 'domains': list(domains),
    'by_domain': by_domain, 'seq_len': meta['seq_len'], 'eval_len': meta['eval_len'], 'parts': parts,
    'prefix_tokens': meta['prefix_tokens'],
  }  # fmt: skip


def no_counts() -> collections.Counter[str]:
  return collections.Counter(dict.fromkeys(('documents', 'sequences', 'tokens', 'copies', *left_out.COUNTS), 0))


@contextlib.contextmanager
def _writer(stem: str) -> Iterator[Callable[..., None]]:
  """Yields a function that writes the sequences of a document.

  It is given (number, domain, content, draw, length, sequences, bytes of each sequence or None).
  """
  have_draws = have_bytes = False
  with (
    record_writer(f'{stem}.array_record') as records,
    open(f'{stem}.documents', 'wb') as documents,
    open(f'{stem}.domains', 'wb') as domains,
    open(f'{stem}.contents', 'wb') as contents_file,
    open(f'{stem}.lengths', 'wb') as lengths,
    open(f'{stem}.draws', 'wb') as draws,
    open(f'{stem}.bytes', 'wb') as sizes,
  ):

    def write(
      document: int,
      domain: int,
      content: int,
      draw: float,
      length: int,
      sequences: list[np.ndarray],
      num_bytes: list[int] | None,
    ):
      nonlocal have_draws, have_bytes
      have_draws = have_draws or draw >= 0
      have_bytes = have_bytes or num_bytes is not None
      for tokens in sequences:
        records.write(HEADER.pack(document, domain, tokens.itemsize) + tokens.tobytes())
      documents.write(np.full(len(sequences), document, '<u4').tobytes())
      domains.write(bytes([domain]) * len(sequences))
      contents_file.write(np.full(len(sequences), content, '<u8').tobytes())
      lengths.write(np.full(len(sequences), length, '<u4').tobytes())
      draws.write(np.full(len(sequences), draw, '<f4').tobytes())
      sizes.write(np.array(num_bytes or [], '<u4').tobytes())

    yield write
  if not have_draws:
    os.remove(f'{stem}.draws')
  if not have_bytes:
    os.remove(f'{stem}.bytes')


class _Cut(NamedTuple):
  """The sequences of a document."""

  kept: list[np.ndarray]
  num_bytes: list[int] | None  # of the text of each, after the prefix; None in training
  long: list[np.ndarray]  # than the prefix, of which `kept` may be a part
  short: list[np.ndarray]


def _cut_document(
  document: Any, tokens: np.ndarray, byte_ends: np.ndarray | None, length: int, prefix_tokens: int, pieces: int
) -> _Cut:
  """Cuts a document of training, or, where `byte_ends` are given, chooses the sequences that validate."""
  validates = byte_ends is not None
  in_pieces = validates and document.draw >= 0
  end = length if validates and not in_pieces else len(tokens)
  long, short = _cut(tokens[:end], length, prefix_tokens)
  kept = _spread(long, pieces, document.id) if in_pieces else long
  if byte_ends is None:
    return _Cut(kept, None, long, short)
  ends, _ = _cut(byte_ends[:end], length, prefix_tokens)
  kept_ends = _spread(ends, pieces, document.id) if in_pieces else ends
  return _Cut(kept, [int(x[-1] - x[max(prefix_tokens, 1) - 1]) for x in kept_ends], long, short)


def _cut(tokens: np.ndarray, length: int, prefix_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Cuts tokens into sequences; returns those that are longer than the prefix, and the others."""
  cut = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
  long = [sequence for sequence in cut if len(sequence) > prefix_tokens]
  return long, [sequence for sequence in cut if len(sequence) <= prefix_tokens]


def _spread(sequences: list[np.ndarray], count: int, name: str) -> list[np.ndarray]:
  """Chooses `count` sequences, as far from each other as possible, from a beginning that depends on the name."""
  if count >= len(sequences):
    return sequences
  first = source.uniform(f'first of {name}')
  return [sequences[int((first + i) * len(sequences) / count)] for i in range(count)]


def _counted_as(domains: Collection[str], domain: str) -> str:
  """Returns the domain, or 'other' where there are too many for one more."""
  return domain if domain in domains or len(domains) < MAX_DOMAINS - 1 else 'other'


def _tokenized(
  documents: Iterable, tokenizer, threads: int, with_bytes: bool
) -> Iterator[tuple[Any, np.ndarray, np.ndarray | None]]:
  """Yields (document without its text, tokens, `byte_ends` or None).

  Threads suffice: tokenizers release Python's lock.
  """
  threads = threads or os.cpu_count() or 1

  def tokenize(batch: list) -> Iterable[tuple[Any, np.ndarray, np.ndarray | None]]:
    found = iter(tokenizer.encode_batch([document.text for document in batch if isinstance(document.text, str)]))
    tokens = [
      next(found) if isinstance(document.text, str) else _checked(document, tokenizer.vocab_size) for document in batch
    ]
    ends = [tokenizer.byte_ends(document.text) if with_bytes else None for document in batch]
    without_text = [document._replace(text='', extents=(equality.Extent(document.content),)) for document in batch]
    return zip(without_text, tokens, ends, strict=True)

  for batch in prefetching.prefetch(tokenize, _batches(documents), 2 * threads + 1, threads):
    yield from batch


def _checked(document: Any, vocab_size: int) -> np.ndarray:
  """Returns a document's tokens; raises InputError where the model has no row for one of them."""
  if document.text.max(initial=0) >= vocab_size:
    words = f'document {document.id} has token {document.text.max()}, and the vocabulary has {vocab_size}'
    raise InputError(f'{words}: leave out this document, or name another tokenizer in config.tokenizer.model_file')
  return document.text


def _batches(documents: Iterable) -> Iterator[list]:
  batch: list = []
  size = 0
  for document in documents:
    batch.append(document)
    size += len(document.text)
    if size >= BATCH_CHARS:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


class Sequences:
  """Random access to all sequences of a split, part after part."""

  def __init__(self, folder: str | os.PathLike, split: str, open_parts: int | None = None):
    """Reads the `meta.json` of a folder; other files are opened when they are first read. Raises seals.Damaged.

    Of `open_parts` parts the files stay open, as a reader takes 20 bytes a sequence; None: all.
    """
    meta = read_meta(os.fspath(folder))
    self.domains: list[str] = meta['domains']
    self._stems = [os.path.join(folder, str(k), split) for k in range(meta['parts'])]
    parts = [read_meta(os.path.dirname(stem)) for stem in self._stems]
    self.counts: list[int] = [part[split]['sequences'] for part in parts]  # of sequences, by part
    numbers = {name: i for i, name in enumerate(self.domains)}  # each part has numbers of its own
    self._domains = [
      np.array([numbers[name if name in numbers else 'other'] for name in part['domains']], np.uint8) for part in parts
    ]
    self._reader = functools.lru_cache(open_parts)(lambda k: record_reader(f'{self._stems[k]}.array_record'))

  def __len__(self) -> int:
    return sum(self.counts)

  def __getitem__(self, index: int) -> Sequence:
    return self.read([range(len(self))[index]])[0]

  def read(self, indices: Iterable[int]) -> list[Sequence]:
    """Reads the sequences at `indices`, in their order."""
    return read_across(self.counts, indices, self._read_part)

  def _read_part(self, k: int, numbers: list[int]) -> list[Sequence]:
    found = []
    for record in read_records(f'{self._stems[k]}.array_record', self._reader(k), numbers):
      document, domain, itemsize = HEADER.unpack_from(record)
      tokens = np.frombuffer(record, f'<u{itemsize}', offset=HEADER.size)
      found.append(Sequence(tokens, document, int(self._domains[k][domain])))
    return found

  def columns(self) -> tuple[np.ndarray, np.ndarray]:
    """Reads the documents, uint32 [N], and the domains, uint8 [N], of all sequences."""
    documents, domains = np.empty(len(self), np.uint32), np.empty(len(self), np.uint8)
    end = 0
    for stem, count, renumbered in zip(self._stems, self.counts, self._domains, strict=True):
      begin, end = end, end + count
      documents[begin:end] = _column(pathlib.Path(f'{stem}.documents'), '<u4', count)
      domains[begin:end] = renumbered[_column(pathlib.Path(f'{stem}.domains'), 'u1', count)]
    return documents, domains

  def contents(self) -> np.ndarray:
    """Reads the digests of all sequences' documents, uint64 [N]; raises InputError where nobody kept them."""
    return self._all_of('contents', '<u8')

  def lengths(self) -> np.ndarray:
    """Reads the tokens of all sequences' whole documents, uint32 [N]; raises InputError where nobody counted them."""
    return self._all_of('lengths', '<u4')

  def _all_of(self, name: str, dtype: str) -> np.ndarray:
    files = [pathlib.Path(f'{stem}.{name}') for stem in self._stems]
    if not all(map(seals.is_expected, files)):
      raise InputError(
        f'this text was tokenized before {name} of documents were kept: tokenize it again, without --reuse'
      )
    return np.concatenate([_column(file, dtype, count) for file, count in zip(files, self.counts, strict=True)])

  def scored_bytes(self) -> np.ndarray | None:
    """Reads the bytes of text of all sequences after their prefix, uint32 [N]; None where they were not counted."""
    files = [pathlib.Path(f'{stem}.bytes') for stem in self._stems]
    if not all(seals.is_expected(file) for file, count in zip(files, self.counts, strict=True) if count):
      return None
    return np.concatenate(
      [_column(file, '<u4', count) for file, count in zip(files, self.counts, strict=True) if count]
    )

  def draws(self) -> np.ndarray | None:
    """Reads the draws of all sequences' documents, float32 [N], -1 for those without; None where none has one."""
    files = [pathlib.Path(f'{stem}.draws') for stem in self._stems]
    has_draws = [seals.is_expected(file) for file in files]
    if not any(there and count for there, count in zip(has_draws, self.counts, strict=True)):
      return None
    parts = zip(files, has_draws, self.counts, strict=True)
    return np.concatenate(
      [_column(file, '<f4', count) if there else np.full(count, -1, '<f4') for file, there, count in parts]
    )


def _column(file: pathlib.Path, dtype: str, count: int) -> np.ndarray:
  with seals.reading(file):
    found = np.fromfile(file, dtype)
  if len(found) != count:
    raise seals.Damaged(file)
  return found
