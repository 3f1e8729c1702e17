"""Tasks of the LM Evaluation Harness on a run: what it says of texts is what the paths say."""

import json
import math
import os
import subprocess
import sys
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
  with pytest.raises(ValueError, match='tokens to score at one time'):
    model._loglikelihood_tokens([(('x', 'y'), [5], before)])


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
    (['--workdir=no', '--tasks=no_such_task'], '--tasks=no_such_task: there is no such task'),
  ],
)
def test_wrong_options_are_told_before_any_work(options, words):
  assert words in command(*options, status=2)
