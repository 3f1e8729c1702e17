"""Tasks of the LM Evaluation Harness on a run get the scores of its paths."""

import json
import math
import os
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import small

from dipaco_jax.data import sentencepiece_tokenizer
from dipaco_jax.inference import trained_run

pytest.importorskip('lm_eval')
from repository import ROOT

QUESTIONS = [
  {'question': 'aeiou oua yea', 'answers': [' aei', ' bcd'], 'right': 0},
  {'question': 'bcd dfg klm', 'answers': [' aei', ' nprst bcd'], 'right': 1},
  {'question': 'gfd ', 'answers': ['y', 'bcd'], 'right': 1},
]
TASKS = {
  'mine_choice': """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{answers}}"
doc_to_target: "{{right}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
  'mine_rolling': """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{answers[0]}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
  'mine_text': """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answers[0]}}"
generation_kwargs: {until: ["b"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Tasks of ours, on a file."""
  made = tmp_path_factory.mktemp('tasks')
  (made / 'questions.jsonl').write_text(''.join(json.dumps(q) + '\n' for q in QUESTIONS))
  data = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: {made}/questions.jsonl}}}}\ntest_split: test\n'
  for name, rest in TASKS.items():
    (made / f'{name}.yaml').write_text(f'task: {name}\n{data}{rest}')
  return made


@pytest.fixture(scope='module')
def model(undisturbed):
  from dipaco_jax.inference import lm_eval_model

  return lm_eval_model.Dipaco(str(undisturbed), batch_size=2)


@pytest.fixture(scope='module')
def log_softmax(undisturbed):
  """(path, tokens) -> log-probabilities [L, V] of what follows each token, by float64 of a whole forward pass."""
  run = trained_run.TrainedRun(str(undisturbed))

  def made(path: int, tokens: list[int]) -> np.ndarray:
    padded = tokens + [0] * (run.settings.model.seq_len - len(tokens))
    logits = np.asarray(run.path(path).logits(padded), np.float64)[: len(tokens)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

  return made


def asked(*args) -> types.SimpleNamespace:
  return types.SimpleNamespace(args=args)


CLOSE = small.EPS * 64 * 200  # of a text of 64 tokens: a token's nats are sums of some 200 products


def test_log_likelihoods_are_those_of_the_routed_path(model, log_softmax):
  pairs = [(q['question'], answer) for q in QUESTIONS for answer in q['answers']]
  found = model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
  for (context, answer), (total, greedy) in zip(pairs, found, strict=True):
    whole = model.tok_encode(context + answer)
    start = len(model.tok_encode(context.rstrip()))
    log_p = log_softmax(model.run.router.path(model.tok_encode(context.rstrip())), whole)
    expected = [log_p[i - 1, whole[i]] for i in range(start, len(whole))]
    assert total == pytest.approx(sum(expected), abs=CLOSE)
    assert greedy == all(log_p[i - 1].argmax() == whole[i] for i in range(start, len(whole)))


def test_only_the_likeliest_continuation_is_greedy(model, log_softmax):
  context = model.tok_encode('aeiou oua yea')
  path = model.run.router.path(context)
  best = int(log_softmax(path, context)[-1].argmax())
  (_, greedy), (_, other) = model._loglikelihood_tokens([(('x', 'y'), context, [t]) for t in (best, best ^ 1)])
  assert greedy and not other


def test_a_context_that_is_too_long_loses_its_beginning(model, log_softmax):
  rng, length = np.random.default_rng(0), model.max_length
  before, scored = rng.integers(3, 300, length + 9).tolist(), rng.integers(3, 300, 5).tolist()
  ((total, _),) = model._loglikelihood_tokens([(('x', 'y'), before, scored)])
  whole = (before + scored)[-length - 1 :]
  log_p = log_softmax(model.run.router.path(before), whole[:-1])
  assert total == pytest.approx(sum(log_p[-5 + i, t] for i, t in enumerate(scored)), abs=CLOSE)


def test_an_answer_that_is_longer_than_a_row_is_scored_in_windows(model):
  text = ' '.join(['aeiou oua yea'] * 9)
  assert len(model.tok_encode(text)) > model.max_length + 9
  ((total, _),) = model.loglikelihood([asked('', text)])
  assert total == pytest.approx(model.loglikelihood_rolling([asked(text)])[0], abs=30 * CLOSE)


@pytest.mark.parametrize(
  ('context', 'answer'), [('aeiou ou', 'a'), ('aeio', 'u'), ('a', 'eiou'), ('yea', ' '), ('yea', ''), ('', '')]
)
def test_every_answer_has_a_token_that_is_scored(model, log_softmax, context, answer):
  """Also one that is a part of the context's last token, without a delimiter between them."""
  before, scored = model.split_answer(context, answer)
  whole, alone = model.tok_encode(context + answer), model.tok_encode(context)
  assert before == alone[: len(before)] and scored
  assert before + scored == whole if whole != alone else scored == [model.eot_token_id]
  assert not before or len(before) == len(alone) or scored[0] != alone[len(before)]
  ((total, greedy),) = model.loglikelihood([asked(context, answer)])
  front = before or [model.eot_token_id]
  log_p = log_softmax(model.choose_path(alone or scored), front + scored)
  expected = [log_p[len(front) - 1 + i, token] for i, token in enumerate(scored)]
  assert total == pytest.approx(sum(expected), abs=CLOSE) and total < 0 and isinstance(greedy, bool)


def test_all_answers_to_a_question_are_scored_by_one_path(model):
  """Also where the tokens at the border differ from answer to answer."""
  paths = []
  choose, model.choose_path = model.choose_path, lambda tokens: paths.append(list(tokens)) or choose(tokens)
  try:
    model.loglikelihood([asked('aeiou ou', answer) for answer in ('a', ' yea', '')])
  finally:
    del model.choose_path
  assert paths == [model.tok_encode('aeiou ou')] * 3


def test_texts_begin_as_in_training(model):
  assert model.run.tokenizer.bos_id < 0 <= model.run.tokenizer.special_ids['bos']
  assert model.prefix_token_id == model.eot_token_id


def test_one_request_that_cannot_be_met_does_not_end_the_others(model, caplog):
  usual = {'max_gen_toks': 4}
  stops = {'until': [f'stop {i}' for i in range(40)] + ['x' * 999, '']}
  odd = [{'max_gen_toks': 0}, {'max_new_tokens': 0}, {'do_sample': True, 'top_p': 0.0}, stops, {'temperature': None}]
  texts = model.generate_until([asked('aeiou oua', usual | how) for how in (*odd[:1], {}, *odd[2:])])
  assert texts[0] == texts[2] == '' and texts[1] == texts[3] == texts[4] != ''
  assert model.generate_until([asked('aeiou', odd[1])]) == ['']
  assert 'top_p=0.0' in caplog.text
  assert model.generate_until([asked('aeiou \ud800', usual)]) == model.generate_until([asked('aeiou \ufffd', usual)])


def test_samples_of_the_same_text_differ(model):
  how = {'do_sample': True, 'temperature': 2.0, 'max_gen_toks': 12}
  assert len({*model.generate_until([asked('aeiou', how)] * 4)}) > 1


def test_a_long_text_is_scored_once_in_windows(model, log_softmax):
  text = ' '.join(['aeiou oua yea'] * 9)
  tokens, length = model.tok_encode(text), model.max_length
  assert length < len(tokens) < 2 * length
  path = model.run.router.path(tokens)
  first = log_softmax(path, [model.prefix_token_id, *tokens[: length - 1]])
  second = log_softmax(path, tokens[-length - 1 : -1])
  expected = sum(first[i, t] for i, t in enumerate(tokens[:length]))
  expected += sum(second[i, t] for i, t in enumerate(tokens[-length:]) if i >= 2 * length - len(tokens))
  found = model.loglikelihood_rolling([asked(text), asked('')])
  assert found[0] == pytest.approx(expected, abs=30 * CLOSE) and found[1] == 0


@pytest.mark.parametrize('context', ['', ' '])
def test_a_token_that_stands_in_front_of_texts_is_there_once_and_is_not_scored(undisturbed, log_softmax, context):
  from dipaco_jax.inference import lm_eval_model

  model = lm_eval_model.Dipaco(str(undisturbed))
  files = model.run.tokenizer.files
  model.run.tokenizer = sentencepiece_tokenizer.SentencePieceTokenizer(files['tokenizer.model'], adds_bos=True)
  text = context + 'aeiou oua yea'
  tokens = model.tok_encode(text)
  assert tokens[0] == model.prefix_token_id not in tokens[1:]
  log_p = log_softmax(model.run.router.path(tokens), tokens)
  expected = pytest.approx(sum(log_p[i - 1, tokens[i]] for i in range(1, len(tokens))), abs=CLOSE)
  assert model.loglikelihood_rolling([asked(text), asked('')]) == [expected, 0]
  paths = []
  choose, model.choose_path = model.choose_path, lambda tokens: paths.append(list(tokens)) or choose(tokens)
  ((total, _),) = model.loglikelihood([asked(context, 'aeiou oua yea')], disable_tqdm=True)
  assert total == expected and paths == [tokens]
  assert model.tok_encode(text, add_special_tokens=False) == tokens[1:]


def test_generation_is_greedy_and_stops(model, log_softmax):
  texts = model.generate_until([asked('aeiou oua', {'until': [], 'max_gen_toks': 6}), asked('', {'max_gen_toks': 2})])
  tokens = model.tok_encode('aeiou oua')
  path, given = model.run.router.path(tokens), len(tokens)
  for _ in range(6):
    tokens.append(int(log_softmax(path, tokens)[-1].argmax()))
  assert 'aeiou oua' + texts[0] == model.run.tokenizer.decode(tokens) and len(tokens) == given + 6
  stop = texts[0][2]
  (cut,) = model.generate_until([asked('aeiou oua', {'until': stop, 'max_gen_toks': 6})])
  assert cut == texts[0][: texts[0].index(stop)]
  assert model.request('a', {'do_sample': True, 'temperature': 0.7}).temperature == 0.7
  assert model.request('a', {'do_sample': False, 'temperature': 0.7}).temperature == 0
  assert len(model.request('aeiou ' * 99, {}).tokens) == model.max_length - model.max_length // 2


def test_an_answer_has_all_the_room_that_its_context_leaves(model):
  short, long = model.tok_encode('aeiou'), model.tok_encode('aeiou ' * 99)
  length = model.max_length
  asked_tokens = length - len(short)
  assert asked_tokens > length // 2
  for most in (asked_tokens, asked_tokens + 1, 10 * length):
    request = model.request('aeiou', {'max_gen_toks': most})
    assert (list(request.tokens), request.max_tokens) == (short, asked_tokens)
  request = model.request('aeiou ' * 99, {'max_gen_toks': 10 * length})
  assert (list(request.tokens), request.max_tokens) == (long[-(length - length // 2) :], length // 2)


def test_the_harness_finds_it_by_name_beside_its_own_models(undisturbed):
  from lm_eval.api import registry

  model = registry.get_model('dipaco').create_from_arg_string(f'workdir={undisturbed},path=3', {'device': None})
  assert (model.fixed_path, model.batch_size) == (3, 8) and 'hf' in registry.model_registry


def test_a_path_that_is_given_scores_all_texts(undisturbed, log_softmax):
  from dipaco_jax.inference import lm_eval_model

  model = lm_eval_model.Dipaco(str(undisturbed), path=(1, 0), batch_size='3')
  tokens = model.tok_encode('aeiou oua')
  ((total, _),) = model.loglikelihood([asked('aeiou', ' oua')], disable_tqdm=True)
  start = len(model.tok_encode('aeiou'))
  log_p = log_softmax(2, tokens)
  assert total == pytest.approx(sum(log_p[i - 1, tokens[i]] for i in range(start, len(tokens))), abs=CLOSE)
  with pytest.raises(ValueError, match='--path=4'):
    lm_eval_model.Dipaco(str(undisturbed), path=4)


def command(*options: str, status: int = 0) -> str:
  cache = jax.config.jax_compilation_cache_dir
  env = os.environ | {'HF_DATASETS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'HF_HOME': cache}
  line = [sys.executable, '-m', 'dipaco_jax.harness', *options]
  done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
  assert done.returncode == status, done.stderr
  return done.stderr if status else done.stdout


def test_results_of_the_command_are_those_of_the_model(undisturbed, folder, model, tmp_path):
  out = tmp_path / 'results.json'
  tasks = '--tasks=mine_choice,mine_rolling,mine_text'
  said = command(f'--workdir={undisturbed}', tasks, f'--include_path={folder}', f'--out={out}')
  found = json.loads(out.read_text())
  pairs = [(q['question'], answer) for q in QUESTIONS for answer in q['answers']]
  totals = [total for total, _ in model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)]
  right = np.reshape(totals, (3, 2)).argmax(1) == [q['right'] for q in QUESTIONS]
  assert found['mine_choice']['acc,none'] == right.mean()
  texts = [q['question'] + q['answers'][0] for q in QUESTIONS]
  nats = -sum(model.loglikelihood_rolling([asked(text) for text in texts]))
  bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
  assert found['mine_rolling']['bits_per_byte,none'] == pytest.approx(bits, rel=1e-4)
  assert 'mine_choice' in said and 'bits_per_byte' in said


@pytest.mark.parametrize(
  'options, words',
  [
    ([], 'name a run with --workdir=DIR'),
    (['--workdir=no', '--tasks=mine', '--limit=0'], '--limit=0 should be above 0'),
    (['--workdir=no', '--tasks=no_such_task'], '--tasks=no_such_task: there is no such task'),
  ],
)
def test_wrong_options_are_reported_before_any_work(options, words):
  assert words in command(*options, status=2)


def test_libraries_are_offline_where_the_hub_does_not_answer(monkeypatch):
  from huggingface_hub import constants

  from dipaco_jax.inference import lm_eval_tasks

  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  for name in ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE'):
    monkeypatch.setenv(name, '0')
  monkeypatch.setattr(lm_eval_tasks, 'WAIT_S', 0.2)
  listening = socket.create_server(('127.0.0.1', 0))  # takes connections and answers none
  monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{listening.getsockname()[1]}')
  start = time.monotonic()
  lm_eval_tasks.go_offline_if_unreachable()
  assert time.monotonic() - start < 2 and constants.HF_HUB_OFFLINE and os.environ['HF_DATASETS_OFFLINE'] == '1'
  listening.close()


@pytest.mark.slow
def test_a_task_whose_dataset_is_not_there_ends_the_command(folder, tmp_path):
  task = (folder / 'mine_choice.yaml').read_text().replace('mine_choice', 'mine_none')
  (tmp_path / 'mine_none.yaml').write_text(task.replace('questions.jsonl', 'none.jsonl'))
  error = command('--workdir=no', '--tasks=mine_none', f'--include_path={tmp_path}', status=2)
  assert '--tasks=mine_none: its dataset is not on this machine' in error


@pytest.mark.parametrize(
  ('error', 'words'),
  [
    (
      ConnectionError("Couldn't reach\n'a'"),
      r"its dataset is not on this machine .*ConnectionError: Couldn't reach 'a'",
    ),
    (FileNotFoundError('none.jsonl'), 'its dataset is not on this machine .*and set HF_HOME to it'),
    (KeyError('test_split'), "it cannot be loaded .KeyError: 'test_split'"),
  ],
)
def test_the_task_that_cannot_be_loaded_is_named(monkeypatch, error, words):
  from dipaco_jax.inference import lm_eval_tasks

  class Manager:
    def __init__(self, include_path):
      self.match_tasks = list

    def load(self, names):
      if 'second' in names:
        raise error

  monkeypatch.setattr('lm_eval.tasks.TaskManager', Manager)
  with pytest.raises(ValueError, match=f'--tasks=second: {words}'):
    lm_eval_tasks.load_tasks(['first', 'second', 'third'])
