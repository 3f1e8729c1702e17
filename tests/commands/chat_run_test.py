"""An instruct model becomes a grid on conversations, which answers: by the commands of docs/own_text.md."""

import json
import pathlib
import random
import subprocess
import sys

import chats
import model_folders
import numpy as np
import pytest
import tiny_run

from dipaco_jax.data import packing
from dipaco_jax.models import loss
from dipaco_jax.pipeline import answer_losses, resharding_round, run as run_lib, stage_records
from dipaco_jax.storage import module_store

SMALL = (
  'train.phases=3 train.steps_per_phase=6 train.batch_size=4 model.seq_len=64 routing.sample=200 '
  'inner.rewarm_steps=2 inner.learning_rate=0.01 train.steps_per_dispatch=3 data.validation_fraction=0.2'
).split()


TEMPLATE = (
  '{% for m in messages %}{{ m.role[0] }}>{{ m.content }}{{ eos_token }}{% endfor %}'
  '{% if add_generation_prompt %}a>{% endif %}'
)
WORDS = [json.loads(line)['text'] for line in tiny_run.make_lines(300).splitlines()]


def write_conversations(file: pathlib.Path, count: int = 300):
  draw, lines = random.Random(0), []
  for i in range(count):
    letters = ('abcd', 'wxyz')[i % 2]
    words = [''.join(draw.choice(letters) for _ in range(4)) for _ in range(draw.randint(1, 3))]
    messages = chats.chat(*(text for word in words for text in (f'say {word}', word)))
    lines.append(json.dumps({'messages': messages, 'domain': letters}))
  file.write_text('\n'.join(lines) + '\n')


@pytest.fixture(scope='module')
def workdir(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('chat')
  write_conversations(folder / 'chats.jsonl')
  model_folders.write(folder / 'model', 'llama3', WORDS)
  (folder / 'model' / 'chat_template.jinja').write_text(TEMPLATE)
  options = [f'--config.data.train={folder}/chats.jsonl', *(f'--config.{option}' for option in SMALL)]
  tiny_run.run(f'chat:{folder}/model', folder / 'run', *options)
  return folder / 'run'


pytestmark = pytest.mark.slow


def test_answers_are_learned_and_reported_by_their_place(workdir):
  report = json.loads((workdir / 'report.json').read_text())
  assert report['perplexity'] < 0.8 * report['base_perplexity'] and report['paths'] == 4
  assert {*report['perplexity_by_answer']} == {*report['base_perplexity_by_answer']} == {'1', '2', '3'}
  assert 'by their place in a conversation' in (workdir / 'report.html').read_text()
  counted = report['validation_tokens']
  run = run_lib.unattended(workdir, stage_records.read_settings(workdir), 1)
  sequences = run.sequences('validation')
  assert counted == sum(sequence.num_scored(0) for sequence in sequences.read(range(len(sequences))))


def test_perplexity_by_place_is_that_of_whole_logits(workdir):
  run = run_lib.unattended(workdir, stage_records.read_settings(workdir), 1)
  validation, paths_N = run.sequences('validation'), run.last_routes()
  nats, tokens = np.zeros(4), np.zeros(4)
  for n, sequence in enumerate(validation.read(range(len(validation)))):
    params = module_store.load_path(run.workdir, run.layout, int(paths_N[n]))
    rows = packing.pad([sequence.to_pack], run.eval_len)
    nll_L = np.asarray(loss.token_losses(run.model, params, *rows))[0]
    [places] = answer_losses.number_answers([sequence])
    for at in range(1, len(places)):
      nats[places[at]] += nll_L[at - 1]
      tokens[places[at]] += 1
  found = json.loads((workdir / 'report.json').read_text())['perplexity_by_answer']
  for place in (1, 2, 3):
    np.testing.assert_allclose(found[str(place)], np.exp(nats[place] / tokens[place]), rtol=1e-4)


def test_answers_alone_count_where_text_is_sharded_anew(workdir):
  run = run_lib.unattended(workdir, stage_records.read_settings(workdir), 1)
  train, indices = run.sequences('train'), np.array([3, 8])
  found = resharding_round.log_likelihoods(run, 3, indices, np.array([0, 1]), np.array([2, 1]))
  for sequence, path, score in zip(train.read(indices), (2, 1), found, strict=True):
    params = module_store.load_path(run.workdir, run.layout, path, 3)
    nll_L = loss.token_losses(run.model, params, *packing.pad([sequence.to_pack], run.settings.model.seq_len))
    np.testing.assert_allclose(score, -np.asarray(nll_L).sum(), rtol=1e-5)
    assert sequence.num_scored(0) < len(sequence.tokens) - 1


def test_a_path_answers(workdir):
  command = [sys.executable, '-m', 'dipaco_jax.generate', f'--workdir={workdir}', '--chat', '--prompt=say abcd']
  done = subprocess.run([*command, '--max_tokens=8', '--temperature=0'], capture_output=True, text=True, timeout=200)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() and not {*done.stdout.strip()} & {*'sy '}, done.stdout  # an answer, not the question


def test_a_tokenizer_without_a_template_is_an_error_before_any_work(tmp_path):
  write_conversations(tmp_path / 'chats.jsonl')
  model_folders.write(tmp_path / 'model', 'llama3', WORDS)
  begun = tiny_run.start(f'chat:{tmp_path}/model', tmp_path / 'run', f'--config.data.train={tmp_path}/chats.jsonl')
  assert 'the tokenizer has no chat template' in tiny_run.finish(begun, 2)
  begun = tiny_run.start(
    'tiny', tmp_path / 'run2', f'--config.data.train={tmp_path}/chats.jsonl', '--config.data.format=messages'
  )
  assert 'needs a tokenizer with a chat template' in tiny_run.finish(begun, 2)
