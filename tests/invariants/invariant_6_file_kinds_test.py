"""Invariant 6 for every kind of file: killed while its text is tokenized or trained on, the same modules."""

import json
import random
import signal

import corpora
import foreign_tokens
import pytest
import tiny_run

from dipaco_jax.data import json_tokenizer, tokenizer_files

SHORT = ('--config.pretrain.steps=4', '--config.train.phases=2', '--config.checkpoint.every_steps=3')
RECORDS = 'jsonl ndjson jsonl.gz jsonl.bz2 jsonl.xz jsonl.zst parquet arrow tar'.split()
KINDS = ['txt', *RECORDS, 'mixture', 'nanogpt', 'llm.c', 'megatron']


def write(kind, folder, records) -> list[str]:
  """Writes records as a kind of file, or as what a mixture is made of; returns the options that name them."""
  if kind == 'mixture':
    halves = [corpora.write_records(folder, 'parquet', records[i::2], stem) for i, stem in enumerate('ab')]
    return [f'--config.data.train={dict(zip("ab", ((half, i + 1) for i, half in enumerate(halves)), strict=True))}']
  if kind in RECORDS:
    return [f'--config.data.train={corpora.write_records(folder, kind, records)}']
  texts = [record['text'] for record in records]
  if kind == 'txt':
    (folder / 'a.txt').write_text('\n\n'.join(texts))
    return [f'--config.data.train={folder}/a.txt']
  for name, content in json_tokenizer.train(texts, 300).items():
    (folder / name).write_bytes(content)
  tokenizer = tokenizer_files.open_file(folder / 'tokenizer.json')
  ids, eos = [tokenizer.encode(text, eos=False).tolist() for text in texts], tokenizer.eos_id
  if kind == 'megatron':
    foreign_tokens.megatron(folder / 'a', [[[*document, eos]] for document in ids])
  else:
    {'nanogpt': foreign_tokens.nanogpt, 'llm.c': foreign_tokens.llm_c}[kind](folder / 'a.bin', ids, eos)
  return [f'--config.data.train={folder}/a.bin', f'--config.tokenizer.model_file={folder}/tokenizer.json']


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_killed_and_resumed(kind, tmp_path):
  config, draw = tiny_run.write_config(tmp_path), random.Random(kind)
  records = [json.loads(line) for line in (tmp_path / 'text.jsonl').read_text().splitlines()]
  options, workdir = [*write(kind, tmp_path, records), *SHORT], tmp_path / 'killed'
  start = lambda workdir: tiny_run.start(config, workdir, *options)  # noqa: E731
  tiny_run.finish(start(tmp_path / 'undisturbed'))
  part, at = draw.randrange(3), draw.randrange(1, 12)
  if KINDS.index(kind) % 2:
    tiny_run.stop_when(start(workdir), lambda: tiny_run.updates(workdir, 'train') >= at, signal.SIGKILL)
  else:
    tiny_run.stop_when(start(workdir), lambda: any(workdir.glob(f'tokenize-*/sequences/*{part}*')), signal.SIGKILL)
    assert not (workdir / 'stages' / 'tokenize.json').exists()
  tiny_run.finish(start(workdir))
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(tmp_path / 'undisturbed')
  report = json.loads((workdir / 'report.json').read_text())
  assert report['bits_per_byte'] > 0 and report['validation_tokens'] > 1000
