"""What an owner's worker may complete, where text stays with its owners: facts made again from what it sent.

The gateway cannot read an owner's store. It checks that facts are of the claimed task, and types and ranges of what
they say. Whether sizes are true is known to the owner alone.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from dipaco_jax.config import owners
from dipaco_jax.core import printable
from dipaco_jax.gateway import fact_checks, requests
from dipaco_jax.gateway.authority import EVALUATE, EVALUATION, Scope
from dipaco_jax.gateway.refusals import malformed
from dipaco_jax.islands import audit_facts, own_text, owner_facts
from dipaco_jax.islands.island import OWN_TEXT, Island
from dipaco_jax.islands.state_facts import STATE
from dipaco_jax.registry.registry import Fact, Task

MOST = 2**53  # tokens
TOKENS = 'tokens'


def is_total(value: Any) -> bool:
  """Returns whether a value is an integer from 0 that all readers of JSON can read."""
  return type(value) is int and 0 <= value < MOST


ABOUT: fact_checks.Checks = {
  TOKENS: is_total, 'documents': is_total, 'holdout_targets': is_total, 'sha256': requests.is_sha256,
}  # fmt: skip


def of_text(island: Island, task: Task, given: Sequence[Fact], worker: str) -> list[Fact]:
  """Returns the fact of an owner's text, made again. Raises Refused."""
  if len(given) != 1 or given[0][:4] != (OWN_TEXT, task.key, 0, ''):
    raise malformed('the text of an owner is one fact of its task')
  by_path, trees = given[0].meta.get('paths'), given[0].meta.get('trees')
  paths = {str(path) for path in owners.paths_of(island.layout.grid, task.key)}
  if not isinstance(by_path, dict) or by_path.keys() != paths or not all(map(_is_about, by_path.values())):
    raise malformed('the text of an owner has sizes and a digest of each path of the owner, and nothing else')
  if not isinstance(trees, dict) or {*trees} != {own_text.SHARDS} or not all(map(requests.is_sha256, trees.values())):
    raise malformed('the text of an owner has one sha256 of its shards')
  about = {'paths': by_path, 'trees': trees}
  fact = given[0]._replace(meta=about | fact_checks.costs(given[0].meta))
  if fact.sha256 != hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest():
    raise malformed('the fact of a text has another sha256 than its content')
  standing = island.registry.facts(OWN_TEXT, [task.key], 0)
  if any(owner_facts.sizes(before) != owner_facts.sizes(fact) for before in standing):
    raise malformed('the text of an owner stays the same during a run')
  return [fact]


def _is_about(given: Any) -> bool:
  """Returns whether a value says all that is to be known of the text of a path."""
  return isinstance(given, dict) and given.keys() == ABOUT.keys() and all(ABOUT[name](x) for name, x in given.items())


def of_evaluation(island: Island, task: Task, given: Sequence[Fact], worker: str) -> list[Fact]:
  """Returns the evaluation of a path by its owner, made again. Raises Refused."""
  if len(given) != 1 or given[0][:3] != (EVALUATION, task.key, task.number):
    raise malformed('an evaluation is one fact of its task')
  fact = fact_checks.evaluation(given[0])
  return [fact._replace(meta=fact.meta | fact_checks.costs(given[0].meta))]


OF_AUDIT: fact_checks.Checks = {
  'phases': requests.is_counts, 'differing': requests.is_counts, 'started': requests.is_size, 'ended': requests.is_size,
  'levels': lambda x: isinstance(x, list) and all(map(requests.is_text, x)), 'difference': fact_checks.is_moved,
}  # fmt: skip


def of_audit(island: Island, task: Task, given: Sequence[Fact], worker: str) -> list[Fact]:
  """Returns the fact of an audit by another worker of the path's owner, made again. Raises Refused.

  It can accuse none but those who have trained the phase: workers of the same owner.
  """
  if len(given) != 1 or given[0][:4] != (audit_facts.FACT_OF[task.kind], task.key, task.number, ''):
    raise malformed('an audit is one fact of its task')
  meta, published = given[0].meta, audit_facts.published(island, task.key, task.number)
  if meta.get('equal') is None or not published:
    why = printable.name(str(meta.get(audit_facts.CLOSED, 'the phase was withdrawn')), requests.MOST_ERROR)
    return [audit_facts.closed(dataclasses.replace(island, name=worker), task, why)]
  digests: dict[str, Any] = {name: meta.get(name) for name in ('checkpoint', 'digest')}
  about = {name: meta.get(name) for name in OF_AUDIT} | {'by': worker, 'worker': meta.get('worker')}
  is_right = type(meta['equal']) is bool and all(map(requests.is_sha256, digests.values()))
  is_right = is_right and all(check(about[name]) for name, check in OF_AUDIT.items())
  if not is_right or about['worker'] not in {fact.meta.get('worker') for fact in published}:
    raise malformed('an audit says what was compared, and names who has trained the phase')
  expected = {STATE: meta[STATE]} if requests.is_sha256(meta.get(STATE)) else {}
  noted = about | expected | fact_checks.costs(meta)
  return [audit_facts.result(task, digests['checkpoint'], meta['equal'], digests['digest'], noted)]


CHECKS = {OWN_TEXT: of_text, EVALUATE: of_evaluation, **dict.fromkeys(audit_facts.KINDS, of_audit)}


def for_others(fact: Fact) -> Fact:
  """Returns what other owners may know of a text: the number of tokens by path, which is its weight [2.7]."""
  paths = {path: {TOKENS: about[TOKENS]} for path, about in fact.meta['paths'].items()}
  return fact._replace(sha256='', meta={'paths': paths})


def tasks_of_store(scope: Scope) -> set[tuple[str, str]]:
  """Returns (kind, key) of the tasks that write objects into the store of a token's owner."""
  return {(OWN_TEXT, scope.owner), *((kind, path) for kind in ('train', 'piece') for path in scope.path_keys)}
