"""The text of one owner, on a machine of the owner: tokenized, routed among the owner's paths, and sharded.

A run whose config has `data.own_text` has no text of the paths in one place. In the place of the stages `tokenize` and
`route`, each owner makes `sequences/`, `routing/0/` and `shards/0/` of its own text, with the tokenizer, the base model
and the validation text of the run, which are public. Nothing of it is read elsewhere: others need only `summarize`.

Text and hold-outs are those that one job has that reads all text (`data.own_text=False`), if texts are records, which
are held out by a hash of their content, and `data.parts` is 1.
"""

import collections
import dataclasses
import functools
import hashlib
import hmac
import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import content, corpus, equality, left_out, loader, sequences, shards, source, source_files
from dipaco_jax.models import loss
from dipaco_jax.pipeline import features, route_stage, run as run_lib, tokenize_stage
from dipaco_jax.processes import display
from dipaco_jax.routing import own_router, router
from dipaco_jax.storage import files, publishing, seals, tensors

TREES = ('sequences', 'routing/0', 'shards/0')
KEY = 'key'  # a file of the shards, so that the digest of their index depends on the secret
MADE_OF = 'own_text.json'  # the digest of the text of which there are sequences
ROWS = 256  # whose targets are counted at one time


class Text(NamedTuple):
  """An owner's text, and what it may not be trained on."""

  owner: str
  globs: tuple[str, ...]
  validation: equality.HeldText = corpus.NOTHING  # public validation text
  key: str = ''  # secret of the owner, which digests of the shards depend on


def text_settings(s: settings_lib.Settings, globs: Sequence[str]) -> source.TextSettings:
  """Returns the settings of an owner's text: all of it, from files, none of it for validation."""
  others: dict[str, Any] = dict.fromkeys(('name', 'data_dir', 'module'), '')
  public = dataclasses.replace(source.settings_of(s), source='files', max_documents=0, own_text=False, **others)
  return dataclasses.replace(public, train=tuple(globs), validation=())


def check(s: settings_lib.Settings, text: Text):
  """Raises InputError if an owner's text cannot be read, or has too few long documents for a row of each path."""
  prefix, paths = s.num_unscored_tokens, owners.paths_of(Grid(s.grid), text.owner)
  data = text_settings(s, text.globs)
  source_files.check_beginnings(data)
  num_long = 0
  for document in corpus.documents(data, 'train', fraction=0.0, held_text=corpus.NOTHING):
    num_long += source.most_tokens(document.text) > prefix
    if num_long > len(paths):  # one more, which may be held out
      return
  found = f'{num_long} documents are longer than config.routing.prefix_tokens={prefix}'
  if s.data.format == 'messages':
    found = f'there are {num_long} conversations'
  rows = f'a row of each of the {len(paths)} paths of {text.owner} and a hold-out'
  raise InputError(f'--data: {found}, too few for {rows}: name more text')


def make(run: run_lib.Run, text: Text) -> dict[str, Any]:
  """Makes what is missing of an owner's sequences, routes and shards in the workdir; returns their summary."""
  digest = digest_text(run.settings, text)
  made_of = run.workdir / MADE_OF
  if not seals.keep_if_whole(made_of) or seals.read_json(made_of)['digest'] != digest:
    for left in (*TREES, 'features'):
      shutil.rmtree(run.workdir / left, ignore_errors=True)
    publishing.write_json(made_of, {'digest': digest})
  if not (run.workdir / 'sequences').exists():
    _tokenize(run, text, run.workdir / f'tokenize-{digest[:12]}')
  if not _has_shards(run, text) or not (run.workdir / 'routing' / '0').exists():
    shutil.rmtree(run.workdir / 'shards' / '0', ignore_errors=True)
    _shard(run, text, _route(run, text.owner))
  return summarize(run, text)


def _has_shards(run: run_lib.Run, text: Text) -> bool:
  """Returns whether there are shards with the owner's key."""
  file = run.workdir / 'shards' / '0' / KEY
  return file.exists() and file.read_text() == text.key


def digest_text(s: settings_lib.Settings, text: Text) -> str:
  """Returns a digest of the contents of an owner's files."""
  contents = content.of_text(text_settings(s, text.globs))
  digests = content.Digests({})
  named = {field: digests.of_content(of) for field, of in sorted(contents.items())}
  return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _tokenize(run: run_lib.Run, text: Text, folder: pathlib.Path):
  """Writes `sequences/`: the owner's training text; parts that are there are kept."""
  s, data = run.settings, text_settings(run.settings, text.globs)
  cutting = tokenize_stage.cutting_of(run, 0)
  parts = [folder / 'sequences' / str(k) for k in range(s.data.parts)]
  for k in publishing.missing(parts, (0, 1)):
    omitted = left_out.Omitted(collections.Counter(), collections.Counter())
    documents = functools.partial(_documents, data, text.validation, (k, len(parts)), omitted)
    with publishing.publish_directory(parts[k]) as aside, display.doing('tokenizing'):
      part = sequences.TextPart(documents, k, len(parts), omitted, s.data.skip_bad_records)
      sequences.write_part(part, run.tokenizer, str(aside), cutting)
  meta = sequences.merge_meta(str(folder / 'sequences'), len(parts), validates=False)
  publishing.write_json(folder / 'sequences' / 'meta.json', meta)
  files.put_in_place(folder / 'sequences', run.workdir / 'sequences')
  for left in run.workdir.glob('tokenize-*'):
    shutil.rmtree(left)


def _documents(
  data: source.TextSettings, held_text: equality.HeldText, part: source.Part, omitted: left_out.Omitted, split: str
) -> Iterator[Any]:
  """Yields the documents of a split; there are none for validation."""
  if split == 'train':
    yield from corpus.documents(data, 'train', part, fraction=0.0, held_text=held_text, omitted=omitted)


def _route(run: run_lib.Run, owner: str) -> np.ndarray:
  """Returns the path of each sequence, int32 [N, 1]: the owner's only one, or by k-means of the base's features."""
  paths = np.array(owners.paths_of(run.layout.grid, owner), np.int32)
  folder = run.workdir / 'routing' / '0'
  if not folder.exists():
    with publishing.publish_directory(folder) as aside:
      paths_N, others = _among(run, paths)
      np.save(aside / 'train.npy', paths_N[:, None])
      for name, data in others.items():
        (aside / name).write_bytes(data)
  return tensors.read_array(folder / 'train.npy')


def _among(run: run_lib.Run, paths: np.ndarray) -> tuple[np.ndarray, dict[str, files.Data]]:
  """Returns the path of each sequence, [N], of these, and files of the router."""
  count = len(run.sequences('train'))
  if len(paths) == 1:
    return np.full(count, paths[0]), {}
  s, routed_by_N = run.settings, features.routed_by(run)
  candidates = np.unique(routed_by_N)
  drawn = candidates[np.sort(np.random.default_rng(s.seed).permutation(len(candidates))[: s.routing.sample])]
  z_ND = np.concatenate(list(features.compute(run, 'train', drawn)))
  fitted = router.fit('kmeans', jax.random.key(s.seed), jnp.asarray(z_ND), (len(paths),), s.routing)
  chosen_N = np.concatenate([np.asarray(router.route(fitted, z, 1)) for z in features.compute(run, 'train')])[:, 0]
  return paths[chosen_N[routed_by_N]], {'router.safetensors': tensors.to_bytes(own_router.arrays(fitted))}


def _shard(run: run_lib.Run, text: Text, paths_N1: np.ndarray):
  """Writes `shards/0/` of the owner's paths. Raises InputError if one of them has no text."""
  s, num_paths = run.settings, run.layout.grid.num_paths
  paths = owners.paths_of(run.layout.grid, text.owner)
  folder, dealt = run.workdir / 'shards' / '0-parts', route_stage.deal(run, paths_N1, num_paths)
  shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
  for path in paths:
    with publishing.publish_directory(folder / str(path)) as aside:
      shards.write_shard(run.sequences('train', open_parts=1), dealt, path, str(aside), s.model.seq_len)
  meta = shards.merge_meta(str(folder), num_paths, s.model.seq_len, own_paths=paths)
  for path in paths:
    if not meta['shard_rows'][path]:
      name = run.layout.grid.path_name(path)
      raise InputError(
        f'--data: path {name} gets no row of the text of {text.owner}: name more text, or use fewer paths'
      )
  meta['shard_documents'] = [len(np.unique(dealt.documents[_trains(dealt, p)])) for p in range(num_paths)]
  publishing.write_json(folder / 'meta.json', meta)
  files.write_file(folder / KEY, text.key.encode())
  files.put_in_place(folder, run.workdir / 'shards' / '0')


def _trains(dealt: shards.Dealt, path: int) -> np.ndarray:
  """Returns whether each sequence trains a path, bool [N]."""
  return (dealt.assignment[:, 0] == path) & ~dealt.held


def summarize(run: run_lib.Run, text: Text) -> dict[str, Any]:
  """Returns all that others need to know of an owner's text, by path: sizes, and the keyed sha256 of the shard."""
  meta, limit = run.shards_meta(0), run.settings.train.max_holdout_rows
  summary = {}
  for path in owners.paths_of(run.layout.grid, text.owner):
    folder, rows = run.workdir / 'shards' / '0' / str(path), meta['holdout_rows'][path]
    summary[str(path)] = {
      'tokens': meta['shard_tokens'][path],
      'documents': meta['shard_documents'][path],
      'holdout_targets': _count_targets(run, folder / 'holdout.array_record', min(rows, limit or rows)),
      'sha256': _digest_shard(folder, text.key),
    }
  return summary


def _digest_shard(folder: pathlib.Path, key: str) -> str:
  """Returns the HMAC-SHA256 over the files of a shard: who lacks the key cannot compare it with that of a guess."""
  digests = files.digests(folder, (str(file.relative_to(folder)) for file in files.complete_files(folder)))
  return hmac.digest(key.encode(), json.dumps(sorted(digests.items())).encode(), 'sha256').hex()


def _count_targets(run: run_lib.Run, file: pathlib.Path, rows: int) -> int:
  """Returns the number of targets that count in the first rows of a hold-out."""
  s, count = run.settings, 0
  for start in range(0, rows, ROWS):
    tokens_BL, segments_BL = map(
      jnp.asarray, loader.read_rows(str(file), start, min(start + ROWS, rows), s.model.seq_len)
    )
    count += int(loss.targets(tokens_BL, segments_BL, s.num_unscored_tokens)[1].sum())
  return count
