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
from dipaco_jax.training import display


def stream(engine, texts, shows_prompts: bool = True):
  shown = printable.text if sys.stdout.isatty() else str  # a terminal would obey control characters in a text
  for text in texts:
    while not text.paths:
      engine.step()
    if len(texts) > 1:
      print(f'--- path {text.paths[0]}')
    if shows_prompts:
      print(shown(engine.run.tokenizer.decode(text.request.tokens)), end='', flush=True)
    while not text.finished:
      engine.step()
      print(shown(text.transcript.take()), end='', flush=True)
    print(shown(text.transcript.take(final=True)))


def summary(engine, texts, seconds: float) -> str:
  """Returns a line: tokens, seconds, paths, and what changes of path have cost."""
  num_tokens = sum(text.num_new for text in texts)
  paths = '; '.join(', '.join(map(str, text.paths)) for text in texts)
  words = f'{num_tokens} tokens in {seconds:.1f} s, by path {paths}'
  if engine.recomputed_without_cache:
    share = engine.recomputed / engine.recomputed_without_cache
    words += f'; changes of path recomputed {share:.0%} of what starting anew would have'
  return words


def requests_from_flags(run, max_length: int) -> list[Request]:
  """Returns a request for each prompt and sample; raises InputError."""
  f = flags.FLAGS
  if f.samples < 1:
    raise InputError(f'--samples={f.samples} should be 1 or more')
  path = None if f.path is None else run.number(command.path_named(f.path))
  template = load_template(run) if f.chat else None
  found: list[Request] = []
  for prompt in f.prompt:
    words = command.decode_text(sys.stdin.buffer.read(), '--prompt=-') if prompt == '-' else prompt
    if template and not words:
      raise InputError('--prompt is empty: with --chat, give it a word')
    if SURROGATES.search(words):
      raise InputError(f'--prompt={words!r} is not UTF-8: convert it')
    text = tuple(int(t) for t in run.tokenizer.encode(words, eos=False))
    tokens = tuple(template.encode([{'role': 'user', 'content': words}])) if template else text
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
    found += [dataclasses.replace(request, seed=(f.seed + n) % 2**32) for n in range(f.samples)]
  return found


def load_template(run):
  """Loads the chat template of a run; raises InputError."""
  from dipaco_jax.inference import chat_template

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
  flags.DEFINE_string('workdir', None, 'The run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  command.define_trust()
  flags.DEFINE_multi_string('prompt', [], 'The text to continue; repeat it for several. -: standard input.')
  flags.DEFINE_bool(
    'chat', False, 'Each prompt is a message of a user, which the chat template of the tokenizer writes.'
  )
  flags.DEFINE_string('path', None, 'The path for all texts, as 3 or 1,0; by default the router chooses.')
  flags.DEFINE_integer('version', None, 'The version of the modules; by default as early stopping chose for each path.')
  flags.DEFINE_integer('max_tokens', None, f'Tokens to add; by default {Request.max_tokens}, or as many as fit.')
  flags.DEFINE_float('temperature', Request.temperature, '0: always the likeliest token.')
  flags.DEFINE_integer('top_k', Request.top_k, 'Sample among so many of the likeliest tokens; 0: among all.')
  flags.DEFINE_float('top_p', Request.top_p, 'Sample among the fewest tokens that have this probability together.')
  flags.DEFINE_integer('seed', Request.seed, 'The same seed gives the same text.')
  flags.DEFINE_integer('samples', 1, 'Texts for each prompt, with consecutive seeds.')
  flags.DEFINE_multi_string('stop', [], 'A string before which the text ends; repeat it for several.')
  flags.DEFINE_bool('ignore_eos', False, 'Go on after the end of a text.')
  flags.DEFINE_integer('reroute_every', Request.reroute_every, 'Tokens after which a path is chosen again; 0: never.')
  command.run(main)
