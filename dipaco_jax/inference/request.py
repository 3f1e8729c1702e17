"""A request for a continuation: the prompt, and how it is continued. Does not import JAX."""

import dataclasses

from dipaco_jax.core.errors import InputError


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt and how it is continued. The defaults are those of the commands."""

  tokens: tuple[int, ...]  # the prompt
  max_tokens: int = 128
  path: int | None = None  # None: the router's choice
  temperature: float = 1.0  # 0: the likeliest token
  top_k: int = 0  # number of most likely tokens to sample from; 0 means all
  top_p: float = 1.0  # sample among the fewest of the likeliest that have this probability together
  seed: int = 0
  stop: tuple[str, ...] = ()  # the text ends before the first of these
  until_eos: bool = True  # if False, generation continues after the end of a text
  reroute_every: int = 0  # W; 0: one path for the whole text
  routed_by: tuple[int, ...] = ()  # tokens that choose the path in place of the prompt's; none: the prompt's


def check_request(request: Request, max_length: int):
  """Raises InputError that names the field and the fix; `max_length` is in tokens, prompt included."""
  given = len(request.tokens)
  most = request.max_tokens
  every = request.reroute_every
  if not given:
    raise InputError('prompt is empty: give some text')
  if most < 1:
    raise InputError(f'max_tokens={most} should be 1 or more')
  if given + most > max_length:
    shorten = f'shorten the prompt to {max_length - 1} tokens or fewer'
    fewer = f'shorten the prompt, or set max_tokens to {max_length - given} or less'
    raise InputError(
      f'prompt has {given} tokens, and with max_tokens={most} that is more than the {max_length} of '
      f'config.model.seq_len: {fewer if given < max_length else shorten}'
    )
  for name in ('temperature', 'top_k'):
    if not 0 <= getattr(request, name) < 2**31:
      raise InputError(f'{name}={getattr(request, name)} should be 0 or more, and less than 2^31')
  if not 0 < request.top_p <= 1:
    raise InputError(f'top_p={request.top_p} should be above 0, and at most 1')
  if not 0 <= request.seed < 2**32:
    raise InputError(f'seed={request.seed} should be from 0 to 2^32 - 1')
  if every < 0 or (every and request.path is not None):
    raise InputError(f'reroute_every={every} should be 0 or more, and 0 where path={request.path} is named')
