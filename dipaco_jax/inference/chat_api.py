"""OpenAI's chat completions: bodies become requests by the chat template, texts become messages. No HTTP, no JAX.

Extensions are those of completions, without `reroute_every`: a conversation stays on its path. `chat_template_kwargs`
are names for the template, as in vLLM.
"""

from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.inference import conversation, openai_api
from dipaco_jax.inference.chat_template import ChatTemplate
from dipaco_jax.inference.openai_api import ApiError, CompletionRequest, ServedModel
from dipaco_jax.inference.request import Request

NO_TEMPLATE = 'this model has no chat template, which writes a conversation as one text: use /v1/completions'
FIELDS: openai_api.Fields = {
  name: kind for name, kind in openai_api.FIELDS.items() if name not in ('prompt', 'echo', 'reroute_every')
} | {
  'messages': ('a list of objects, as [{"role": "user", "content": "A text"}]', lambda x: isinstance(x, list)),
  'max_completion_tokens': openai_api.FIELDS['max_tokens'],
  'chat_template_kwargs': ('an object', lambda x: isinstance(x, dict)),
  **dict.fromkeys(('safety_identifier', 'prompt_cache_key'), openai_api.FIELDS['user']),  # these change nothing here
  'metadata': ('an object', lambda x: isinstance(x, dict)),
}
# Fields that are refused, and the values of each that change nothing and may be given.
UNSUPPORTED: dict[str, tuple] = dict(
  logprobs=(False,), top_logprobs=(0,), logit_bias=({},), presence_penalty=(0,), frequency_penalty=(0,),
  response_format=({'type': 'text'},), tools=([],), tool_choice=('none', 'auto'), parallel_tool_calls=(True, False),
  functions=([],), function_call=('none', 'auto'), modalities=(['text'],), audio=(), prediction=(), store=(False,),
  service_tier=('auto', 'default'), reasoning_effort=(), verbosity=(), web_search_options=(), echo=(False,),
  add_generation_prompt=(True,), continue_final_message=(False,), reroute_every=(0,),
)  # fmt: skip


class ChatFormat:
  id_prefix, whole_object, piece_object = 'chatcmpl', 'chat.completion', 'chat.completion.chunk'

  def whole(self, text: str) -> dict[str, Any]:
    return {'message': {'role': 'assistant', 'content': text, 'refusal': None}}

  def pieces(self, piece: str, is_first: bool, finished: str) -> list[tuple[dict[str, Any], str]]:
    """Returns the role before a text, its piece, and behind it why it has ended, as OpenAI's streams have them."""
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
  path = openai_api.asked_path(values, model.name, model.num_paths)
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
    raise _about_messages(e) from e
  stream, usage = values.get('stream', False), openai_api.wants_usage(values)
  prefixes = ('',) * len(requests)
  return CompletionRequest(values['model'], tuple(requests), prefixes, len(tokens), stream, usage, ChatFormat())


def _max_tokens(values: dict[str, Any], room: int) -> int:
  """Returns the tokens that an answer may have: by default, as many as there is room for."""
  most, other = values.get('max_completion_tokens'), values.get('max_tokens')
  if most is not None and other is not None and most != other:
    words = f'max_tokens={other} contradicts max_completion_tokens={most}: leave one of them out'
    raise ApiError(400, words, 'max_tokens')
  return next((number for number in (most, other) if number is not None), room)


def _about_messages(error: ApiError) -> ApiError:
  """Returns an error of a prompt as one of the messages that it was made of."""
  if error.body['error']['param'] != 'prompt':
    return error
  return ApiError(error.status, str(error).replace('prompt', 'conversation'), 'messages')
