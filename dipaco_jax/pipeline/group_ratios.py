"""Ratios of two models' perplexities by kind of text and by path, with their intervals over documents."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap


class Groups(NamedTuple):
  """The kind of text and the path of each validation document."""

  domain: np.ndarray  # [N] index into `domain_names`
  domain_names: Sequence[str]
  path: np.ndarray  # [N]
  content: np.ndarray  # [N] digest of its document: equal ones count once


def count_documents(groups: Groups, tokens: np.ndarray, num_paths: int) -> dict[str, Any]:
  """Returns the numbers of different documents and of tokens that count, by kind and by path. tokens: [N]."""

  def count(group: np.ndarray, size: int) -> list[int]:
    pairs = np.unique(np.stack([group[counted].astype(np.uint64), groups.content[counted]]), axis=1)
    return np.bincount(pairs[0].astype(np.int64), minlength=size).tolist()

  counted = np.asarray(tokens) > 0
  documents = count(groups.domain, len(groups.domain_names))
  by_domain = np.bincount(groups.domain, tokens, len(groups.domain_names)).astype(int).tolist()
  return {
    'validation_documents_by_domain': dict(zip(groups.domain_names, documents, strict=True)),
    'validation_documents_by_path': count(groups.path, num_paths),
    'validation_tokens_by_domain': dict(zip(groups.domain_names, by_domain, strict=True)),
  }


def compare(name: str, groups: Groups, nats: np.ndarray, tokens: np.ndarray, num_paths: int) -> dict[str, Any]:
  """Returns ratios of perplexities and their intervals by kind and by path, as figures whose names begin with `name`.

  Args:
    nats: [N] of the one model less those of the other, on the same documents.
    tokens: [N] that count.
  """
  by_domain = [_ratio(groups, nats, tokens, groups.domain == i) for i in range(len(groups.domain_names))]
  by_path = [_ratio(groups, nats, tokens, groups.path == path) for path in range(num_paths)]
  return {
    f'{name}_by_domain': dict(zip(groups.domain_names, (ratio for ratio, _ in by_domain), strict=True)),
    f'{name}_interval_by_domain': dict(zip(groups.domain_names, (ends for _, ends in by_domain), strict=True)),
    f'{name}_by_path': [ratio for ratio, _ in by_path],
    f'{name}_interval_by_path': [ends for _, ends in by_path],
  }


def _ratio(groups: Groups, nats: np.ndarray, tokens: np.ndarray, chosen: np.ndarray) -> tuple[float | None, Any]:
  """Returns the ratio of the chosen documents and its interval; None if no token counts or nothing is known."""
  count = tokens[chosen].sum()
  if not count:
    return None, None
  mean = nats[chosen].sum() / count
  interval = bootstrap.interval(nats[chosen], tokens[chosen], contents_N=groups.content[chosen])
  return (float(np.exp(min(mean, 700.0))) if np.isfinite(mean) else None), interval
