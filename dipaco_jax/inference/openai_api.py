"""OpenAI's completions API in words: its fields to requests, texts to answers. Neither HTTP nor JAX is here.

What is not supported is refused by name: an answer that ignores a field is a wrong one. Ours beside theirs: `top_k`,
`path`, `reroute_every`, models called NAME/path-3, and the paths of every choice.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.inference.request import Request

MAX_TOKENS = 16  # OpenAI's default
KINDS = {401: 'authentication_error', 429: 'rate_limit_error'}  # of errors


class Refused(Exception):
  """An answer that is an error: HTTP's status, one line, and the field that it is about."""

  def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
    super().__init__(message)
    kind = KINDS.get(status, 'server_error' if status >= 500 else 'invalid_request_error')
    self.status = status
    self.body = {'error': {'message': message, 'type': kind, 'param': param, 'code': code}}


def _is(*types: type) -> Callable[[Any], bool]:
  return lambda x: isinstance(x, types) and (bool in types or not isinstance(x, bool))


def _list_of(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda x: isinstance(x, list) and bool(x) and all(map(good, x))


def _is_prompt(x: Any) -> bool:
  ids = _list_of(_is(int))
  return isinstance(x, str) or any(good(x) for good in (_list_of(_is(str)), ids, _list_of(ids)))


FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
  'model': ('a string', _is(str)),
  'prompt': ('a string, a list of strings, a list of token ids, or a list of such lists', _is_prompt),
  'stop': ('a string, or a list of strings', lambda x: x == [] or isinstance(x, str) or _list_of(_is(str))(x)),
  'stream_options': ('an object like {"include_usage": true}', _is(dict)),
  'user': ('a string', _is(str)),
  **dict.fromkeys(('max_tokens', 'n', 'seed', 'top_k', 'path', 'reroute_every'), ('a whole number', _is(int))),
  **dict.fromkeys(('temperature', 'top_p'), ('a number', _is(int, float))),
  **dict.fromkeys(('stream', 'echo'), ('true or false', _is(bool))),
}
NOTHING: dict[str, tuple] = {  # what fields that are not supported may be
  'suffix': ('',),
  'logprobs': (),
  'logit_bias': ({},),
  'best_of': (1,),
  'presence_penalty': (0,),
  'frequency_penalty': (0,),
}


@dataclasses.dataclass(frozen=True)
class Asked:
  """A body of POST /v1/completions."""

  model: str
  requests: tuple[Request, ...]  # n of each prompt
  prefixes: tuple[str, ...]  # what each choice begins with: its prompt with `echo`
  prompt_tokens: int
  stream: bool
  include_usage: bool


@dataclasses.dataclass(frozen=True)
class Model:
  """What requests are checked against."""

  name: str
  num_paths: int
  max_length: int  # of a text, in tokens
  tokenizer: Tokenizer
  check: Callable[[Request], None]  # raises InputError where a request cannot be met
  reroute_every: int  # where a body gives neither that nor a path
  most_texts: int  # in one body

  def path(self, given: str) -> int | None:
    """The path that a model's name is of, None for the model itself; raises Refused."""
    found = re.fullmatch(re.escape(self.name) + r'(/path-(0|[1-9][0-9]{0,8}))?', given)
    if not found or (found[2] and int(found[2]) >= self.num_paths):
      words = f'ask for {self.name}, or {self.name}/path-0 to path-{self.num_paths - 1}'
      raise Refused(404, f'there is no model {given[:80]!r}: {words}', 'model', 'model_not_found')
    return int(found[2]) if found[2] else None

  def parse(self, body: bytes) -> Asked:
    """What a body asks for; raises Refused."""
    values = _values(body)
    n, seed = values.get('n', 1), values.get('seed', Request.seed)
    path = self._named_path(values)
    prompts = _prompts(values['prompt'], self.tokenizer)
    if not 1 <= n <= self.most_texts // len(prompts):
      raise Refused(400, f'n={n} for {len(prompts)} prompts: ask for 1 to {self.most_texts} texts at one time', 'n')
    requests, prefixes = [], []
    for text, tokens in prompts:
      request = self._request(values, tokens, path)
      self._checked(request)
      self._checked(dataclasses.replace(request, seed=seed + n - 1))
      requests += [dataclasses.replace(request, seed=seed + i) for i in range(n)]
      prefixes += [text if values.get('echo') else ''] * n
    prompt_tokens, stream = sum(len(tokens) for _, tokens in prompts), values.get('stream', False)
    return Asked(values['model'], tuple(requests), tuple(prefixes), prompt_tokens, stream, _usage_in(values))

  def _named_path(self, values: dict[str, Any]) -> int | None:
    given, named = values.get('path'), self.path(values['model'])
    if given is not None and named is not None and given != named:
      raise Refused(400, f'path={given} is not the path of model {values["model"]!r}: leave one of them out', 'path')
    return given if named is None else named

  def _request(self, values: dict[str, Any], tokens: tuple[int, ...], path: int | None) -> Request:
    room = max(1, min(MAX_TOKENS, self.max_length - len(tokens)))
    stop = values.get('stop', ())
    return Request(
      tokens,
      values.get('max_tokens', room),
      path,
      stop=(stop,) if isinstance(stop, str) else tuple(stop),
      reroute_every=values.get('reroute_every', self.reroute_every if path is None else 0),
      **{name: values[name] for name in ('seed', 'temperature', 'top_k', 'top_p') if name in values},
    )

  def _checked(self, request: Request):
    try:
      self.check(request)
    except ValueError as e:
      words = re.sub(r'^--(workdir=\S+: )?', '', str(e))  # where the run is is nobody's business
      param = re.split(r'\W', words)[0]
      raise Refused(400, words, param if param in FIELDS else None) from e


def _values(body: bytes) -> dict[str, Any]:
  """The fields that are there, of the right types; raises Refused."""
  try:
    values = json.loads(body)
  except (ValueError, RecursionError) as e:
    raise Refused(400, f'the body is no JSON: {" ".join(str(e).split())}') from e
  if not isinstance(values, dict):
    raise Refused(400, 'the body should be a JSON object, such as {"model": "NAME", "prompt": "A text"}')
  values = {name: value for name, value in values.items() if value is not None}
  for name, value in values.items():
    _check_field(name, value)
  for name in ('model', 'prompt'):
    if name not in values:
      raise Refused(400, f'{name} is missing', name)
  if '' in (values.get('stop'), *(values['stop'] if isinstance(values.get('stop'), list) else ())):
    raise Refused(400, 'stop has an empty string, before which every text would end: leave it out', 'stop')
  return values


def _check_field(name: str, value: Any):
  if name in NOTHING:
    if value not in NOTHING[name]:
      raise Refused(400, f'{name} is not supported: leave it out', name, 'unsupported_parameter')
    return
  if name not in FIELDS:
    nearest = difflib.get_close_matches(name, FIELDS, 1)
    words = f'; did you mean {nearest[0]}?' if nearest else ': leave it out'
    raise Refused(400, f'there is no field {name[:80]!r}{words}', name[:80], 'unknown_parameter')
  words, good = FIELDS[name]
  if not good(value):
    raise Refused(400, f'{name} should be {words}', name)


def _prompts(prompt: Any, tokenizer: Tokenizer) -> list[tuple[str, tuple[int, ...]]]:
  """The text and the tokens of each."""
  many = isinstance(prompt, list) and not isinstance(prompt[0], int)
  found = []
  for one in prompt if many else [prompt]:
    if isinstance(one, str):
      if not one.isascii() and re.search('[\ud800-\udfff]', one):
        raise Refused(400, 'prompt has half a character (a lone surrogate): send whole ones', 'prompt')
      found.append((one, tuple(tokenizer.encode(one, eos=False).tolist())))
    elif not 0 <= min(one) <= max(one) < tokenizer.vocab_size:
      raise Refused(400, f'prompt has a token that is not from 0 to {tokenizer.vocab_size - 1}', 'prompt')
    else:
      found.append((tokenizer.decode(one), tuple(one)))
  return found


def _usage_in(values: dict[str, Any]) -> bool:
  options = values.get('stream_options')
  if options is None:
    return False
  if not values.get('stream'):
    raise Refused(400, 'stream_options is for streams: set stream to true, or leave it out', 'stream_options')
  if set(options) - {'include_usage'} or not isinstance(options.get('include_usage', False), bool):
    raise Refused(400, 'stream_options may have include_usage, true or false, and nothing else', 'stream_options')
  return options.get('include_usage', False)


def choice(index: int, text: str, paths: Sequence[int], finished: str | None) -> dict[str, Any]:
  """A text, or a piece of one; `paths` that wrote it so far, one after another."""
  return {'index': index, 'text': text, 'logprobs': None, 'finish_reason': finished or None, 'paths': [*paths]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
  total = prompt_tokens + completion_tokens
  return {'prompt_tokens': prompt_tokens, 'completion_tokens': completion_tokens, 'total_tokens': total}


def model(name: str, created: int) -> dict[str, Any]:
  return {'id': name, 'object': 'model', 'created': created, 'owned_by': 'dipaco_jax'}
