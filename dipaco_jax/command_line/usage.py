"""The text of `--help`: commands, options of `main` and fields of a config."""

import dataclasses
import shutil
import textwrap
from collections.abc import Mapping

from dipaco_jax.command_line import config_file
from dipaco_jax.config import settings

COMMANDS = {  # {module of this package: (example of options, description)}
  'main': (
    '--config=tiny --workdir=runs/tiny',
    'Trains a run, from text to report. The same command resumes a run that was stopped.',
  ),
  'size': ("--data='books/*.txt'", 'Suggests a model size, a grid and a training command for a text and a machine.'),
  'recipe': (
    '--config=tiny --workdir=runs/recipe',
    'Determines by short runs how often paths should exchange modules, and with which outer step.',
  ),
  'local': ('--config=tiny --workdir=runs/islands', 'Trains with islands: starts all roles on this machine.'),
  'hub': (
    '--config=tiny --workdir=runs/home',
    'Runs all of a run of islands but its workers, and prints the line with which another machine joins.',
  ),
  'join': ('https://HOST:PORT#sha256=FINGERPRINT', 'Trains on this machine for the run of a hub.'),
  'gateway': (
    '--workdir=runs/islands',
    'Stands between workers and a run of islands, so that each needs one address and one token.',
  ),
  'status': ('--workdir=runs/tiny', 'Shows the progress, speed and expected end of a run, also while it runs.'),
  'registry': ('--workdir=runs/islands check', 'Checks, backs up or rebuilds the registry of islands.'),
  'owners': ('--workdir=runs/islands list', 'Suspends workers of islands, and lists what they contributed.'),
  'assemble': (
    '--path=NAME=DIR --path=NAME=DIR --base=DIR --data=FILES --workdir=NEW',
    'Assembles published paths of several owners into a workdir, with a router among them.',
  ),
  'generate': ('--workdir=runs/tiny --prompt=TEXT', 'Continues a text.'),
  'serve': ('--workdir=runs/tiny', 'Serves a run by the OpenAI completions API.'),
  'route': ('--workdir=runs/tiny --engines=FILE', 'Serves a run by other engines, such as vLLM, one or more per path.'),
  'export': (
    '--workdir=runs/tiny --path=3 --out=DIR',
    'Exports a path in the format of Hugging Face transformers, for other engines.',
  ),
  'merge': (
    '--workdir=runs/tiny --to=moe --out=DIR',
    'Merges paths into one model: a mixture of experts, or their mean.',
  ),
  'harness': ('--workdir=runs/tiny --tasks=NAME,NAME', 'Evaluates a run on tasks of the LM Evaluation Harness.'),
  'inspect': ('--workdir=runs/tiny --text=WORDS', 'Shows which path reads each part of a text, and its loss.'),
  'report': (
    '--workdir=runs/tiny',
    'Writes the report of a run again; compares several runs if --workdir is repeated.',
  ),
}
MODULES = {'train' if name == 'main' else name: name for name in COMMANDS}  # by the name after `dipaco`

DEVICES = 'all devices are used; select devices with CUDA_VISIBLE_DEVICES and JAX_PLATFORMS'
LONG = 'set --config.train.phases or --config.train.steps_per_phase, which determine the length of a run'
# Suggestions for options that do not exist, by the names they have in other programs.
MEANT = {
  last: 'use ' + ' or '.join(f'--config.{name}' for name in config_file.FIELDS if name.split('.')[-1] == last)
  for last in {name.split('.')[-1] for name in config_file.FIELDS}
} | {
  'epochs': LONG, 'num_epochs': LONG, 'max_steps': LONG, 'gpus': DEVICES, 'devices': DEVICES, 'device': DEVICES,
  'lr': 'use --config.inner.learning_rate or --config.outer.learning_rate',
  'resume': 'run the same command again to resume the run', 'data': "use --config.data.train='my/*.txt'",
  'output_dir': 'use --workdir', 'output': 'use --workdir', 'out': 'use --workdir',
}  # fmt: skip


def commands() -> str:
  """Returns the list of commands with their descriptions."""
  lines = []
  for name, module in MODULES.items():
    options, about = COMMANDS[module]
    lines.append(f'  dipaco {name} {options}\n      {about}')
  same = (
    'python -m dipaco_jax.main is the same as dipaco train, and python -m dipaco_jax.NAME as any other dipaco NAME.'
  )
  return '\n'.join(
    ['usage: dipaco COMMAND [OPTION ...]; dipaco COMMAND --help lists the options', '', *lines, '', same]
  )


def main_help(about: str, options: Mapping[str, str | None]) -> str:
  listed = [_entry(f'--{name}', help_text or '') for name, help_text in options.items()]
  fields = _entry('--config.FIELD=VALUE', 'Sets a field of the config. All fields and their defaults follow.')
  shipped = f'Included configs: {", ".join(config_file.shipped())}, in {config_file.SHIPPED.resolve()}'
  return '\n'.join([about, 'options:', *listed, fields, *_sections(), '', *textwrap.wrap(shipped, _width())])


def _sections() -> list[str]:
  """Returns every field with its default, below a description of its section."""
  descriptions = explanations()
  lines = ['']
  section = ''
  for name, value in config_file.FIELDS.items():
    before, section = section, name.rpartition('.')[0]
    if section != before:
      lines += ['', *textwrap.wrap(f'{section}: {descriptions.get(section, "")}', _width())]
    lines.append(_entry(f'{name}={value!r}', descriptions.get(name, '')))
  return lines


def _entry(name: str, description: str) -> str:
  """Returns one option or field with its description, wrapped."""
  indent = ' ' * 40
  wrapped = textwrap.wrap(description, _width(), initial_indent=indent, subsequent_indent=indent) or ['']
  if len(name) < 37:
    return f'  {name:38}{wrapped[0].strip()}\n'.rstrip() + ''.join(f'\n{line}' for line in wrapped[1:])
  return '\n'.join([f'  {name}', *wrapped]).rstrip()


def _width() -> int:
  return min(120, max(80, shutil.get_terminal_size().columns))


def explanations() -> dict[str, str]:
  """Returns {section or field: its description}."""
  sections = [f for f in dataclasses.fields(settings.Settings) if not f.metadata]
  descriptions = {f.name: (f.type.__doc__ or '').partition('\n')[0] for f in sections}
  for name, about in config_file.ABOUT.items():
    own = ["'package.module:name'"] if about.extensible else []
    choices = f' Choices: {", ".join([*about.choices, *own])}.' if about.choices else ''
    descriptions[name] = f'{about.about}{choices}'
  return descriptions
