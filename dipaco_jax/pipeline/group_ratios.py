"""Ratios of two models' perplexities by kind of text and by path, with their intervals over documents."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap


class Groups(NamedTuple):
  """What each validation document belongs to."""

  domain: np.ndarray  # [N] index into `domain_names`
  domain_names: Sequence[str]
  path: np.ndarray  # [N]


def count_documents(groups: Groups, tokens: np.ndarray, num_paths: int) -> dict[str, Any]:
  """Returns the numbers of documents and of tokens that count, by kind and by path. tokens: [N]."""
  counted = np.asarray(tokens) > 0
  documents = np.bincount(groups.domain, counted, len(groups.domain_names)).astype(int).tolist()
  by_domain = np.bincount(groups.domain, tokens, len(groups.domain_names)).astype(int).tolist()
  return {
    'validation_documents_by_domain': dict(zip(groups.domain_names, documents, strict=True)),
    'validation_documents_by_path': np.bincount(groups.path, counted, num_paths).astype(int).tolist(),
    'validation_tokens_by_domain': dict(zip(groups.domain_names, by_domain, strict=True)),
  }


def compare(name: str, groups: Groups, nats: np.ndarray, tokens: np.ndarray, num_paths: int) -> dict[str, Any]:
  """Returns ratios of perplexities and their intervals by kind and by path, as figures whose names begin with `name`.

  Args:
    nats: [N] of the one model less those of the other, on the same documents.
    tokens: [N] that count.
  """
  by_domain = [_ratio(nats, tokens, groups.domain == i) for i in range(len(groups.domain_names))]
  by_path = [_ratio(nats, tokens, groups.path == path) for path in range(num_paths)]
  return {
    f'{name}_by_domain': dict(zip(groups.domain_names, (ratio for ratio, _ in by_domain), strict=True)),
    f'{name}_interval_by_domain': dict(zip(groups.domain_names, (ends for _, ends in by_domain), strict=True)),
    f'{name}_by_path': [ratio for ratio, _ in by_path],
    f'{name}_interval_by_path': [ends for _, ends in by_path],
  }


def _ratio(nats: np.ndarray, tokens: np.ndarray, chosen: np.ndarray) -> tuple[float | None, Any]:
  """Returns the ratio of the chosen documents and its interval; None where no token counts or nothing is known."""
  count = tokens[chosen].sum()
  if not count:
    return None, None
  mean = nats[chosen].sum() / count
  return (float(np.exp(min(mean, 700.0))) if np.isfinite(mean) else None), bootstrap.interval(
    nats[chosen], tokens[chosen]
  )
