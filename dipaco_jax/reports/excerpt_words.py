"""Sentences about texts and the paths that read them, for pages and terminals."""

from dipaco_jax.routing.chunk_losses import Excerpt, Excerpts


def how_chosen(found: Excerpts) -> str:
  """Says how the paths were chosen."""
  if not found.by:
    return 'Each text has one path.'
  prefix, every = found.prefix_tokens, f'It is chosen anew every {found.every} tokens'
  by = f'the router, from the {prefix} tokens' if found.by == 'router' else 'the learned chooser, from all tokens'
  return f'A text begins under the path that its first {prefix} tokens are routed to. {every}, by {by} before.'


def losses(found: Excerpts, document: Excerpt) -> str:
  """Gives a text's mean losses in one line."""
  if not document.counted:
    return f'No loss is counted: the text is no longer than the {found.prefix_tokens} tokens that the router reads.'
  under = f'{nats(document.base)} nats a token under the base, {nats(document.nats)} under path {document.path}'
  return f'{under}, {nats(document.rerouted)} with paths chosen anew.' if found.by else f'{under}.'


def nats(loss: float | None) -> str:
  """Returns '2.250', or '-' where there is no loss."""
  return '-' if loss is None else f'{loss:.3f}'


def new_path(document: Excerpt) -> list[bool]:
  """Returns whether each chunk has another path than the one before it; the first has."""
  paths = [chunk.path for chunk in document.chunks]
  return [i == 0 or path != paths[i - 1] for i, path in enumerate(paths)]
