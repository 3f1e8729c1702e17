"""The page that goes with an exported path: how it was trained, what was measured, how to load it. Markdown."""

import dataclasses
import math
from typing import Any

import dipaco_jax
from dipaco_jax.core import outer, printable, settings
from dipaco_jax.reports import headline

PAGE = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- dipaco
- llama
---

# {title}

A language model of {parameters} parameters, in the layout of Hugging Face's Llama: {one_of}, trained with
dipaco_jax {version} as DiPaCo ([arXiv 2403.10616](https://arxiv.org/abs/2403.10616)) describes.
{others}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = '.'  # this one
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer('The first words of a text', return_tensors='pt')
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

It continues text, and has no chat template. No token goes before a text, and the end-of-text token behind it. Its rows
of training had {seq_len} tokens: of longer texts it has seen none. `tokenizer.json` gives the ids that it was trained
on; `tokenizer.model` is the same as a SentencePiece model. Weights are {dtype}.

## Training

| | |
|---|---|
{training}

## Evaluation

{evaluation}
"""


@dataclasses.dataclass(frozen=True)
class Facts:
  """Of one path at one version."""

  settings: settings.Settings
  number: int
  coordinates: tuple[int, ...]
  version: int
  modules: dict[str, str]  # by level, its name in the workdir
  measured: bool  # whether the report is about this version of the path
  report: dict[str, Any]  # what report.json holds; nothing where there is none yet
  dtype: str
  parameters: int


def make(f: Facts) -> str:
  """README.md, with the heading that model hubs read."""
  paths = math.prod(size for _, size in f.settings.grid)
  return PAGE.format(
    title=f'Path {f.number} of {paths}' if paths > 1 else 'A model of one path',
    version=dipaco_jax.__version__,
    parameters=f'{f.parameters:,}',
    one_of=f'one of {paths} paths' if paths > 1 else 'the only path of a run',
    others=_others(f) if paths > 1 else '',
    seq_len=f'{f.settings.model.seq_len:,}',
    dtype=f.dtype,
    training='\n'.join(f'| {name} | {_cell(value)} |' for name, value in _training(f).items()),
    evaluation=_evaluation(f),
  )


def _cell(value: str) -> str:
  return printable.name(value, 1000).replace('|', '\\|')


def _others(f: Facts) -> str:
  if f.settings.routing.method == 'random':
    return '\nText was dealt out to the paths at random, so that any of them serves for any text.\n'
  return (
    '\nEach path was trained on its own kind of text, and is meant for it. Which path a text belongs to, a router '
    f'decides\nby its first {f.settings.routing.prefix_tokens} tokens; it is not in this folder: '
    '`dipaco_jax.load_router` reads it from the run.\n'
  )


def _training(f: Facts) -> dict[str, str]:
  s, t = f.settings, f.settings.train
  paths = math.prod(size for _, size in s.grid)
  steps = t.steps_per_phase * sum(
    int(outer.active_paths(t, paths, s.seed, phase)[f.number]) for phase in range(f.version)
  )
  base = f'{s.pretrain.steps:,} steps of {s.pretrain.batch_size:,} rows on all text' if s.pretrain.steps else 'no steps'
  base += f', from `{s.pretrain.init}`' if s.pretrain.init else ''
  tokens = (s.pretrain.steps * s.pretrain.batch_size + steps * t.batch_size) * s.model.seq_len
  grid = ' x '.join(f'{name} {size}' for name, size in s.grid)
  place = ', '.join(f'{name}={i}' for (name, _), i in zip(s.grid, f.coordinates, strict=True))
  return {
    'text': _source(s.data),
    'base model': base,
    **({'grid of paths': grid, 'this path': f'{f.number}, at {place}'} if s.grid else {}),
    'modules': ', '.join(f'`{name}`' for name in f.modules.values()),
    'version': f'{f.version}: as many outer steps, {t.steps_per_phase:,} inner steps apart',
    'steps of this path': f'{steps:,} of {t.batch_size:,} rows, after those of the base',
    'tokens read, with the base': f'{tokens:,}',
    'routing': _routing(s),
    'optimizers': f'{s.inner.optimizer} inside the path, {s.outer.optimizer} between paths',
  }


def _source(data: settings.Data) -> str:
  if data.source == 'files':
    return ', '.join(f'`{pattern}`' for pattern in data.train)
  return {'stdlib': "Python's own source and documentation"}.get(data.source, f'`{data.name}` by {data.source}')


def _routing(s: settings.Settings) -> str:
  return f'{s.routing.method}, by the first {s.routing.prefix_tokens} tokens, which no loss counts'


def _evaluation(f: Facts) -> str:
  report = f.report
  if report.get('perplexity') is None:
    return 'Nothing was measured yet when this was exported.'
  own = report['perplexity_by_path'][f.number]
  rows = {
    'this path, on the documents routed to it': _figure(own, 'none was'),
    'all paths, each document under its own': _figure(report['perplexity']),
    'the base model, on all documents': _figure(report['base_perplexity']),
  }
  if report.get('control_perplexity') is not None:
    rows[f'{headline.DENSE}, on all documents'] = _figure(report['control_perplexity'])
  if not f.measured:
    rows['this path, on the documents routed to it'] = 'measured of another version only'
  table = '\n'.join(f'| {name} | {x} |' for name, x in rows.items())
  about = f'on {report["validation_tokens"]:,} tokens of text held back, without the first '
  about += f'{f.settings.routing.prefix_tokens} of each document'
  return f'Perplexity {about}:\n\n| | perplexity |\n|---|---|\n{table}'


def _figure(x: float | None, instead: str = 'not measured') -> str:
  return instead if x is None else f'{x:.2f}'
