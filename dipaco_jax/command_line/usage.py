"""What the commands are, what the options of `main` and the fields of a config mean: the text of `--help`."""

import dataclasses
import shutil
import textwrap
from collections.abc import Mapping

from dipaco_jax.command_line import config_file
from dipaco_jax.core import settings

COMMANDS = {  # by the files of this package that they are
  'main': ('--config=tiny --workdir=runs/tiny', 'trains, from text to report; the same command again goes on'),
  'size': ("--data='books/*.txt'", 'suggests a size of model, a grid and a command for a text and a machine'),
  'recipe': ('--config=tiny --workdir=runs/recipe', 'finds how often paths should exchange, and how, by short runs'),
  'local': ('--config=tiny --workdir=runs/islands', 'trains by islands: all roles on this machine'),
  'status': ('--workdir=runs/tiny', 'where a run is, how fast, when it ends; also while it runs'),
  'registry': ('--workdir=runs/islands check', 'checks, backs up or rebuilds the registry of islands'),
  'generate': ('--workdir=runs/tiny --prompt=TEXT', 'continues a text'),
  'serve': ('--workdir=runs/tiny', "answers requests as OpenAI's completions API does"),
  'route': (
    '--workdir=runs/tiny --engines=FILE',
    'the same by other engines, such as vLLM, one or more a path',
  ),
  'export': (
    '--workdir=runs/tiny --path=3 --out=DIR',
    "a path for other engines, as Hugging Face's transformers has it",
  ),
  'harness': ('--workdir=runs/tiny --tasks=NAME,NAME', 'tasks of the LM Evaluation Harness'),
  'inspect': ('--workdir=runs/tiny --text=WORDS', 'which path reads each part of a text, and its loss'),
  'report': ('--workdir=runs/tiny', 'writes the report again; several --workdir are compared'),
}
MODULES = {'train' if name == 'main' else name: name for name in COMMANDS}  # by what `dipaco` calls them

DEVICES = 'all devices are used; CUDA_VISIBLE_DEVICES and JAX_PLATFORMS choose among them'
LONG = 'write --config.train.phases, or --config.train.steps_per_phase: a run is as long as these say'
# What to write instead of options that do not exist, by the names they have in other programs.
MEANT = {
  last: 'write ' + ' or '.join(f'--config.{name}' for name in config_file.FIELDS if name.split('.')[-1] == last)
  for last in {name.split('.')[-1] for name in config_file.FIELDS}
} | {
  'epochs': LONG, 'num_epochs': LONG, 'max_steps': LONG, 'gpus': DEVICES, 'devices': DEVICES, 'device': DEVICES,
  'lr': 'write --config.inner.learning_rate or --config.outer.learning_rate',
  'resume': 'the same command again goes on where the run was stopped', 'data': "write --config.data.train='my/*.txt'",
  'output_dir': 'write --workdir', 'output': 'write --workdir', 'out': 'write --workdir',
}  # fmt: skip


def commands() -> str:
  """Returns the list of commands, by both of their names."""
  lines = []
  for name, module in MODULES.items():
    options, about = COMMANDS[module]
    lines.append(f'  dipaco {name} {options}\n      {about}')
  same = 'python -m dipaco_jax.main is dipaco train; python -m dipaco_jax.NAME is dipaco NAME for all others.'
  return '\n'.join(
    ['usage: dipaco COMMAND [OPTION ...]; dipaco COMMAND --help lists its options', '', *lines, '', same]
  )


def main_help(about: str, options: Mapping[str, str | None]) -> str:
  listed = [_entry(f'--{name}', words or '') for name, words in options.items()]
  fields = _entry('--config.FIELD=VALUE', 'Changes a field of the config; these are all fields, with their defaults.')
  shipped = f'Configs that come with this: {", ".join(config_file.shipped())}, in {config_file.SHIPPED.resolve()}'
  return '\n'.join([about, 'options:', *listed, fields, *_sections(), '', *textwrap.wrap(shipped, _width())])


def _sections() -> list[str]:
  """Returns every field with its default, under a line about its section."""
  words, lines, section = explanations(), [''], ''
  for name, value in config_file.FIELDS.items():
    before, section = section, name.rpartition('.')[0]
    if section != before:
      lines += ['', *textwrap.wrap(f'{section}: {words.get(section, "")}', _width())]
    lines.append(_entry(f'{name}={value!r}', words.get(name, '')))
  return lines


def _entry(name: str, words: str) -> str:
  """Returns one option or field with its explanation, wrapped."""
  indent = ' ' * 40
  wrapped = textwrap.wrap(words, _width(), initial_indent=indent, subsequent_indent=indent) or ['']
  if len(name) < 37:
    return f'  {name:38}{wrapped[0].strip()}\n'.rstrip() + ''.join(f'\n{line}' for line in wrapped[1:])
  return '\n'.join([f'  {name}', *wrapped]).rstrip()


def _width() -> int:
  return min(120, max(80, shutil.get_terminal_size().columns))


def explanations() -> dict[str, str]:
  """Returns what each section and each field is, in one line."""
  sections = [f for f in dataclasses.fields(settings.Settings) if not f.metadata]
  found = {f.name: (f.type.__doc__ or '').partition('\n')[0] for f in sections}
  for name, about in config_file.ABOUT.items():
    own = ["'package.module:name'"] if about.extensible else []
    choices = f' One of {", ".join([*about.choices, *own])}.' if about.choices else ''
    found[name] = f'{about.about}{choices}'
  return found
