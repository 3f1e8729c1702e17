"""The page to try a run: one file that fetches nothing else, and the description of the grid that it draws.

The page has the same bytes for every run and is served without a key. What it shows about a run comes from /v1. Its
policy allows the script and the style that it contains, by their hashes, and requests to this server, and nothing else.
"""

import base64
import hashlib
import pathlib
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from dipaco_jax.core.errors import InputError
from dipaco_jax.data.chat_template import ChatTemplate
from dipaco_jax.inference.engine import Engine
from dipaco_jax.serving import chat_api
from dipaco_jax.serving.openai_api import ServedModel

HTML = pathlib.Path(__file__).with_name('page.html').read_text(encoding='utf-8')


def security_policy(html: str) -> str:
  """Returns the Content-Security-Policy of a page that contains all of its scripts and styles."""
  sources = {'default-src': "'none'", 'connect-src': "'self'", 'img-src': 'data:'}  # an empty icon
  for tag in ('script', 'style'):
    contents = re.findall(rf'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    sources[f'{tag}-src'] = ' '.join(f"'sha256-{digest}'" for digest in hashes)
  sources |= dict.fromkeys(('base-uri', 'form-action', 'frame-ancestors'), "'none'")
  return '; '.join(f'{name} {source}' for name, source in sources.items())


HEADERS = {
  'Content-Security-Policy': security_policy(HTML),
  'X-Content-Type-Options': 'nosniff',
  'Referrer-Policy': 'no-referrer',
  'Cache-Control': 'no-cache',
}


async def show(request: Request) -> Response:
  """GET /."""
  return HTMLResponse(HTML, headers=HEADERS)


def describe(engine: Engine, model: ServedModel, template: ChatTemplate | None) -> dict[str, Any]:
  """Returns the answer to GET /v1/grid: the grid, its levels, and what requests may ask for."""
  layout = engine.run.layout
  names = layout.grid.coordinate_names
  reasons = {'router': _why_not_routed(engine), 'chat': '' if template else chat_api.NO_TEMPLATE}
  return {
    'model': model.name,
    'axes': [{'name': axis, 'size': size, 'names': names.get(axis)} for axis, size in layout.grid.sizes.items()],
    'levels': [{'name': level.name, 'axes': level.axes} for level in layout.levels],
    'paths': engine.paths_here,
    'max_length': model.max_length,
    'reroute_every': model.reroute_every,
    'unavailable': {name: reason for name, reason in reasons.items() if reason},
  }


def _why_not_routed(engine: Engine) -> str:
  """Returns why every request has to name a path; '' if the router chooses one."""
  if engine.run.layout.grid.num_paths == 1:
    return 'this run has one path'
  try:
    engine.run.router  # noqa: B018  # raises where there is none
  except InputError as e:
    return str(e)
  return ''
