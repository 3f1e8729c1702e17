"""The stage `tokenize`: trains a tokenizer and makes sequences of all documents.

Text is divided into parts, and the parts among the processes of the job. Each part is kept as soon as it is complete,
so that a resumed run makes only the missing ones. They are in `tokenize-<digest>/` with a digest of the content of the
text and the tokenizer, so that parts of other text or another tokenizer are not mixed in.
"""

import collections
import functools
import hashlib
import json
import logging
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import owners, settings
from dipaco_jax.config.extension import is_reference
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import (
  answers,
  corpus,
  equality,
  left_out,
  own_tokenizer,
  sequences,
  source,
  tokenizer,
  tokenizer_files,
)
from dipaco_jax.data.cutting import Cutting
from dipaco_jax.huggingface import model_folder, tokenizer_json
from dipaco_jax.pipeline import input_records, inputs, run as run_lib
from dipaco_jax.processes import display, processes
from dipaco_jax.storage import files, publishing, seals

Path = pathlib.Path
LIMITED = 0.95  # of a limit of documents: fewer are all there are; draws of validation text are not exact


def tokenize(run: run_lib.Run) -> dict[str, Any]:
  """Trains or opens a tokenizer, and makes sequences of at most seq_len tokens of all documents; returns figures."""
  s = run.settings
  check_init(s)
  inputs.note_inputs(run, 'tokenize')
  folder, held = find_folder(run.workdir), corpus.plan_held_back(s)
  share = jax.process_index(), jax.process_count()
  is_done = processes.any_process((run.workdir / 'sequences').exists(), 'sequences')  # or only its record was gone
  held_text = corpus.NOTHING if is_done else _read_held_text(run, folder, share, held)
  if s.tokenizer.model_file:
    run.disk.only_first(lambda: _keep(run, model_folder.open_tokenizer(s).files), 'tokenizer')
  elif not is_reference(s.tokenizer.kind) and not processes.any_process(_is_kept(run), 'tokenizer'):
    # A part's own sample: the lowest hashes of all are among the lowest of the parts.
    samples = [folder / f'sample-{k}.json' for k in range(s.data.parts)]
    _sample(s, samples, share, held, held_text)
    run.disk.gather('samples', f'{folder.name}/sample-*')
    run.disk.only_first(lambda: _keep(run, _train(run, samples)), 'trained tokenizer')
  if not is_done:
    write_parts(run, folder / 'sequences', share, held, held_text)
    run.disk.gather('sequences in parts', f'{folder.name}/sequences/*')
    run.disk.only_first(lambda: _publish(run, folder, held), 'published sequences')
  result = seals.read_json(run.workdir / 'sequences' / 'meta.json', 'vocab_size', 'domains')
  for domain in result['domains'] if is_by_owner(s) else ():
    owners.check_domain(Grid(s.grid), domain)
  return result


def is_by_owner(s: settings.Settings) -> bool:
  """Returns whether the text of a config is that of owners, whose names its domains are."""
  return s.routing.method == 'owner' and not s.data.own_text


def _keep(run: run_lib.Run, contents: Mapping[str, bytes]):
  """Writes a tokenizer's files; the one that identifies it as a tokenizer comes last."""
  for name in reversed(tokenizer_files.FILES):
    if name in contents:
      publishing.write_sealed(run.workdir / name, contents[name])


def _is_kept(run: run_lib.Run) -> bool:
  return any((run.workdir / name).exists() for name in (tokenizer_files.MODEL, tokenizer_files.JSON))


def find_folder(workdir: Path) -> Path:
  """Returns the folder of parts made from the recorded inputs of the stage."""
  digests = input_records.read_inputs(workdir).digests('tokenize')
  return workdir / f'tokenize-{hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:12]}'


def _read_held_text(
  run: run_lib.Run, folder: Path, share: publishing.Share, held: corpus.HeldBack
) -> equality.HeldText:
  """Reads which contents are validation text, each process those of its parts; returns them all."""
  s = run.settings
  if held.how == 'documents':  # whose draws keep the splits apart
    return corpus.NOTHING
  parts = [folder / f'validation-{k}.json' for k in range(s.data.parts)]
  with display.doing('reading validation text'):
    for k in publishing.missing(parts, share):
      held_text = list(corpus.read_held_text(source.settings_of(s), (k, s.data.parts), held.fraction))
      publishing.write_sealed(parts[k], json.dumps(held_text).encode())
  run.disk.gather('validation text', f'{folder.name}/validation-*')
  check_parts(parts)
  return equality.HeldText(row for file in parts for row in json.loads(seals.read(file)))


def _sample(
  s: settings.Settings,
  samples: list[Path],
  share: publishing.Share,
  held: corpus.HeldBack,
  held_text: equality.HeldText,
):
  with display.doing('reading text for the tokenizer'):
    for k in publishing.missing(samples, share):
      part, data = (k, s.data.parts), source.settings_of(s)
      documents = corpus.documents(data, 'train', part, held.fraction, held_text=held_text)
      sample = json.dumps(tokenizer.sample(documents, s.tokenizer.sample_bytes, s.seed))
      publishing.write_sealed(samples[k], sample.encode())


def _train(run: run_lib.Run, samples: list[Path]) -> Mapping[str, bytes]:
  s = run.settings
  inputs.check_unchanged(run, 'tokenize')
  check_parts(samples)
  documents = (document for file in samples for document in json.loads(seals.read(file)))
  drawn = tokenizer.sample(documents, s.tokenizer.sample_bytes, s.seed)
  with display.doing('training the tokenizer'):
    return tokenizer_files.train((text for _, text in drawn), s.tokenizer)


def check_parts(parts: list[Path]):
  """Raises InputError if a part is missing, though all processes have done theirs."""
  if missing := publishing.missing(parts, (0, 1)):
    raise InputError(f'parts {missing} of the text were read from other files: all processes must see the same files')


def write_parts(
  run: run_lib.Run,
  folder: Path,
  share: publishing.Share,
  held: corpus.HeldBack,
  held_text: equality.HeldText | None = None,
):
  """Writes the parts of a share that are missing; see `corpus.documents` for `held_text`."""
  s = run.settings
  parts, done = s.data.parts, 0
  cutting = cutting_of(run, held.sequences)
  documents = functools.partial(corpus.documents, source.settings_of(s), fraction=held.fraction, held_text=held_text)
  missing = publishing.missing([folder / str(k) for k in range(parts)], share)
  total = most_documents(s.data) * len(missing) // parts
  shown = display.Progress('tokenize', total, 'documents')
  for number, k in enumerate(missing, 1):

    def show(count: int, _, before=done, part=f'{number}/{len(missing)}'):
      shown.update(before + count, **({'part': part} if parts > 1 else {}))

    with publishing.publish_directory(folder / str(k)) as aside:
      omitted = left_out.Omitted(collections.Counter(), collections.Counter())
      of_part = functools.partial(documents, part=(k, parts), omitted=omitted)
      text = sequences.TextPart(of_part, k, parts, omitted, s.data.skip_bad_records)
      meta = sequences.write_part(text, run.tokenizer, str(aside), cutting, progress=show)
    done += meta['train']['documents'] + meta['validation']['documents']
  shown.close()


def cutting_of(run: run_lib.Run, pieces: int) -> Cutting:
  """Returns how a run cuts its documents, with `pieces` validation sequences of a piece of a longer text."""
  s = run.settings
  return Cutting(s.model.seq_len, run.eval_len, s.routing.prefix_tokens, pieces, s.data.format == 'messages')


def most_documents(data: settings.Data) -> int:
  """Returns how many documents a config allows, of both splits; 0: it does not limit them."""
  if not data.max_documents or (data.validation and not data.max_validation_documents):
    return 0
  return data.max_documents + (data.max_validation_documents if data.validation else 0)


def _publish(run: run_lib.Run, folder: Path, held: corpus.HeldBack):
  """Publishes `sequences/` when all parts exist, and removes temporary files."""
  sequences_folder, parts = folder / 'sequences', run.settings.data.parts
  inputs.check_unchanged(run, 'tokenize')
  check_parts([sequences_folder / str(k) for k in range(parts)])
  meta = sequences.merge_meta(str(sequences_folder), parts) | {
    'held_back': held.how,
    'validation_fraction': held.fraction,
  }
  check_rows(run.settings, meta['tokens'])
  left_out.log_all(meta, display.STDERR.note)
  _warn_of_limit(run.settings.data, meta)
  publishing.write_json(sequences_folder / 'meta.json', meta)
  files.put_in_place(sequences_folder, run.workdir / 'sequences')
  for left in run.workdir.glob('tokenize-*'):
    shutil.rmtree(left)


def _warn_of_limit(data: settings.Data, meta: Mapping[str, Any]):
  """Logs that config.data.max_documents has limited the user's text, if it has."""
  fraction = 0.0 if data.validation else meta['validation_fraction']
  if data.source != 'stdlib' and 0 < LIMITED * data.max_documents * (1 - fraction) <= meta['documents']:
    message = 'config.data.max_documents=%d: no more documents of the text are read; 0 reads all of them'
    logging.warning(message, data.max_documents)


def check_init(s: settings.Settings):
  """Raises InputError, before any work, if config.pretrain.init cannot be a path of this config."""
  if s.pretrain.init:
    model_folder.check_config(s)


def check_input(s: settings.Settings):
  """Raises InputError, before any work, if a model or tokenizer cannot be used, or text is far too short."""
  check_init(s)
  encoder = None
  if file := s.tokenizer.model_file:
    given = model_folder.open_tokenizer(s)
    _warn_of_export(file, given)
    if s.data.format == 'messages':
      encoder = answers.Encoder(given)
    else:
      _log_document_end(file, given)
  elif s.data.format == 'messages':
    fix = 'name an instruct model in config.pretrain.init, or its tokenizer in config.tokenizer.model_file'
    raise InputError(f"config.data.format='messages' needs a tokenizer with a chat template: {fix}")
  elif is_reference(s.tokenizer.kind):
    own_tokenizer.OwnTokenizer(s.tokenizer)
  fraction = corpus.plan_held_back(s).fraction
  check_validation(s, fraction)
  grid, most = Grid(s.grid), 0
  needed = _fewest_rows(s) * s.model.seq_len
  for document in corpus.documents(source.settings_of(s), 'train', fraction=fraction, held_text=corpus.NOTHING):
    if is_by_owner(s):
      owners.check_domain(grid, document.domain)
    if encoder:
      most += _count_checked(encoder, document, s)
    else:
      most += source.most_tokens(document.text)
    if most >= needed:
      return
  check_rows(s, most)


def _count_checked(encoder: answers.Encoder, conversation: Any, s: settings.Settings) -> int:
  """Returns the number of tokens of a conversation, 0 if it is to be left out; raises InputError if it is unfit."""
  cutting = Cutting(s.model.seq_len, s.model.seq_len, s.routing.prefix_tokens, conversations=True)
  try:
    return sum(map(len, encoder.cut(conversation, cutting, False).kept))
  except InputError:
    if s.data.skip_bad_records:
      return 0
    raise


def _warn_of_export(file: str, given: tokenizer.Tokenizer):
  try:
    tokenizer_json.check(given)
  except InputError as e:
    logging.warning('%s: no path of this run can be exported: %s', file, e)


def _log_document_end(file: str, given: tokenizer.Tokenizer):
  """Logs the token that ends documents if it is not the tokenizer's own `eos_token`."""
  if given.special.get(given.turn_end or '', given.eos_id) != given.eos_id:
    end = next((spelling for spelling, i in given.special.items() if i == given.eos_id), given.eos_id)
    logging.warning('%s: documents end with %s; %s, its eos_token, ends turns of a chat', file, end, given.turn_end)


def check_validation(s: settings.Settings, fraction: float):
  """Raises InputError if no validation document can be longer than the prefix, which no loss counts."""
  prefix, longest = s.num_unscored_tokens, 0
  for document in corpus.documents(corpus.unlimited(source.settings_of(s)), 'validation', fraction=fraction):
    longest = max(longest, source.most_tokens(document.text))
    if longest > prefix:
      return
  raise InputError(
    f'no document of validation is longer than config.routing.prefix_tokens={prefix}: the longest has at most '
    f'{longest} tokens; name longer ones in config.data.validation, or use more text'
  )


def _fewest_rows(s: settings.Settings) -> int:
  """Returns how many rows the text has to fill: a batch of every path, or of the base model if paths have own text."""
  if s.data.own_text:
    return s.pretrain.batch_size if s.pretrain.steps else 0
  return Grid(s.grid).num_paths * s.train.batch_size


def check_rows(s: settings.Settings, tokens: int):
  """Raises InputError if `tokens` tokens of text cannot fill a batch of every path."""
  rows, num_paths = tokens // s.model.seq_len, Grid(s.grid).num_paths
  if s.data.own_text and rows < _fewest_rows(s):
    batch = f'config.pretrain.batch_size={s.pretrain.batch_size} rows of {s.model.seq_len} tokens'
    raise InputError(f'{batch} are more than the {rows} rows of the public text: use a smaller batch, or more text')
  if rows < _fewest_rows(s):
    problem = f'but the text fills only {rows} rows: use a smaller grid or batch, or more text'
    each = f'config.train.batch_size={s.train.batch_size} rows of {s.model.seq_len} tokens each'
    raise InputError(f'config.grid has {num_paths} paths with {each}, {problem}')
