"""OpenAI's chat completions: parses bodies with the chat template, and formats texts as messages. No HTTP, no JAX.

The extensions are those of completions except `reroute_every`, because a conversation stays on its path.
`chat_template_kwargs` sets additional variables of the template, as in vLLM.
"""

from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import conversation
from dipaco_jax.data.chat_template import ChatTemplate
from dipaco_jax.inference.request import Request
from dipaco_jax.serving import openai_api
from dipaco_jax.serving.openai_api import ApiError, CompletionRequest, ServedModel

NO_TEMPLATE = 'this model has no chat template, which formats a conversation as one text: use /v1/completions'
LIMIT = 'max_completion_tokens'
FIELDS: openai_api.Fields = {
  name: kind for name, kind in openai_api.FIELDS.items() if name not in ('prompt', 'echo', 'reroute_every')
} | {
  'messages': ('a list of objects, as [{"role": "user", "content": "A text"}]', lambda x: isinstance(x, list)),
  LIMIT: openai_api.FIELDS['max_tokens'],
  'chat_template_kwargs': ('an object', lambda x: isinstance(x, dict)),
  **dict.fromkeys(('safety_identifier', 'prompt_cache_key'), openai_api.FIELDS['user']),  # accepted without effect
  'metadata': ('an object', lambda x: isinstance(x, dict)),
}
# Fields that are rejected, except with these values, which have no effect.
UNSUPPORTED: dict[str, tuple] = dict(
  logprobs=(False,), top_logprobs=(0,), logit_bias=({},), presence_penalty=(0,), frequency_penalty=(0,),
  response_format=({'type': 'text'},), tools=([],), tool_choice=('none', 'auto'), parallel_tool_calls=(True, False),
  functions=([],), function_call=('none', 'auto'), modalities=(['text'],), audio=(), prediction=(), store=(False,),
  service_tier=('auto', 'default'), reasoning_effort=(), verbosity=(), web_search_options=(), echo=(False,),
  add_generation_prompt=(True,), continue_final_message=(False,), reroute_every=(0,),
)  # fmt: skip
# Variables in chat_template_kwargs that are rejected because they are fixed, except with these values.
FIXED: dict[str, tuple] = dict(messages=(), tools=(None, []), documents=(None, []), add_generation_prompt=(True,))


class ChatFormat:
  id_prefix = 'chatcmpl'
  whole_object = 'chat.completion'
  piece_object = 'chat.completion.chunk'

  def whole(self, text: str) -> dict[str, Any]:
    return {'message': {'role': 'assistant', 'content': text, 'refusal': None}}

  def pieces(self, piece: str, is_first: bool, finished: str) -> list[tuple[dict[str, Any], str]]:
    """Returns a stream's (delta, finish reason) for a piece: role first, text, and the reason after the last text."""
    deltas: list[tuple[dict[str, Any], str]] = []
    if is_first:
      deltas.append(({'delta': {'role': 'assistant', 'content': ''}}, ''))
    if piece:
      deltas.append(({'delta': {'content': piece}}, ''))
    if finished:
      deltas.append(({'delta': {}}, finished))
    return deltas


def parse(model: ServedModel, template: ChatTemplate | None, body: bytes) -> CompletionRequest:
  """Parses and checks a body of POST /v1/chat/completions; raises ApiError."""
  if template is None:
    raise ApiError(400, NO_TEMPLATE)
  values = openai_api.parse_fields(body, FIELDS, UNSUPPORTED, 'model', 'messages')
  _check_template_values(values.get('chat_template_kwargs', {}))
  path = openai_api.asked_path(values, model.name, model.num_paths)
  try:
    openai_api.check_count(values, 1, model.max_texts)  # before the work of tokenizing
  except ApiError as e:
    raise _as_chat_error(e, values) from e
  try:
    messages = conversation.check_messages(values['messages'])
    tokens = tuple(template.encode(messages, values.get('chat_template_kwargs')))
    is_routed = path is None and model.num_paths > 1
    text = conversation.routing_text(messages)
    routed_by = tuple(model.tokenizer.encode(text, eos=False).tolist()) if is_routed else ()
  except InputError as e:
    raise ApiError(400, str(e), 'messages') from e
  request = Request(tokens, _max_tokens(values, max(1, model.max_length - len(tokens))), path, routed_by=routed_by)
  try:
    requests = model.samples(values, request)
  except ApiError as e:
    raise _as_chat_error(e, values) from e
  return CompletionRequest(
    model=values['model'],
    requests=tuple(requests),
    prefixes=('',) * len(requests),
    prompt_tokens=len(tokens),
    stream=values.get('stream', False),
    include_usage=openai_api.wants_usage(values),
    format=ChatFormat(),
    num_scores=openai_api.asked_scores(values),
  )


def _max_tokens(values: dict[str, Any], room: int) -> int:
  """Returns the maximum number of tokens of an answer: by default, as many as fit into `room`."""
  limit = values.get(LIMIT)
  old_limit = values.get('max_tokens')
  if limit is not None and old_limit is not None and limit != old_limit:
    problem = f'max_tokens={old_limit} contradicts max_completion_tokens={limit}: leave one of them out'
    raise ApiError(400, problem, 'max_tokens')
  return next((number for number in (limit, old_limit) if number is not None), room)


def _check_template_values(variables: dict[str, Any]):
  """Raises ApiError if `chat_template_kwargs` changes a variable that is fixed."""
  for name in variables.keys() & FIXED.keys():
    if variables[name] not in FIXED[name]:
      problem = f'chat_template_kwargs.{name} is not supported: leave it out'
      raise ApiError(400, problem, 'chat_template_kwargs', 'unsupported_parameter')


def _as_chat_error(error: ApiError, values: dict[str, Any]) -> ApiError:
  """Returns an error of completions that names the fields of chat completions instead."""
  message, param = str(error), error.body['error']['param']
  if LIMIT in values:
    message, param = message.replace('max_tokens', LIMIT), LIMIT if param == 'max_tokens' else param
  if param == 'prompt':
    message, param = message.replace('prompt', 'conversation'), 'messages'
  return ApiError(error.status, message, param)
