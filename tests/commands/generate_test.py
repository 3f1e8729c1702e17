"""The command `generate`: its output and its exit status."""

import os
import signal
import subprocess
import sys
import types

import fake_cloud
import made_run
import pytest
import quick_xla
import slow
from repository import ROOT

from dipaco_jax import generate
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer_files
from dipaco_jax.inference import trained_run
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request


def start(*options: str) -> subprocess.Popen:
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  env = os.environ | {'XLA_FLAGS': quick_xla.FLAGS, 'PYTHONPATH': path}
  command = [sys.executable, '-c', fake_cloud.LISTENING, sys.executable, '-m', 'dipaco_jax.generate', *options]
  pipe = subprocess.PIPE
  return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def run(*options: str, given: str = '', status: int = 0) -> tuple[str, str]:
  process = start(*options)
  out, err = process.communicate(given, timeout=240)
  assert process.returncode == status, err
  return out, err


def expected(workdir, prompt: str, **how) -> str:
  engine = Engine(trained_run.TrainedRun(str(workdir)))
  tokens = tuple(engine.run.tokenizer.encode(prompt, eos=False).tolist())
  (text,) = engine.generate([Request(tokens, **how)])
  return prompt + text.transcript.text


def test_a_prompt_is_continued(undisturbed):
  out, err = run(f'--workdir={undisturbed}', '--prompt=aeiou oua', '--max_tokens=20', '--seed=3', '--ignore_eos')
  assert out == expected(undisturbed, 'aeiou oua', max_tokens=20, seed=3, until_eos=False) + '\n'
  assert err.startswith('20 tokens in ') and err.count('\n') == 1


@pytest.mark.slow
def test_several_prompts_and_samples_and_standard_input(undisturbed):
  out, err = run(
    f'--workdir={undisturbed}', '--prompt=aeiou oua', '--prompt=-', '--samples=2', '--max_tokens=9', '--ignore_eos',
    '--reroute_every=4', given='bcd dfg',
  )  # fmt: skip
  how = dict(max_tokens=9, until_eos=False, reroute_every=4)
  texts = [expected(undisturbed, p, seed=seed, **how) for p in ('aeiou oua', 'bcd dfg') for seed in (0, 1)]
  paths = [line for line in out.splitlines() if line.startswith('--- path ')]
  assert len(paths) == 4
  for text in texts:
    assert f'\n{text}\n' in out
  assert err.startswith('36 tokens in ')


@pytest.mark.slow
def test_input_that_is_not_utf8_is_an_error_in_one_line(undisturbed):
  process = start(f'--workdir={undisturbed}', '--prompt=-')
  process.stdin.buffer.write(b'caf\xe9')
  out, err = process.communicate(timeout=240)
  assert process.returncode == 2 and err.count('\n') == 1 and not out
  assert '--prompt=- is not UTF-8 (unexpected end of data at byte 3): convert it' in err


@pytest.mark.slow
def test_a_damaged_run_is_an_error_in_one_line(tmp_path):
  workdir = made_run.write(tmp_path, made_run.settings())
  (tmp_path / 'modules' / '2' / 'low' / '0.safetensors').write_bytes(b'x')
  out, err = run(f'--workdir={workdir}', '--prompt=The fox', '--path=0', status=2)
  assert 'low/0.safetensors, made by the stage train, is damaged: remove ' in err
  assert err.count('\n') == 1 and not out


def test_ctrl_c_ends_it_quietly(undisturbed):
  process = start(f'--workdir={undisturbed}', '--prompt=aeiou', '--samples=500', '--ignore_eos')
  assert process.stdout.read(9) == '--- path '
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 130 and not err


WRONG = [
  ((), 'name a run with --workdir=DIR'),
  (('--workdir=DIR',), 'a text with --prompt=TEXT'),
  (('--workdir=/nowhere', '--prompt=x'), 'there is no run'),
  (('--workdir=DIR', '--prompt='), 'prompt is empty'),
  (('--workdir=DIR', '--prompt=aeiou', '--max_tokens=1000'), 'set max_tokens to'),
  (('--workdir=DIR', '--prompt=aeiou', '--max_tokens=0'), 'max_tokens=0 should be 1 or more'),
  (('--workdir=DIR', '--prompt=aeiou', '--path=4'), '--path=4: the paths are 0 to 3'),
  (('--workdir=DIR', '--prompt=aeiou', '--version=99', '--path=0'), 'there is no version 99'),
  (('--workdir=DIR', '--prompt=aeiou', '--samples=0'), '--samples=0'),
  (('--workdir=DIR', '--prompt=aeiou', '--path=x'), '--path=x: the paths are 0 to 3, of a grid of 2 x 2'),
  (('--workdir=DIR', '--prompt=aeiou', '--path=1,2'), '--path=1,2: the paths are 0 to 3, of a grid of 2 x 2'),
  (('--workdir=DIR', '--prompt=aeiou', 'extra'), "'extra' is not an option: write --name=value"),
  (('--workdir=DIR', '--prompt=aeiou', '--temperature=hot'), '--temperature=hot should be a number'),
  (('--workdir=DIR', '--promt=aeiou'), '--promt: there is no such option; did you mean --prompt?'),
  (('--workdir=DIR', '--prompt'), '--prompt: give a value, such as --prompt=...'),
]


@pytest.mark.parametrize('options, words', slow.all_but(WRONG, WRONG[0]))
def test_wrong_options(options, words, undisturbed):
  options = [option.replace('=DIR', f'={undisturbed}') for option in options]
  out, err = run(*options, status=2)
  assert words in err and err.startswith('dipaco_jax: ') and err.count('\n') == 1 and not out


def test_a_prompt_is_a_message_with_chat(tmp_path, monkeypatch):
  values = {
    'samples': 1,
    'path': None,
    'prompt': ['fox'],
    'chat': True,
    'max_tokens': 4,
    'stop': [],
    'ignore_eos': False,
  }
  values |= {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'seed': 3, 'reroute_every': 0}
  monkeypatch.setattr(generate.flags, 'FLAGS', types.SimpleNamespace(**values))
  files = {'tokenizer.model': made_run.tokenizer_bytes(), 'chat_template.jinja': b'<s>{{ messages[0].content }}</s>'}
  tokenizer = tokenizer_files.load(files)
  fox = tuple(tokenizer.encode('fox', eos=False).tolist())
  [request] = generate.requests_from_flags(types.SimpleNamespace(tokenizer=tokenizer), 96)
  assert request.tokens == (tokenizer.special['<s>'], *fox, tokenizer.special['</s>']) and request.routed_by == fox
  for prompt, words in (('', '--prompt is empty: with --chat'), ('a\udcff', r"--prompt='a\\udcff' is not UTF-8")):
    monkeypatch.setattr(generate.flags, 'FLAGS', types.SimpleNamespace(**values | {'prompt': [prompt]}))
    with pytest.raises(InputError, match=words):
      generate.requests_from_flags(types.SimpleNamespace(tokenizer=tokenizer), 96)
  monkeypatch.setattr(generate.flags, 'FLAGS', types.SimpleNamespace(**values))
  plain = types.SimpleNamespace(tokenizer=tokenizer_files.load({'tokenizer.model': files['tokenizer.model']}))
  with pytest.raises(InputError, match='--chat: the tokenizer of this run has no chat template'):
    generate.requests_from_flags(plain, 96)
  values['reroute_every'] = 8
  monkeypatch.setattr(generate.flags, 'FLAGS', types.SimpleNamespace(**values))
  with pytest.raises(InputError, match='--reroute_every=8: with --chat, a conversation stays on its path'):
    generate.requests_from_flags(plain, 96)
