"""Requests as the router in front of engines reads them: what chooses the path, and what each engine gets.

Fields are the engine's to check, but for those by which a path is chosen and prompts are dealt to several of them.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import conversation
from dipaco_jax.serving import openai_api
from dipaco_jax.serving.openai_api import ApiError

USAGE = ('prompt_tokens', 'completion_tokens', 'total_tokens')


class Asked(NamedTuple):
  """A request: its fields as an engine gets them, but for `model`, and the texts by which paths are chosen."""

  values: dict[str, Any]
  texts: list[str | list[int]]
  path: int | None  # that is asked for by name


class Part(NamedTuple):
  """What one engine gets: some of the prompts, for one of these paths, the best first."""

  paths: tuple[int, ...]
  prompts: tuple[int, ...]
  values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ApiParser:
  name: str  # of the model
  num_paths: int
  max_texts: int  # in one body

  def completion(self, body: bytes) -> Asked:
    """Parses a body of POST /v1/completions; raises ApiError."""
    values, path = self._values(body, 'model', 'prompt')
    texts = openai_api.prompt_list(values['prompt'])
    openai_api.check_count(values, len(texts), self.max_texts)
    return Asked(values, texts, path)

  def chat(self, body: bytes) -> Asked:
    """Parses a body of POST /v1/chat/completions, which the messages' own text routes; raises ApiError."""
    values, path = self._values(body, 'model', 'messages')
    try:
      return Asked(values, [conversation.routing_text(values['messages'])], path)
    except InputError as e:
      raise ApiError(400, str(e), 'messages') from e

  def _values(self, body: bytes, *needed: str) -> tuple[dict[str, Any], int | None]:
    values = openai_api.parse_object(body)
    for name in values.keys() & {'model', 'prompt', 'n', 'stream', 'path', 'reroute_every'}:
      openai_api.check_type(name, values[name])
    openai_api.check_there(values, *needed)
    if values.pop('reroute_every', 0):
      raise ApiError(400, 'reroute_every is not supported here: a text stays on its path', 'reroute_every')
    path = openai_api.asked_path(values, self.name, self.num_paths)
    if path is not None and not 0 <= path < self.num_paths:
      raise ApiError(400, f'path={path}: the paths are 0 to {self.num_paths - 1}', 'path')
    values.pop('path', None)
    return values, path


def deal(asked: Asked, ranks: Sequence[tuple[int, ...]]) -> list[Part]:
  """Deals prompts to paths; `ranks` are the paths of each prompt, the best first. Raises ApiError."""
  prompts: dict[tuple[int, ...], list[int]] = {}
  for index, paths in enumerate(ranks):
    prompts.setdefault(next((known for known in prompts if known[0] == paths[0]), paths), []).append(index)
  if len(prompts) == 1:
    return [Part(ranks[0], tuple(range(len(ranks))), asked.values)]
  if asked.values.get('stream'):
    raise ApiError(400, f'prompts of {len(prompts)} paths cannot be one stream: send each by itself', 'stream')
  return [
    Part(paths, tuple(own), asked.values | {'prompt': [asked.texts[i] for i in own]}) for paths, own in prompts.items()
  ]


def merge(parts: Sequence[Part], answers: Sequence[bytes]) -> bytes:
  """Joins the answers to the parts of a request, in the order of its prompts; raises ValueError if one is odd."""
  contents = [json_text.parse(answer) for answer in answers]
  n = parts[0].values.get('n', 1)
  choices, usage = [], dict.fromkeys(USAGE, 0)
  try:
    for part, answer in zip(parts, contents, strict=True):
      indices = [choice['index'] for choice in answer['choices']]
      if sorted(indices) != [*range(len(part.prompts) * n)]:
        raise ValueError(f'{len(part.prompts) * n} choices were asked for; their indices are {str(indices)[:80]}')
      for choice in answer['choices']:
        prompt, sample = divmod(choice['index'], n)
        choices.append(choice | {'index': part.prompts[prompt] * n + sample})
      for name in USAGE:
        usage[name] += answer['usage'][name]
  except (KeyError, TypeError, IndexError) as e:
    raise ValueError(f'an answer without {e}') from e
  merged = contents[0] | {'choices': sorted(choices, key=lambda choice: choice['index']), 'usage': usage}
  return json.dumps(merged, ensure_ascii=False, allow_nan=False).encode()
