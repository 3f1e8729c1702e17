"""README and BUILD say what is so: set-up lines, commands, options, configs, fields, files."""

import configparser
import re
import subprocess
import sys

import pytest
from repository import ROOT

from dipaco_jax.core import fields, modules, settings
from dipaco_jax.models import transformer
from dipaco_jax.reports import run_report

README, BUILD = (ROOT / 'README.md').read_text(), (ROOT / 'BUILD.md').read_text()
PAGES = README + BUILD
SET_UP = (
  'python3 -m venv .venv && .venv/bin/pip install -q -e . && .venv/bin/python -m dipaco_jax.main '
  '--config=configs/tiny.py --workdir=runs/tiny',
  "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest -q",
)
COMMANDS = ('main', 'recipe', 'status', 'generate', 'serve', 'export', 'harness', 'report', 'inspect')
FILES = {'inspect': 'inspect/__main__'}


def blocks(language: str) -> list[str]:
  return re.findall(rf'^```{language}\n(.*?)^```$', README, re.MULTILINE | re.DOTALL)


def test_set_up_lines():
  assert tuple(blocks('')[0].splitlines()) == SET_UP


def test_every_command_and_option_is_there():
  assert set(re.findall(r'-m dipaco_jax\.(\w+)', PAGES)) == set(COMMANDS)
  source = ''.join((ROOT / 'dipaco_jax' / f'{FILES.get(name, name)}.py').read_text() for name in COMMANDS)
  source += (ROOT / 'launch' / 'local.py').read_text()
  options = set(re.findall(r'(?<![\w-])--([a-z_]+)', README)) - {'help', 'config'}
  assert {'workdir', 'distributed', 'coordinator'} <= options
  assert not [name for name in options if f"'{name}'" not in source]


def test_every_config_and_field_is_there():
  named = fields.flatten(settings.Settings().to_dict())
  assert all((ROOT / path).is_file() for path in re.findall(r'--config=([\w/]+\.py)', PAGES))
  overrides = set(re.findall(r'--config\.([a-z_.]+)=', PAGES))
  assert 'train.phases' in overrides and overrides - {'grid', 'grid.a'} <= set(named)


def test_links_lead_somewhere():
  links = [link for link in re.findall(r'\]\(([^)#]+)', PAGES) if not link.startswith('https://')]
  assert len(links) > 10 and not [link for link in links if not (ROOT / link).is_file()]
  for page in (ROOT / 'README.md', ROOT / 'BUILD.md', ROOT / 'launch' / 'README.md'):
    for link, anchor in re.findall(r'\]\((?!https)([^)#]*)#([^)]+)\)', page.read_text()):
      target = page.parent / link if link else page
      headings = re.findall(r'^#+ (.*)$', target.read_text(), re.MULTILINE)
      assert anchor in [re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-') for heading in headings]


def test_every_figure_of_the_report_is_explained():
  rows = README.split('`report.json` holds')[1].split('\n## ')[0]
  explained = re.findall(r'`(\w+)`', ''.join(re.findall(r'^\| (.*?) \|', rows, re.MULTILINE)))
  others = (
    'held_back excluded skipped_steps pretrain_steps pretrain_tokens domain_nmi router_accuracy wall_s config_sha256 '
    'versions averaging_gap_by_phase'
  ).split()
  assert sorted(explained) == sorted({*run_report.EVALUATE, *run_report.TRAIN, *others})


def test_what_a_run_leaves_is_explained(undisturbed):
  rows = README.split('## What is in the workdir')[1].split('What a stage leaves')[0]
  explained = {name.split('/')[0] for name in re.findall(r'`([\w./]+)`', rows)}
  assert {path.name for path in undisturbed.iterdir()} == explained


START, KINDS, ROUTERS, EXCHANGES, _ = blocks('python')


CHANGES = '\n'.join([KINDS, ROUTERS, EXCHANGES]).strip().split('\n\n')


@pytest.mark.parametrize('kind', ['', *CHANGES], ids=lambda kind: kind[2:30])
def test_configs(kind):
  space: dict = {}
  exec(START, space)
  c = space['get_config']()
  exec(kind, space | {'c': c})
  s = settings.from_dict(c.to_dict())
  shapes = transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))
  assert len(modules.make_layout(s.grid, s.levels, shapes).levels) == len(c.levels)
  if not kind:
    shown = README.split('Parameters are called')[1].split('\n\n')[0]
    assert {name for name in shapes if 'block' not in name} <= set(re.findall(r'`([\w/]+)`', shown))


@pytest.mark.parametrize('name', COMMANDS)
def test_help(name):
  command = [sys.executable, '-m', f'dipaco_jax.{name}', '--help']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode == 0 and '--workdir' in done.stdout and not done.stderr


def test_every_dependency_has_its_reason():
  config = configparser.ConfigParser()
  config.read(ROOT / 'setup.cfg')
  listed = config['options']['install_requires'].split()
  for extra, names in config['options.extras_require'].items():
    assert f'`[{extra}]`' in BUILD
    listed += names.split()
  assert not [name for name in listed if f'`{name.partition(">")[0]}`' not in BUILD]
