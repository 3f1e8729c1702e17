"""The objects of OpenAI's completions API: bodies are parsed to requests, texts become choices. No HTTP, no JAX.

What differs for chat completions is in `chat_api`. A field that is not supported is an error that names it: an answer
that ignores a field is wrong. Fields that OpenAI does not have: `top_k`, `path`, `reroute_every`, `router_scores`,
models called NAME/path-3, and the paths of every choice.
"""

import dataclasses
import difflib
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.inference.request import Request
from dipaco_jax.storage import seals

MAX_TOKENS = 16  # OpenAI's default
MAX_DEPTH = 100  # brackets that nest in a body
MAX_STOPS, MAX_STOP_LENGTH = 256, 1024  # strings, characters: each is looked for after every token
MAX_SCORES = 256  # of paths, in each choice
ERROR_TYPES = {401: 'authentication_error', 429: 'rate_limit_error'}


class ApiError(Exception):
  """An error as the API answers it: HTTP's status, one line, and the field that it is about."""

  def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
    super().__init__(message)
    kind = ERROR_TYPES.get(status, 'server_error' if status >= 500 else 'invalid_request_error')
    self.status = status
    self.body = {'error': {'message': message, 'type': kind, 'param': param, 'code': code}}


def _is_a(*types: type) -> Callable[[Any], bool]:
  return lambda x: isinstance(x, types) and (bool in types or not isinstance(x, bool))


def _is_list_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda x: isinstance(x, list) and bool(x) and all(map(is_valid, x))


def _is_prompt(x: Any) -> bool:
  is_ids = _is_list_of(_is_a(int))
  return isinstance(x, str) or any(is_valid(x) for is_valid in (_is_list_of(_is_a(str)), is_ids, _is_list_of(is_ids)))


FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
  'model': ('a string', _is_a(str)),
  'prompt': ('a string, a list of strings, a list of token ids, or a list of such lists', _is_prompt),
  'stop': ('a string, or a list of strings', lambda x: x == [] or isinstance(x, str) or _is_list_of(_is_a(str))(x)),
  'stream_options': ('an object like {"include_usage": true}', _is_a(dict)),
  'user': ('a string', _is_a(str)),
  **dict.fromkeys(
    ('max_tokens', 'n', 'seed', 'top_k', 'path', 'reroute_every', 'router_scores'), ('a whole number', _is_a(int))
  ),
  **dict.fromkeys(('temperature', 'top_p'), ('a number', _is_a(int, float))),
  **dict.fromkeys(('stream', 'echo'), ('true or false', _is_a(bool))),
}
Fields = Mapping[str, tuple[str, Callable[[Any], bool]]]
# Fields that are rejected, except with these values, which have no effect.
UNSUPPORTED: dict[str, tuple] = dict(
  suffix=('',), logprobs=(), logit_bias=({},), best_of=(1,), presence_penalty=(0,), frequency_penalty=(0,)
)


class AnswerFormat(Protocol):
  """How texts are written as OpenAI's objects."""

  id_prefix: str
  whole_object: str  # the name of the object that has all texts
  piece_object: str  # and of the objects in a stream

  def whole(self, text: str) -> dict[str, Any]:
    """Returns the fields of a choice that hold its text."""
    ...

  def pieces(self, piece: str, is_first: bool, finished: str) -> list[tuple[dict[str, Any], str]]:
    """Returns the fields of the choices of a stream that hold a piece of a text, each with why the text has ended."""
    ...


class TextFormat:
  """The format of completions."""

  id_prefix = 'cmpl'
  whole_object = 'text_completion'
  piece_object = 'text_completion'

  def whole(self, text: str) -> dict[str, Any]:
    return {'text': text}

  def pieces(self, piece: str, is_first: bool, finished: str) -> list[tuple[dict[str, Any], str]]:
    return [({'text': piece}, finished)]


TEXT = TextFormat()


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """A body of POST /v1/completions or /v1/chat/completions."""

  model: str
  requests: tuple[Request, ...]  # n of each prompt
  prefixes: tuple[str, ...]  # what each choice begins with: its prompt with `echo`
  prompt_tokens: int
  stream: bool
  include_usage: bool
  format: AnswerFormat = TEXT
  num_scores: int = 0  # of the best paths, with the router's scores, that each choice lists


@dataclasses.dataclass(frozen=True)
class ServedModel:
  """The model that a server offers; parses and checks requests for it."""

  name: str
  num_paths: int
  max_length: int  # of a text, in tokens
  tokenizer: Tokenizer
  check_request: Callable[[Request], None]  # raises InputError if a request cannot be met
  reroute_every: int  # where a body gives neither that nor a path
  max_texts: int  # in one body

  def parse(self, body: bytes) -> CompletionRequest:
    """Parses and checks a body; raises ApiError."""
    values = parse_fields(body, FIELDS, UNSUPPORTED, 'model', 'prompt')
    path = asked_path(values, self.name, self.num_paths)
    every = values.get('reroute_every', self.reroute_every if path is None else 0)
    requests: list[Request] = []
    prefixes: list[str] = []
    given = prompt_list(values['prompt'])
    check_count(values, len(given), self.max_texts)  # before the work of tokenizing them
    prompts = _prompts(given, self.tokenizer)
    for text, tokens in prompts:
      most = values.get('max_tokens', max(1, min(MAX_TOKENS, self.max_length - len(tokens))))
      samples = self.samples(values, Request(tokens, most, path, reroute_every=every))
      requests += samples
      prefixes += [text if values.get('echo') else ''] * len(samples)
    return CompletionRequest(
      model=values['model'],
      requests=tuple(requests),
      prefixes=tuple(prefixes),
      prompt_tokens=sum(len(tokens) for _, tokens in prompts),
      stream=values.get('stream', False),
      include_usage=wants_usage(values),
      num_scores=asked_scores(values),
    )

  def samples(self, values: Mapping[str, Any], request: Request) -> list[Request]:
    """Returns the `n` requests of a prompt, with the sampling parameters of a body; raises ApiError."""
    n, stop = values.get('n', 1), values.get('stop', ())
    sampling = {name: values[name] for name in ('seed', 'temperature', 'top_k', 'top_p') if name in values}
    request = dataclasses.replace(request, stop=(stop,) if isinstance(stop, str) else tuple(stop), **sampling)
    self._check(request)
    self._check(dataclasses.replace(request, seed=request.seed + n - 1))  # the last seed: the others lie between
    return [dataclasses.replace(request, seed=request.seed + i) for i in range(n)]

  def _check(self, request: Request):
    try:
      self.check_request(request)
    except seals.Damaged:  # a fault of the server's; its message names the workdir
      raise
    except InputError as e:
      message = str(e).removeprefix('--')  # of '--path=4: ...'
      param = re.split(r'\W', message)[0]
      raise ApiError(400, message, param if param in FIELDS else None) from e


def prompt_list(prompt: Any) -> list[Any]:
  """Returns the prompts of a body, each a string or a list of token ids."""
  return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def check_count(values: Mapping[str, Any], num_prompts: int, max_texts: int):
  """Raises ApiError if a body asks for no text, or for too many."""
  n = values.get('n', 1)
  if not 1 <= n <= max_texts // num_prompts:
    raise ApiError(400, f'n={n} for {num_prompts} prompts: ask for 1 to {max_texts} texts at one time', 'n')


def named_path(name: str, num_paths: int, given: str) -> int | None:
  """Returns the path that a model's name stands for, None for the model `name` itself; raises ApiError."""
  match = re.fullmatch(re.escape(name) + r'(/path-(0|[1-9][0-9]{0,8}))?', given)
  if not match or (match[2] and int(match[2]) >= num_paths):
    paths = f'{name}/path-0' + (f' to path-{num_paths - 1}' if num_paths > 1 else '')
    message = f'there is no model {given[:80]!r}: ask for {name}, or {paths}'
    raise ApiError(404, message, 'model', 'model_not_found')
  return int(match[2]) if match[2] else None


def asked_path(values: Mapping[str, Any], name: str, num_paths: int) -> int | None:
  """Returns the path that a body asks for, by its model or by `path`; raises ApiError if these differ."""
  path, named = values.get('path'), named_path(name, num_paths, values['model'])
  if path is not None and named is not None and path != named:
    raise ApiError(400, f'path={path} is not the path of model {values["model"]!r}: leave one of them out', 'path')
  return named if path is None else path


def parse_object(body: bytes) -> dict[str, Any]:
  """Returns the fields of a body that are not null; raises ApiError."""
  try:
    values = json_text.parse(body)
    _check_depth(values)
  except ValueError as e:
    raise ApiError(400, f'the body is not JSON: {" ".join(str(e).split())}') from e
  if not isinstance(values, dict):
    raise ApiError(400, 'the body should be a JSON object, such as {"model": "NAME", "prompt": "A text"}')
  return {name: value for name, value in values.items() if value is not None}


def _check_depth(value: Any):
  """Raises ValueError if brackets nest so deeply that the parsed body could not be written again."""
  values = [value]
  for _ in range(MAX_DEPTH + 1):
    containers = [value for value in values if isinstance(value, dict | list)]
    values = [item for value in containers for item in (value.values() if isinstance(value, dict) else value)]
  if values:
    raise ValueError('its brackets nest too deeply')


def check_type(name: str, value: Any, fields: Fields = FIELDS):
  """Raises ApiError if a field is of another type."""
  description, is_valid = fields[name]
  if not is_valid(value):
    raise ApiError(400, f'{name} should be {description}', name)


def check_there(values: Mapping[str, Any], *names: str):
  """Raises ApiError if a field is missing."""
  for name in names:
    if name not in values:
      raise ApiError(400, f'{name} is missing', name)


def parse_fields(body: bytes, fields: Fields, unsupported: Mapping[str, tuple], *needed: str) -> dict[str, Any]:
  """Returns the fields that are not null, of the right types; raises ApiError.

  Args:
    fields: those that are supported, each with its type in words and as a test.
    unsupported: others, each with the values that change nothing.
    needed: fields that may not be missing.
  """
  values = parse_object(body)
  for name, value in values.items():
    _check_field(name, value, fields, unsupported)
  check_there(values, *needed)
  if '' in (values.get('stop'), *(values['stop'] if isinstance(values.get('stop'), list) else ())):
    raise ApiError(400, 'stop has an empty string, before which every text would end: leave it out', 'stop')
  _check_stop(values.get('stop', ()))
  return values


def _check_stop(stop: str | Sequence[str]):
  strings = (stop,) if isinstance(stop, str) else stop
  if len(strings) > MAX_STOPS or max(map(len, strings), default=0) > MAX_STOP_LENGTH:
    message = f'stop should have {MAX_STOPS} strings at most, of {MAX_STOP_LENGTH} characters at most'
    raise ApiError(400, message, 'stop')


def _check_field(name: str, value: Any, fields: Fields, unsupported: Mapping[str, tuple]):
  if name in unsupported:
    if value not in unsupported[name]:
      raise ApiError(400, f'{name} is not supported: leave it out', name, 'unsupported_parameter')
    return
  if name not in fields:
    nearest = difflib.get_close_matches(name, fields, 1)
    hint = f'; did you mean {nearest[0]}?' if nearest else ': leave it out'
    raise ApiError(400, f'there is no field {name[:80]!r}{hint}', name[:80], 'unknown_parameter')
  check_type(name, value, fields)


def _prompts(prompts: Sequence[Any], tokenizer: Tokenizer) -> list[tuple[str, tuple[int, ...]]]:
  parsed_prompts = []
  for one in prompts:
    if isinstance(one, str):
      if not one.isascii() and re.search('[\ud800-\udfff]', one):
        raise ApiError(400, 'prompt has a lone surrogate (half a character): send complete characters', 'prompt')
      parsed_prompts.append((one, tuple(tokenizer.encode(one, eos=False).tolist())))
    elif not 0 <= min(one) <= max(one) < tokenizer.vocab_size:
      raise ApiError(400, f'prompt has a token that is not from 0 to {tokenizer.vocab_size - 1}', 'prompt')
    else:
      parsed_prompts.append((tokenizer.decode(one), tuple(one)))
  return parsed_prompts


def wants_usage(values: Mapping[str, Any]) -> bool:
  options = values.get('stream_options')
  if options is None:
    return False
  if not values.get('stream'):
    raise ApiError(400, 'stream_options is for streams: set stream to true, or leave it out', 'stream_options')
  if set(options) - {'include_usage'} or not isinstance(options.get('include_usage', False), bool):
    raise ApiError(400, 'stream_options may have include_usage, true or false, and nothing else', 'stream_options')
  return options.get('include_usage', False)


def asked_scores(values: Mapping[str, Any]) -> int:
  """Returns how many of the router's scores each choice should list; raises ApiError."""
  most = values.get('router_scores', 0)
  if not 0 <= most <= MAX_SCORES:
    raise ApiError(400, f'router_scores={most} should be from 0 to {MAX_SCORES}', 'router_scores')
  return most


def new_id(prefix: str) -> str:
  return f'{prefix}-{uuid.uuid4().hex}'


def completion_object(name: str, kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns an answer, or a piece of one, whose id is `name`; `kind` is OpenAI's name of the object."""
  return {'id': name, 'object': kind, 'created': int(time.time()), 'model': model, 'choices': choices}


def choice_object(index: int, text: Mapping[str, Any], paths: Sequence[int], finished: str | None) -> dict[str, Any]:
  """Returns a text, or a piece of one, in the fields `text`; `paths` wrote it so far, one after another."""
  return {'index': index, **text, 'logprobs': None, 'finish_reason': finished or None, 'paths': [*paths]}


def scores_object(scores: Sequence[float], most: int) -> dict[str, Any]:
  """Returns the field of a choice that lists the paths with the best scores, best first; {} if none are asked for."""
  best = sorted(range(len(scores)), key=lambda path: -scores[path])[:most]
  return {'router_scores': [{'path': path, 'score': scores[path]} for path in best]} if most else {}


def usage_object(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
  total = prompt_tokens + completion_tokens
  return {'prompt_tokens': prompt_tokens, 'completion_tokens': completion_tokens, 'total_tokens': total}


def model_list(name: str, num_paths: int, created: int) -> dict[str, Any]:
  """Returns the model `name` and its paths."""
  names = [name, *(f'{name}/path-{path}' for path in range(num_paths))]
  return {'object': 'list', 'data': [model_object(one, created) for one in names]}


def model_object(name: str, created: int) -> dict[str, Any]:
  """Returns a model; `created` is in seconds since 1970."""
  return {'id': name, 'object': 'model', 'created': created, 'owned_by': 'dipaco_jax'}
