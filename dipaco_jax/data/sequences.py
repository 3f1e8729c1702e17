"""Tokenized sequences before routing, in ArrayRecord files, written in parts.

A training document is cut into sequences of at most `seq_len` tokens; a sequence is what is routed, by its own first
tokens [2.4]. A validation document gives its first `eval_len` tokens, or, if it is a piece of a longer text, some
sequences from all over it. Those of `prefix_tokens` or fewer are dropped, as no evaluation would count them, and
counted (`left_out`). Conversations are cut by `answers`.

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
from dipaco_jax.data import answers, equality, left_out, prefetching
from dipaco_jax.data.cutting import Cut, Cutting, cut_document
from dipaco_jax.storage import seals
from dipaco_jax.storage.records import read_across, read_meta, read_records, record_reader, record_writer, write_meta

BATCH_CHARS = 250_000  # of text tokenized by a thread at one time
MAX_DOMAINS = 256  # further ones count as 'other'
DTYPES = {'documents': '<u4', 'domains': 'u1', 'contents': '<u8', 'lengths': '<u4', 'draws': '<f4'}  # see `_Columns`
HEADER = struct.Struct('<IHH')  # document, domain, bytes of a token
OF_CONVERSATION = 0x100  # added to the bytes: before the tokens come those that choose the path, behind their number
COUNT = struct.Struct('<I')

Progress = Callable[[int, int | None], None]  # done, of how many where that is known


class Sequence(NamedTuple):
  """A sequence: tokens [at most seq_len], the number of their document, the index of its domain."""

  tokens: np.ndarray
  document: int
  domain: int
  marked: np.ndarray | None = None  # of a conversation: its tokens, int32, of which given ones are ~t (`answers`)
  routed: np.ndarray | None = None  # of a conversation: the tokens that choose its path

  @property
  def to_pack(self) -> np.ndarray:
    """The tokens as `packing` takes them."""
    return self.tokens if self.marked is None else self.marked

  def prefix(self, num_tokens: int) -> np.ndarray:
    """Returns the tokens that choose the path: `num_tokens`, or of a conversation perhaps fewer."""
    return (self.tokens if self.routed is None else self.routed)[:num_tokens]

  def num_scored(self, num_unscored: int) -> int:
    """Returns the number of tokens that evaluation counts: all but the first `num_unscored`, or those not given."""
    return len(self.tokens) - num_unscored if self.marked is None else int((self.marked[1:] >= 0).sum())


class TextPart(NamedTuple):
  """A part of a text: of n `parts`, part `number` k has the documents with the numbers k, k + n, k + 2n..."""

  documents: Callable[[str], Iterable]  # 'train' or 'validation' -> the part's documents (id, text, domain, draw)
  number: int = 0
  parts: int = 1
  omitted: left_out.Omitted = left_out.NOTHING  # counted while `documents` are read
  skip_bad_records: bool = False  # whether to leave out conversations that the chat template rejects


def write_part(
  text: TextPart,
  tokenizer,
  out_dir: str,
  cutting: Cutting,
  progress: Progress = lambda done, total: None,
  threads: int = 0,
) -> dict[str, Any]:
  """Writes the sequences of a part of the text, both splits, and `meta.json`, whose content it returns.

  Args:
    tokenizer: has `encode_batch`, `byte_ends` and `vocab_size`.
    progress: called after each document with the number done, of both splits, and None.
    threads: how many tokenize; 0: one per core. The result is the same.
  """
  counts = _Counts()
  done = itertools.count(1)
  cut_batch = functools.partial(_cut_texts, tokenizer, cutting)
  if cutting.conversations:
    cut_batch, threads = functools.partial(_cut_conversations, answers.Encoder(tokenizer), text, cutting), 1
  for split, count in counts.by_split.items():
    with _writer(os.path.join(out_dir, split)) as write:
      tokenized = _tokenize(text.documents(split), cut_batch(split == 'validation'), threads)
      for number, (document, num_tokens, cut) in enumerate(tokenized):
        domain = counts.add(split, document, cut)
        content, draw = document.content, document.draw
        write(_Columns(text.number + text.parts * number, domain, content, num_tokens, draw), cut)
        if (split, text.number, number + 1) == ('train', 0, left_out.EARLY_DOCUMENTS):
          left_out.warn_early(count, cutting)
        progress(next(done), None)
    count.update(copies=text.omitted.copies[split])
  skipped = text.omitted.bad_records
  meta = counts.meta() | {'vocab_size': tokenizer.vocab_size}
  meta |= {'seq_len': cutting.seq_len, 'eval_len': cutting.eval_len, 'prefix_tokens': cutting.prefix_tokens}
  meta |= {'conversations': True} if cutting.conversations else {}
  return write_meta(out_dir, meta | ({'skipped_records': skipped} if skipped else {}))


def _dtype(tokenizer) -> np.dtype:
  return np.dtype('<u2' if tokenizer.vocab_size <= 1 << 16 else '<u4')


class _Counts:
  """Counts of a part of the text, taken while its documents are written."""

  def __init__(self):
    self.by_split = {'train': no_counts(), 'validation': no_counts()}
    self.by_domain = collections.defaultdict[str, collections.Counter[str]](collections.Counter)  # of training text
    self.numbers: dict[str, int] = {}  # of domains

  def add(self, split: str, document: Any, cut: Cut) -> int:
    """Counts a document; returns the number of its domain."""
    num_tokens = sum(map(len, cut.kept))
    dropped = left_out.count(cut.long, cut.short)
    self.by_split[split].update(documents=1, sequences=len(cut.kept), tokens=num_tokens, **dropped)
    domain = _counted_as(self.numbers, document.domain)
    if split == 'train':
      self.by_domain[domain].update(documents=1, tokens=num_tokens, repeated=int(document.times > 0))
    return self.numbers.setdefault(domain, len(self.numbers))

  def meta(self) -> dict[str, Any]:
    return self.by_split | {'domains': list(self.numbers), 'by_domain': self.by_domain}


def merge_meta(folder: str, parts: int, validates: bool = True) -> dict[str, Any]:
  """Returns what `meta.json` holds of the parts in `folder`/<k>. Raises InputError if no document is long enough.

  `validates`: whether a text needs documents of validation.
  """
  by_domain = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
  domains: dict[str, None] = {}
  train = no_counts()
  validation = no_counts()
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
  for split, count in (('train', train), *([('validation', validation)] if validates else [])):
    if not count['sequences']:
      prefix = meta['prefix_tokens']
      if split == 'train' and count['copies'] and not count['documents']:
        raise InputError(left_out.describe_no_training_text(count['copies']))
      if meta.get('conversations'):
        field, length = ('model', meta['seq_len']) if split == 'train' else ('evaluate', meta['eval_len'])
        rejected = ', or the chat template rejects it' if skipped[left_out.REJECTED] else ''
        problem = f'no conversation of {split} has an answer within its first {length} tokens{rejected}'
        raise InputError(f'{problem}: raise config.{field}.seq_len, or use other conversations')
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
    'prefix_tokens': meta['prefix_tokens'], **({'conversations': True} if meta.get('conversations') else {}),
  }  # fmt: skip


def no_counts() -> collections.Counter[str]:
  return collections.Counter(dict.fromkeys(('documents', 'sequences', 'tokens', 'copies', *left_out.COUNTS), 0))


class _Columns(NamedTuple):
  """What the files of a split hold of each sequence beside its tokens, in files of these names."""

  documents: int  # number of its document
  domains: int  # number of its domain in this part
  contents: int  # digest of its document
  lengths: int  # tokens of its whole document
  draws: float  # draw of its document, -1 if it has none


@contextlib.contextmanager
def _writer(stem: str) -> Iterator[Callable[[_Columns, Cut], None]]:
  """Yields a function that writes the sequences of a document."""
  filled: set[str] = set()  # which of the files that may be missing have content
  with contextlib.ExitStack() as stack:
    records = stack.enter_context(record_writer(f'{stem}.array_record'))
    files = {name: stack.enter_context(open(f'{stem}.{name}', 'wb')) for name in (*DTYPES, 'bytes')}

    def write(columns: _Columns, cut: Cut):
      if columns.draws >= 0:
        filled.add('draws')
      if cut.num_bytes is not None:
        filled.add('bytes')
      for tokens in cut.kept:
        kind, routed = tokens.itemsize, b''
        if cut.routed is not None:
          kind, routed = kind + OF_CONVERSATION, COUNT.pack(len(cut.routed)) + cut.routed.astype('<i4').tobytes()
        records.write(HEADER.pack(columns.documents, columns.domains, kind) + routed + tokens.tobytes())
      for name, value in columns._asdict().items():
        files[name].write(np.full(len(cut.kept), value, DTYPES[name]).tobytes())
      files['bytes'].write(np.array(cut.num_bytes or [], '<u4').tobytes())

    yield write
  for name in {'draws', 'bytes'} - filled:
    os.remove(f'{stem}.{name}')


def _counted_as(domains: Collection[str], domain: str) -> str:
  """Returns the domain, or 'other' where there are too many for one more."""
  return domain if domain in domains or len(domains) < MAX_DOMAINS - 1 else 'other'


# documents -> of each, its number of tokens and sequences; None: the chat template rejects it
CutBatch = Callable[[list], Iterable[tuple[int, Cut] | None]]


def _tokenize(documents: Iterable, cut_batch: CutBatch, threads: int) -> Iterator[tuple[Any, int, Cut]]:
  """Yields (document without its text, number of tokens, sequences); leaves out those that `cut_batch` does.

  Threads suffice: tokenizers release Python's lock.
  """
  threads = threads or os.cpu_count() or 1

  def tokenize(batch: list) -> Iterable[tuple[Any, int, Cut]]:
    without_text = [document._replace(text='', extents=(equality.Extent(document.content),)) for document in batch]
    both = zip(without_text, cut_batch(batch), strict=True)
    return [(document, *of_document) for document, of_document in both if of_document]

  for batch in prefetching.prefetch(tokenize, _batches(documents), 2 * threads + 1, threads):
    yield from batch


def _cut_texts(tokenizer: Any, cutting: Cutting, is_validation: bool) -> CutBatch:
  def cut_batch(batch: list) -> Iterator[tuple[int, Cut]]:
    encoded = iter(tokenizer.encode_batch([document.text for document in batch if isinstance(document.text, str)]))
    for document in batch:
      is_text = isinstance(document.text, str)
      tokens = next(encoded) if is_text else _checked(document, tokenizer.vocab_size)
      ends = tokenizer.byte_ends(document.text) if is_validation else None
      yield len(tokens), cut_document(document, tokens.astype(_dtype(tokenizer)), ends, cutting)

  return cut_batch


def _cut_conversations(encoder: answers.Encoder, text: TextPart, cutting: Cutting, is_validation: bool) -> CutBatch:
  def cut(document: Any) -> tuple[int, Cut] | None:
    try:
      of_document = encoder.cut(document, cutting, is_validation)
    except InputError as e:
      if not text.skip_bad_records:
        raise
      if not document.times:  # else it was counted when the mixture read the source before
        left_out.count_bad_record(text.omitted.bad_records, left_out.REJECTED, str(e))
      return None
    return sum(map(len, [*of_document.long, *of_document.short])), of_document

  return lambda batch: map(cut, batch)


def _checked(document: Any, vocab_size: int) -> np.ndarray:
  """Returns a document's tokens; raises InputError if the model has no row for one of them."""
  if document.text.max(initial=0) >= vocab_size:
    raise InputError(
      f'document {document.id} has token {document.text.max()}, and the vocabulary has {vocab_size}: leave out this '
      'document, or name another tokenizer in config.tokenizer.model_file'
    )
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
    sequences = []
    for record in read_records(f'{self._stems[k]}.array_record', self._reader(k), numbers):
      document, domain, kind = HEADER.unpack_from(record)
      at = document, int(self._domains[k][domain])
      if kind & OF_CONVERSATION:
        count, *_ = COUNT.unpack_from(record, HEADER.size)
        marked = np.frombuffer(record, '<i4', offset=HEADER.size + COUNT.size)
        sequences.append(Sequence(answers.plain(marked[count:]), *at, marked[count:], marked[:count]))
      else:
        sequences.append(Sequence(np.frombuffer(record, f'<u{kind}', offset=HEADER.size), *at))
    return sequences

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
    """Reads the digests of all sequences' documents, uint64 [N]; raises InputError if they were not kept."""
    return self._all_of('contents', '<u8')

  def lengths(self) -> np.ndarray:
    """Reads the tokens of all sequences' whole documents, uint32 [N]; raises InputError if they were not counted."""
    return self._all_of('lengths', '<u4')

  def _all_of(self, name: str, dtype: str) -> np.ndarray:
    files = [pathlib.Path(f'{stem}.{name}') for stem in self._stems]
    if not all(map(seals.is_expected, files)):
      raise InputError(
        f'this text was tokenized before {name} of documents were kept: tokenize it again, without --reuse'
      )
    return np.concatenate([_column(file, dtype, count) for file, count in zip(files, self.counts, strict=True)])

  def scored_bytes(self) -> np.ndarray | None:
    """Reads the bytes of text of all sequences after their prefix, uint32 [N]; None if they were not counted."""
    files = [pathlib.Path(f'{stem}.bytes') for stem in self._stems]
    if not all(seals.is_expected(file) for file, count in zip(files, self.counts, strict=True) if count):
      return None
    return np.concatenate(
      [_column(file, '<u4', count) for file, count in zip(files, self.counts, strict=True) if count]
    )

  def draws(self) -> np.ndarray | None:
    """Reads the draws of all sequences' documents, float32 [N], -1 for those without; None if none has one."""
    files = [pathlib.Path(f'{stem}.draws') for stem in self._stems]
    has_draws = [seals.is_expected(file) for file in files]
    if not any(has_draw and count for has_draw, count in zip(has_draws, self.counts, strict=True)):
      return None
    parts = zip(files, has_draws, self.counts, strict=True)
    return np.concatenate(
      [_column(file, '<f4', count) if has_draw else np.full(count, -1, '<f4') for file, has_draw, count in parts]
    )


def _column(file: pathlib.Path, dtype: str, count: int) -> np.ndarray:
  with seals.reading(file):
    values = np.fromfile(file, dtype)
  if len(values) != count:
    raise seals.Damaged(file)
  return values
