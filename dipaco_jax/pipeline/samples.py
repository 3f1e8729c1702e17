"""Samples: beginnings of validation documents, continued by the base model, the dense control and the routed paths.

The prompts are the first `routing.prefix_tokens` tokens of a few documents, of as many kinds as can be, and the same
for the whole run. The random number of a token depends on the run's seed, its prompt and its position alone: equal
models give equal texts, and different prompts share no random numbers. The paths continue the prompts now and then
while they train, after phases 1, 2, 4, 8..., and all models after training.
"""

import contextlib
import functools
import hashlib
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.algorithm.grid import Coordinates
from dipaco_jax.data.tokenizer import Transcript
from dipaco_jax.models import decoding, transformer
from dipaco_jax.pipeline import run as run_lib, validate_stage
from dipaco_jax.processes import processes
from dipaco_jax.storage import module_store, publishing, seals
from dipaco_jax.training.programs import Programs

FILE = 'evaluation/samples.json'
TOKENS, TEMPERATURE = 40, 0.7
CANDIDATES = 1000  # documents that prompts are chosen among
MAX_BYTES = 2e9  # of a path's parameters; larger ones are sampled after training only, when the device has room

Params = Any  # arrays by name, on the host or on the device
Tokens = Sequence[int] | np.ndarray


def choose(run: run_lib.Run) -> list[int]:
  """Returns indices of validation documents in random order, each of the kind with the fewest so far."""
  if not run.settings.evaluate.samples or run.settings.data.format == 'messages':
    return []
  split, least = run.sequences('validation'), run.settings.routing.prefix_tokens + 1
  drawn = np.random.default_rng(run.settings.seed).permutation(len(split))[:CANDIDATES].tolist()
  documents = {n: x for n, x in zip(drawn, split.read(drawn), strict=True) if len(x.tokens) >= least}
  chosen: list[int] = []
  while len(chosen) < min(run.settings.evaluate.samples, len(documents)):
    kinds = [documents[n].domain for n in chosen]
    chosen.append(min((n for n in documents if n not in chosen), key=lambda n: kinds.count(documents[n].domain)))
  return chosen


def sampling_seed(seed: int, prompt: Tokens) -> int:
  """Returns the uint32 that a prompt's continuation is drawn with: a digest of the run's seed and the prompt."""
  numbers = np.array([seed, *prompt], '<i8')
  return int.from_bytes(hashlib.sha256(numbers.tobytes()).digest()[:4], 'little')


@functools.partial(jax.jit, static_argnums=(0, 4))
def continue_texts(
  model: transformer.Transformer, params: Params, tokens_BL: jax.Array, seeds_B: jax.Array, num_tokens: int
) -> jax.Array:
  """Draws the tokens that follow each text, [B, num_tokens]; seeds_B: uint32."""
  B, L = tokens_BL.shape
  x_BLD = decoding.embed(model, params, tokens_BL)
  cache, logits_BV = decoding.prefill(model, params, decoding.Entry(x_BLD), jnp.int32(L), keep=())
  sampling = decoding.SamplingParams(seeds_B, jnp.full(B, TEMPERATURE), jnp.zeros(B, jnp.int32), jnp.ones(B))
  position_B = jnp.full(B, L, jnp.int32)
  first_B = decoding.sample(logits_BV, sampling, position_B)
  cache = decoding.resize(model, cache, L + num_tokens)
  texts = decoding.Texts(cache, first_B, position_B, position_B + num_tokens, sampling)
  _, rest_TB = decoding.advance(model, params, texts, num_tokens - 1)
  return jnp.concatenate([first_B[None], rest_TB]).T


class Sampler:
  """Continues the prompts of a run by models that are given to it."""

  def __init__(self, run: run_lib.Run):
    self.run, self.indices = run, choose(run)
    validation, prefix = run.sequences('validation').read(self.indices), run.settings.routing.prefix_tokens
    self.prompts = [x.tokens[:prefix].astype(np.int32) for x in validation]
    self.seeds = [sampling_seed(run.settings.seed, prompt) for prompt in self.prompts]
    self.num_tokens = max(0, min(TOKENS, run.settings.model.seq_len - prefix))
    domains = run.result('tokenize')['domains']
    self._documents = [self._document(x.tokens, domains[x.domain]) for x in validation]

  def _document(self, tokens: np.ndarray, domain: str) -> dict[str, str]:
    prefix = self.run.settings.routing.prefix_tokens
    prompt, following = tokens[:prefix], tokens[prefix : prefix + self.num_tokens]
    return {'domain': domain, 'prompt': self._text([], prompt), 'original': self._text(prompt, following)}

  def _text(self, before: Tokens, tokens: Tokens) -> str:
    """Returns the text of tokens that follow others, up to the end of the document."""
    transcript, end_ids = Transcript(self.run.tokenizer, [int(t) for t in before]), self.run.tokenizer.end_ids
    for token in tokens:
      if token in end_ids:
        break
      transcript.add(int(token))
    transcript.close()
    return transcript.take(final=True)

  def texts(self, params: Params) -> list[str]:
    """Returns a model's continuation of each prompt."""
    prompts_BL, seeds_B = np.stack(self.prompts), np.array(self.seeds, np.uint32)
    drawn = np.asarray(continue_texts(self.run.model, params, prompts_BL, seeds_B, self.num_tokens))
    return [self._text(prompt, tokens) for prompt, tokens in zip(self.prompts, drawn, strict=True)]

  def texts_by_path(self, paths: Sequence[int], params_of_path: Callable[[int], Params]) -> list[str]:
    """Returns each prompt's continuation by its own path."""
    by_path = {path: self.texts(params_of_path(path)) for path in sorted({*paths})}
    return [by_path[path][i] for i, path in enumerate(paths)]

  def to_dict(self) -> dict[str, Any]:
    """Returns the prompts, as the file has them; there are no texts yet."""
    how = {'temperature': TEMPERATURE, 'seeds': self.seeds}
    return {**how, 'prompts': self._documents, 'texts': {}, 'while_training': []}


def read(workdir: pathlib.Path) -> dict[str, Any] | None:
  """Reads a run's samples; None if there are none. Raises seals.Damaged."""
  file = workdir / FILE
  return seals.read_json(file, 'prompts', 'texts', 'while_training') if file.exists() else None


def write(run: run_lib.Run, has_control: bool):
  """Continues the prompts by the base, by the dense control if there is one, and by the paths that are evaluated."""
  run.disk.only_first(lambda: _write_last(run, has_control), 'samples')


def _write_last(run: run_lib.Run, has_control: bool):
  sampler, layout = Sampler(run), run.layout
  if not sampler.indices or not sampler.num_tokens:
    return
  about = _begun(run, sampler)
  texts = {'base': sampler.texts(_on_device(run.base()))}
  if has_control:
    texts['control'] = sampler.texts(_on_device(validate_stage.control(run)[1](0)))
  paths = run.last_routes()[sampler.indices].tolist()
  texts['paths'] = sampler.texts_by_path(
    paths, lambda path: _on_device(module_store.load_path(run.workdir, layout, path))
  )
  publishing.write_json(run.workdir / FILE, about | {'texts': texts, 'paths': paths})


def _on_device(params: Params) -> Params:
  return dict(sorted(jax.device_put(params).items()))


def _begun(run: run_lib.Run, sampler: Sampler) -> dict[str, Any]:
  """Returns the content of the file so far; a new one if it is damaged or has other prompts or random numbers."""
  new = sampler.to_dict()
  with contextlib.suppress(seals.Damaged):
    known = read(run.workdir) or {}
    if all(known.get(name) == new[name] for name in ('temperature', 'seeds', 'prompts')):
      return known
  return new


def is_due(phase: int) -> bool:
  """Returns whether paths are sampled after a phase, counted from 1: after 1, 2, 4, 8..."""
  return phase & (phase - 1) == 0


def while_training(
  run: run_lib.Run, programs: Programs, number: int
) -> Callable[[int, Callable[[Coordinates], Any]], None]:
  """Returns (phase, params_of_turn) -> None, which samples the paths of a round from time to time and never raises."""
  sampler = functools.cache(lambda: Sampler(run))
  size = 4 * sum(x.size for x in programs.shapes.values())
  failed: list[str] = []

  def sample(phase: int, params_of_turn: Callable[[Coordinates], Any]):
    if failed or not is_due(phase) or processes.joined() or size > MAX_BYTES:
      return
    try:
      _sample_paths(run, programs, sampler(), run.routed('validation', number), phase, params_of_turn)
    except Exception as e:  # a sample is not worth a run
      failed.append(str(e))
      logging.warning('no samples are made while training: %s', str(e) or repr(e))

  return sample


def _sample_paths(
  run: run_lib.Run, programs: Programs, sampler: Sampler, routed: np.ndarray, phase: int, params_of_turn
):
  if not sampler.indices or not sampler.num_tokens:
    return
  paths = routed[sampler.indices].tolist()
  by_path = {}
  for turn in programs.placement.turns():
    positions = [(i, path) for i, path in enumerate(programs.placement.paths(turn)) if path in paths]
    params = params_of_turn(turn) if positions else {}
    for i, path in positions:
      own = jax.device_get(path_parameters(params, i, len(programs.layout.grid.shape)))
      by_path[path] = sampler.texts(_on_device(own))
  about = _begun(run, sampler)
  if 'base' not in about['texts']:
    about['texts'] = {'base': sampler.texts(_on_device(run.base()))}
  before = [entry for entry in about['while_training'] if entry['phase'] < phase]
  entry = {'phase': phase, 'paths': paths, 'texts': [by_path[path][i] for i, path in enumerate(paths)]}
  publishing.write_json(run.workdir / FILE, about | {'while_training': [*before, entry]})


@functools.partial(jax.jit, static_argnums=2)
def path_parameters(params: Params, position: int, num_axes: int) -> Params:
  """Returns the parameters of one path of those in flight, [m_a, ...] in front, by its position in row-major order."""
  return {name: x.reshape(-1, *x.shape[num_axes:])[position] for name, x in params.items()}
