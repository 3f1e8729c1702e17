"""Statements on the pages are right: set-up lines, commands, options, configs, fields, files, figures."""

import configparser
import json
import re
import statistics
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from repository import ROOT

from dipaco_jax import algorithm
from dipaco_jax.algorithm import modules, phase
from dipaco_jax.command_line import config_file
from dipaco_jax.config import fields, settings
from dipaco_jax.models import transformer
from dipaco_jax.reports import run_report

DOCS = sorted((ROOT / 'docs').glob('*.md'))
TOP = [ROOT / f'{name}.md' for name in ('README', 'BUILD', 'CONTRIBUTING', 'CHANGELOG', 'SECURITY')]
TEXT = {page.stem: page.read_text() for page in [*DOCS, *TOP]}
PAGES = ''.join(TEXT.values())
# Options of other programs are in these: gcloud, kubectl, SQL, pip. Tests of launch/ parse their commands.
FOREIGN = {'islands', 'launching', 'tpu', 'troubleshooting', 'benchmarks', 'BUILD', 'CONTRIBUTING'}
SET_UP = (
  'python3 -m venv .venv && .venv/bin/pip install -q -e . && .venv/bin/python -m dipaco_jax.main '
  '--config=configs/tiny.py --workdir=runs/tiny',
  "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest -q",
)
COMMANDS = (
  'main',
  'size',
  'recipe',
  'local',
  'hub',
  'join',
  'gateway',
  'status',
  'registry',
  'owners',
  'assemble',
  'generate',
  'serve',
  'route',
  'export',
  'merge',
  'harness',
  'report',
  'inspect',
)
FILES = {name: f'{name}/__main__' for name in ('gateway', 'inspect', 'registry')}


def blocks(page: str, language: str) -> list[str]:
  return re.findall(rf'^```{language}\n(.*?)^```$', TEXT[page], re.MULTILINE | re.DOTALL)


def test_set_up_lines():
  assert tuple(blocks('README', '')[0].splitlines()) == SET_UP
  assert blocks('index', '')[0].strip() == SET_UP[0]


def test_the_pages_state_the_results_of_the_experiments():
  by_row: dict[str, list[dict]] = {}
  for run in json.loads((ROOT / 'experiments' / 'results' / 'micro' / 'methods.json').read_text())['runs']:
    by_row.setdefault(run['row'], []).append(run)
  measured = [
    [
      f'{statistics.fmean(run["perplexity"] for run in runs):.2f}',
      f'{statistics.fmean(run["perplexity_by_domain"]["law_de"] for run in runs):.1f}',
      f'{statistics.fmean(of_others(run) for run in runs):.1f}',
      f'{runs[0]["parameters_total"]:,}',
    ]
    for runs in by_row.values()
  ]
  on_readme, on_results = stated_results('README'), stated_results('results')
  assert len(on_results) == 9 and not [row for row in on_results if row not in measured]
  assert len(on_readme) == 6 and not [row for row in on_readme if row not in [[row[0], row[-1]] for row in measured]]
  (flops,) = re.findall(r'take ([\d.e+]+) FLOPs', TEXT['results'])
  assert {f'{run["train_flops"]:.2g}' for row, runs in by_row.items() for run in runs if row != 'dense'} == {flops}


def stated_results(page: str) -> list[list[str]]:
  """Returns the cells behind the first one of the rows that end with a number of parameters."""
  lines = [line for line in TEXT[page].splitlines() if re.search(r'\| [\d,]+ \|$', line)]
  return [line.strip('| ').split(' | ')[1:] for line in lines]


def of_others(run: dict) -> float:
  """The geometric mean of the kinds of text but German law."""
  return statistics.geometric_mean(x for kind, x in run['perplexity_by_domain'].items() if kind != 'law_de')


def test_every_command_and_option_is_there():
  assert set(re.findall(r'-m dipaco_jax\.(\w+)', PAGES)) == set(COMMANDS)
  source = ''.join((ROOT / 'dipaco_jax' / f'{FILES.get(name, name)}.py').read_text() for name in COMMANDS)
  source += ''.join(
    (ROOT / file).read_text() for file in ('dipaco_jax/command_line/listener.py', 'dipaco_jax/command_line/command.py')
  )
  text = ''.join(words for name, words in TEXT.items() if name not in FOREIGN)
  options = set(re.findall(r'(?<![\w-])--([a-z_]+)', text)) - {'help', 'config'}
  assert {'workdir', 'distributed', 'coordinator'} <= options
  elsewhere = {
    'xla_force_host_platform_device_count',
    'xla_gpu_deterministic_ops',
    'xla_tpu_scoped_vmem_limit_kib',
    'seeds',
    'minutes',
    'gcloud',
    'build',
    'no',
    'target',
  }  # of XLA, experiments/, launch/, Docker (--build-arg) and pip (--no-deps)
  assert not [name for name in options - elsewhere if f"'{name}'" not in source and f"'--{name}'" not in source]


def test_every_config_and_field_is_there():
  named = fields.flatten(settings.Settings().to_dict())
  assert all((ROOT / path).is_file() for path in re.findall(r'--config=([\w/]+\.py)', PAGES))
  overrides = set(re.findall(r'--config\.([a-z_.]+)=', PAGES))
  assert 'train.phases' in overrides and overrides - {'grid', 'grid.a'} <= set(named)


def test_the_pages_state_the_phases_and_the_waiting_of_the_shipped_configs():
  """README.md and concepts.md say how long phases are, and which configs have no level that all paths share."""
  lengths = set[int]()
  without_shared_level = []
  for file in sorted((ROOT / 'configs').glob('*.py')):
    source = file.read_text()
    stated = re.findall(r'steps_per_phase=(\d+)', source)
    lengths |= {int(tau) for tau in stated} or {settings.Train().steps_per_phase}
    if 'c.grid' in source and not re.search(r"\('\w+', ['\w].*?, \(\)\)", source):
      without_shared_level.append(file.name)
  *most, last = sorted(lengths)
  assert f'Tau is {", ".join(map(str, most))} or {last} in the configs' in TEXT['concepts']
  assert f'({min(lengths)} to {max(lengths)} in the configs' in ' '.join(TEXT['README'].split())
  stated = ' '.join(TEXT['concepts'].split()).split("The papers' other grids (")[1].split(') have none')[0]
  assert without_shared_level == sorted(re.findall(r'`(\w+\.py)`', stated))


def quadratic_model() -> dict:
  """What the snippets of the library take from their reader: a model, its training step, and batches of four paths."""
  optimizer = optax.adam(0.1)

  def train_step(params, state, target):
    loss, gradient = jax.value_and_grad(lambda params: sum(jnp.square(x - target) for x in params.values()))(params)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, updates), state, loss

  params = dict.fromkeys(('embed', 'block_0', 'block_1', 'head'), jnp.float32(0))
  phases = [jnp.arange(8, dtype=jnp.float32).reshape(4, 2)] * 3  # four paths, two steps
  return {'params': params, 'optimizer': optimizer, 'train_step': train_step, 'phases': phases}


def library_snippets() -> dict[str, str]:
  """The loop of each page."""
  in_docstring = phase.__doc__.split('.\n\n')[1].split('\n\n`train_step')[0]
  imports = 'import functools, jax, optax\nfrom dipaco_jax.algorithm import Grid, Levels, OuterStep, train_phase\n'
  return {
    'README': blocks('README', 'python')[0],
    'library': blocks('library', 'python')[0],
    'phase.py': imports + textwrap.dedent(in_docstring),
  }


@pytest.mark.parametrize('page', library_snippets())
def test_the_loops_of_the_library_train_compiled(page):
  space = quadratic_model()
  exec(library_snippets()[page], space)
  assert space['metrics'].shape == (4, 2) and not space['report'].excluded.any()
  by_path = space['levels'].paths(space['modules'])
  first_equal_path = {
    name: [values.tolist().index(value) for value in values.tolist()] for name, values in by_path.items()
  }
  assert first_equal_path == {'embed': [0] * 4, 'block_0': [0, 0, 2, 2], 'block_1': [0, 1, 0, 1], 'head': [0] * 4}
  assert space['run_phase']._cache_size() == space['make_outer_step']._cache_size() == 1


def test_the_loops_of_the_library_have_the_same_names():
  names = {page: set(re.findall(r'\w+', snippet.split('modules =')[1])) for page, snippet in library_snippets().items()}
  variables = {'modules', 'outer_state', 'inner_states', 'paths', 'metrics', 'report', 'batches', 'phases'}
  assert all(variables | {'run_phase', 'make_outer_step'} <= found for found in names.values())
  for file in (ROOT / 'examples').glob('library_*.py'):
    found = set(re.findall(r'\w+', file.read_text()))
    assert {'modules', 'outer_state', 'inner_states', 'run_phase', 'make_outer_step'} <= found, file


@pytest.mark.slow
def test_the_snippet_of_equinox_wraps_a_step_of_a_model():
  eqx = pytest.importorskip('equinox')
  model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))  # it holds functions

  @eqx.filter_jit
  def step(model, state, batch):
    loss, grads = eqx.filter_value_and_grad(lambda model: jnp.square(model(batch)).sum())(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state + 1, loss

  space = {'model': model, 'step': step, 'jax': jax}
  exec(blocks('library', 'python')[1], space)
  levels = algorithm.Levels(algorithm.Grid(a=2), space['params'], low=('layers/0/', ()), high=('layers/1/', 'a'))
  outer = algorithm.OuterStep(levels, optax.sgd(1.0))
  modules = levels.start(space['params'])
  batches = jnp.ones((2, 3, 2))
  paths, states, losses = algorithm.train_phase(space['train_step'], levels.paths(modules), jnp.zeros(2), batches)
  assert states.tolist() == [3, 3] and (losses[:, 2] < losses[:, 0]).all()
  modules, *_ = outer.step(modules, outer.init(modules), paths)
  assert eqx.combine(levels.path(modules, 1), space['static'])(jnp.ones(2)).shape == (2,)


def test_the_snippets_of_keys_and_checkpoints_run_after_the_loop(tmp_path):
  space = quadratic_model() | {'folder': tmp_path / 'checkpoint'}
  loop, _, keys, checkpoint = blocks('library', 'python')
  exec(loop, space)
  before = space['modules'], space['outer_state'], space['inner_states']
  exec(checkpoint, space)
  jax.tree.map(np.testing.assert_array_equal, (space['modules'], space['outer_state'], space['inner_states']), before)
  exec(keys, space)
  draw = jax.vmap(jax.random.uniform)(space['inner_states'][1])
  assert len(set(draw.tolist())) == 4


def test_links_lead_somewhere():
  for page in [*TOP, *DOCS, ROOT / 'launch' / 'README.md', *sorted((ROOT / 'experiments').glob('*.md'))]:
    links = [link for link in re.findall(r'\]\(([^)#]+)', page.read_text()) if not link.startswith('https://')]
    assert not [link for link in links if not (page.parent / link).is_file()], page
    for link, anchor in re.findall(r'\]\((?!https)([^)#]*)#(?!L\d)([^)]+)\)', page.read_text()):
      target = page.parent / link if link else page
      text = re.sub(r'^```.*?^```$', '', target.read_text(), flags=re.MULTILINE | re.DOTALL)  # comments are no headings
      headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
      assert anchor in [re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-') for heading in headings]


def test_every_figure_of_the_report_is_explained():
  rows = TEXT['files'].split('`report.json` holds')[1].split('\n## ')[0]
  explained = re.findall(r'`(\w+)`', ''.join(re.findall(r'^\| (.*?) \|', rows, re.MULTILINE)))
  others = (
    'held_back excluded skipped_steps steps_by_path replay pretrain_steps pretrain_tokens domain_nmi '
    'router_accuracy wall_s goodput config_sha256 versions averaging_gap_by_phase text_by_domain '
    'bytes_per_token pretrain_epochs pretrain_text_tokens shard_tokens paths_tokens paths_flops pretrain_flops '
    'serve_flops_per_token control_epochs'
  ).split()
  assert sorted(explained) == sorted({*run_report.TOKENIZE, *run_report.EVALUATE, *run_report.TRAIN, *others})


def test_what_a_run_leaves_is_explained(undisturbed):
  rows = TEXT['files'].split('## What is in the workdir')[1].split('What a stage leaves')[0]
  explained = {name.split('/')[0] for name in re.findall(r'`([\w./]+)`', rows)}
  assert {path.name for path in undisturbed.iterdir()} == explained


(START, KINDS), ROUTERS, EXCHANGES = (blocks(page, 'python') for page in ('configs', 'routing', 'averaging'))
CHANGES = '\n'.join([KINDS, *ROUTERS, *EXCHANGES]).strip().split('\n\n')


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
    shown = TEXT['configs'].split('Parameters are named')[1].split('\n\n')[0]
    assert {name for name in shapes if 'block' not in name} <= set(re.findall(r'`([\w/]+)`', shown))


SMALL = 'tiny tiny:dense text text:dense text:small text:small-dense'.split()


@pytest.mark.parametrize('name', ['docs/configs.md', 'docs/averaging.md', *SMALL])
def test_small_runs_average_plainly(name):
  """The rule of docs/averaging.md: the papers' outer step is for the papers' sizes."""
  rule = {'optimizer': 'sgd', 'learning_rate': 1.0, 'rescale': False}
  space: dict = {}
  exec(START, space)
  c = space['get_config']()
  if name == 'docs/averaging.md':
    (call,) = re.findall(r'plain averages: `(outer\.update\(.*?\))`', TEXT['averaging'])
    c.outer.update(settings.Outer().__dict__)
    exec(f'c.{call}', {'c': c})
  outer = config_file.read(name)['outer'] if name in SMALL else c.outer.to_dict()
  assert {field: outer[field] for field in rule} == rule


def test_every_dependency_has_its_reason():
  config = configparser.ConfigParser()
  config.read(ROOT / 'setup.cfg')
  listed = config['options']['install_requires'].split()
  for extra, names in config['options.extras_require'].items():
    assert f'`[{extra}]`' in TEXT['dependencies']
    listed += names.split()
  assert not [name for name in listed if f'`{name.partition(">")[0]}`' not in TEXT['dependencies']]
