"""Continues texts by the paths of a run, which are read from the workdir when they are needed.

    python -m dipaco_jax.generate --workdir=runs/tiny --prompt='def main(' [--temperature=0 --reroute_every=32]

A text's first tokens choose its path, unless --path does. One text is written as it grows; several grow together, and
are written one after the other. `--prompt=-` reads standard input. With --chat, each prompt is a message of a user, and
the answers are written.
"""

import dataclasses
import sys
import time

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.data.tokenizer import SURROGATES
from dipaco_jax.inference.request import Request, check_request
from dipaco_jax.processes import display


def stream(engine, texts, shows_prompts: bool = True):
  shown = printable.text if sys.stdout.isatty() else str  # a terminal would obey control characters in a text
  for text in texts:
    while not text.paths:
      engine.step()
    if len(texts) > 1:
      print(f'--- path {engine.run.layout.grid.path_name(text.paths[0])}')
    if shows_prompts:
      print(shown(engine.run.tokenizer.decode(text.request.tokens)), end='', flush=True)
    while not text.finished:
      engine.step()
      print(shown(text.transcript.take()), end='', flush=True)
    print(shown(text.transcript.take(final=True)))


def summary(engine, texts, seconds: float) -> str:
  """Returns a line: tokens, seconds, paths, and what changes of path have cost."""
  num_tokens = sum(text.num_new for text in texts)
  name = engine.run.layout.grid.path_name
  paths = '; '.join(', '.join(map(name, text.paths)) for text in texts)
  line = f'{num_tokens} tokens in {seconds:.1f} s, by path {paths}'
  if engine.recomputed_without_cache:
    share = engine.recomputed / engine.recomputed_without_cache
    line += f'; changes of path recomputed {share:.0%} of what starting again would have'
  return line


def requests_from_flags(run, max_length: int) -> list[Request]:
  """Returns a request for each prompt and sample; raises InputError."""
  f = flags.FLAGS
  if f.samples < 1:
    raise InputError(f'--samples={f.samples} should be 1 or more')
  path = None if f.path is None else run.number(f.path)
  template = load_template(run) if f.chat else None
  requests: list[Request] = []
  for prompt in f.prompt:
    prompt_text = command.decode_text(sys.stdin.buffer.read(), '--prompt=-') if prompt == '-' else prompt
    if template and not prompt_text:
      raise InputError('--prompt is empty: with --chat, give some text')
    if SURROGATES.search(prompt_text):
      raise InputError(f'--prompt={prompt_text!r} is not UTF-8: convert it')
    text = tuple(int(t) for t in run.tokenizer.encode(prompt_text, eos=False))
    tokens = tuple(template.encode([{'role': 'user', 'content': prompt_text}])) if template else text
    room = max(1, min(Request.max_tokens, max_length - len(tokens)))
    most = room if f.max_tokens is None else f.max_tokens
    request = Request(
      tokens,
      most,
      path,
      f.temperature,
      f.top_k,
      f.top_p,
      f.seed,
      tuple(f.stop),
      not f.ignore_eos,
      f.reroute_every,
      text,
    )
    check_request(request, max_length)
    requests += [dataclasses.replace(request, seed=(f.seed + n) % 2**32) for n in range(f.samples)]
  return requests


def load_template(run):
  """Loads the chat template of a run; raises InputError."""
  from dipaco_jax.data import chat_template

  if flags.FLAGS.reroute_every:
    raise InputError(f'--reroute_every={flags.FLAGS.reroute_every}: with --chat, a conversation stays on its path')
  if (template := chat_template.load(run.tokenizer)) is None:
    raise InputError('--chat: the tokenizer of this run has no chat template; leave --chat out')
  return template


def main():
  f = flags.FLAGS
  if not f.workdir or not f.prompt:
    raise InputError('name a run with --workdir=DIR, and a text with --prompt=TEXT, or --prompt=- to read it')
  command.quiet()
  with display.doing('loading JAX and the run', tells=False):
    from dipaco_jax.inference.engine import Engine
    from dipaco_jax.inference.trained_run import TrainedRun

    run = TrainedRun(f.workdir, f.trust_modules)
    command.check_devices()
    command.keep_programs()
    engine = Engine(run, version=f.version)
  texts = [engine.start(request) for request in requests_from_flags(run, engine.max_length)]
  started = time.monotonic()
  stream(engine, texts, shows_prompts=not f.chat)
  print(summary(engine, texts, time.monotonic() - started), file=sys.stderr)


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  command.define_trust()
  flags.DEFINE_multi_string(
    'prompt', [], 'Text to continue; repeat the option for several texts. - reads standard input.'
  )
  flags.DEFINE_bool(
    'chat', False, "Whether each prompt is a user's message, formatted by the chat template of the tokenizer."
  )
  flags.DEFINE_string(
    'path',
    None,
    'Path for all texts, as a number such as 3, a name or coordinates such as 1,0. By default, the router chooses.',
  )
  flags.DEFINE_integer(
    'version', None, 'Version of the modules. By default, the version that early stopping chose for each path.'
  )
  flags.DEFINE_integer(
    'max_tokens', None, f'Maximum number of new tokens. By default, {Request.max_tokens}, or as many as fit.'
  )
  flags.DEFINE_float('temperature', Request.temperature, 'Sampling temperature. 0 always takes the most likely token.')
  flags.DEFINE_integer('top_k', Request.top_k, 'Number of most likely tokens to sample from. 0 means all tokens.')
  flags.DEFINE_float(
    'top_p', Request.top_p, 'Samples from the smallest set of most likely tokens with at least this total probability.'
  )
  flags.DEFINE_integer('seed', Request.seed, 'Seed of sampling. The same seed gives the same text.')
  flags.DEFINE_integer('samples', 1, 'Number of continuations per prompt; they have consecutive seeds.')
  flags.DEFINE_multi_string('stop', [], 'String before which a text ends; repeat the option for several strings.')
  flags.DEFINE_bool('ignore_eos', False, 'Whether to continue after an end-of-text token.')
  flags.DEFINE_integer(
    'reroute_every', Request.reroute_every, 'Number of tokens after which the path is chosen again. 0 means never.'
  )
  command.run(main)
