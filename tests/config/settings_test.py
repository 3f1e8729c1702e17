"""Settings: errors about a bad field are one line; conversion to dicts and back; digests and differences."""

import ast
import dataclasses
import functools
import hashlib
import json
import math
import re
import runpy
import typing

import pytest
import repository
from hypothesis import given, strategies as st

from dipaco_jax.algorithm import modules
from dipaco_jax.config import fields, settings
from dipaco_jax.config.settings import Settings, from_dict
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer

ABOUT = dict(fields.fields(Settings))
DEFAULTS = fields.flatten(Settings().to_dict())
CONFIGS = repository.ROOT / 'configs'
VARIANTS = {
  'tiny': 'grid dense', 'text': 'grid dense', 'c4_256paths': 'ends shared', 'c4_8x8': 'ends shared',
  'c4_8paths': 'paper tenth', 'c4_dense': '1x 8x', 'c4_diloco_64': '', 'c4_flat_moe_64': '', 'c4_1300m_dense': '',
}  # fmt: skip


IN_FULL = dataclasses.replace(Settings(), data=settings.Data(source='stdlib'))  # as `from_dict` fills it in


def nest(name: str, value) -> dict:
  for key in reversed(name.split('.')):
    value = {key: value}
  return value


def error(values: dict) -> str:
  with pytest.raises(ValueError) as info:
    from_dict(values)
  assert '\n' not in str(info.value)
  return str(info.value)


def test_defaults_are_valid_and_survive_a_round_trip():
  assert from_dict(Settings().to_dict()) == from_dict({}) == IN_FULL
  assert from_dict(IN_FULL.to_dict()) == IN_FULL


def test_a_run_of_another_format_is_rejected_with_its_version_and_what_to_do():
  values = settings.recorded(IN_FULL)
  assert settings.of_run(values) == IN_FULL
  values[settings.WRITTEN_BY] = {'dipaco_jax': '9.1', 'format': 7}
  with pytest.raises(InputError, match=r'^dipaco_jax 9\.1 wrote this run in format 7, .* use that version'):
    settings.of_run(values)
  with pytest.raises(InputError, match=r'^dipaco_jax 0\.1 wrote this run in format 1, .* or another --workdir$'):
    settings.of_run(IN_FULL.to_dict())
  with pytest.raises(InputError, match=r'^its config\.json is not that of a run, or damaged'):
    settings.of_run(values | {settings.WRITTEN_BY: 7})


@pytest.mark.parametrize(
  'data, source',
  [
    ({}, 'stdlib'),
    ({'train': 'notes/**/*.md'}, 'files'),
    ({'train': {'a': 'a/*.txt', 'b': ('b/*.txt', 2)}}, 'files'),
    ({'train': 'x', 'validation': 'y', 'text_key': 'body'}, 'files'),
    ({'name': 'c4/en:3.0.1', 'data_dir': 'd'}, 'tfds'),
    ({'name': 'my_task', 'module': 'my_tasks'}, 'seqio'),
  ],
)
def test_the_source_follows_from_what_is_named(data, source):
  assert from_dict({'data': data}).data.source == source


@pytest.mark.parametrize(
  'data, message',
  [
    ({'source': 'stdlib', 'train': 'x'}, "config.data.train=('x',): config.data.source='stdlib' does not read it"),
    ({'source': 'stdlib', 'validation': 'x'}, "config.data.validation=('x',): config.data.source='stdlib' does not"),
    ({'source': 'stdlib', 'text_key': 'x'}, "config.data.text_key='x': config.data.source='stdlib' does not read it"),
    ({'train': 'x', 'name': 'c4/en:3.0.1'}, "config.data.name='c4/en:3.0.1': config.data.source='files' does not"),
    (
      {'train': 'x', 'module': 'm'},
      "config.data.module='m': config.data.source='files' does not read it, 'seqio' does",
    ),
    ({'validation': 'x'}, 'config.data.train is empty'),
    ({'name': 'my_task'}, "config.data.name='my_task' does not name a text: name files in config.data.train, or"),
    ({'data_dir': 'x'}, "config.data.data_dir='x' does not name a text"),
    ({'text_key': 'body'}, "config.data.text_key='body' does not name a text"),
  ],
)
def test_no_field_that_names_text_is_ignored(data, message):
  assert message in error({'data': data})


@pytest.mark.parametrize(
  'values, fix',
  [
    ({'outer': {'stream': 'on'}}, "set config.outer.stream='off'"),
    ({'outer': {'max_weight': 0.5}}, 'leave out config.outer.max_weight'),
    ({'train': {'paths_per_phase': 2}}, 'leave out config.train.paths_per_phase'),
  ],
)
def test_phases_that_end_by_time_need_all_paths_and_no_fixed_steps(values, fix):
  timed = {'phase_s': 9.0} | values.get('train', {})
  assert fix in error({'grid': {'a': 2, 'b': 2}} | values | {'train': timed})


@pytest.mark.parametrize(
  'values, fix',
  [
    ({'outer': {'quorum': 0.75, 'stream': 'on'}}, "set config.outer.stream='off'"),
    ({'outer': {'quorum': 0.75, 'max_weight': 0.5}}, 'leave out config.outer.max_weight'),
    ({'outer': {'quorum': 0.75}, 'train': {'paths_per_phase': 2}}, 'leave out config.train.paths_per_phase'),
    ({'outer': {'grace_s': 3.0}}, 'requires config.outer.quorum below 1'),
    ({'outer': {'quorum': 0.0}}, 'config.outer.quorum=0.0 should be above 0'),
  ],
)
def test_a_quorum_is_of_all_paths_and_whole_phases(values, fix):
  assert fix in error({'grid': {'a': 2, 'b': 2}} | values)


@pytest.mark.parametrize(
  'values, message',
  [
    ({'model': {'num_layers': 10**6}}, 'config.model.num_layers=1000000 should be 1000 or below'),
    ({'model': {'seq_len': 10**9}}, 'config.model.seq_len=1000000000 should be 16777216 or below'),
    ({'tokenizer': {'vocab_size': 10**9}}, 'config.tokenizer.vocab_size=1000000000 should be 16777216 or below'),
    ({'train': {'phases': 10**9}}, 'config.train.phases=1000000000 should be 1000000 or below'),
    ({'grid': {'a': 10**6, 'b': 10**6}}, 'config.grid has 1,000,000,000,000 paths, and 65,536 are the most'),
  ],
)
def test_absurd_sizes_are_rejected_before_any_work(values, message):
  """Also those of a stranger's run."""
  assert error(values).startswith(message)
  with pytest.raises(InputError, match=re.escape(message)):
    settings.of_run(
      settings.recorded(Settings())
      | settings.Settings().to_dict()
      | {name: value if name == 'grid' else Settings().to_dict()[name] | value for name, value in values.items()}
    )


@pytest.mark.parametrize('source', ['tfds', 'seqio'])
def test_files_beside_a_dataset(source):
  values = {'source': source, 'name': 'a:1', 'data_dir': 'x'}
  assert "config.data.train is for source='files'" in error({'data': values | {'train': 'x'}})
  assert f"plain_suffixes=('.py',): config.data.source='{source}'" in error(
    {'data': values | {'plain_suffixes': '.py'}}
  )


def test_a_user_defined_source_may_read_any_field():
  from_dict({'data': {'source': 'my_source:make', 'train': 'x', 'name': 'y', 'module': 'z'}})


def test_a_tokenizer_that_is_given_is_not_of_another_kind():
  message = error({'tokenizer': {'model_file': 'x', 'kind': 'bytes'}})
  assert message.startswith("config.tokenizer.kind='bytes' and config.tokenizer.model_file are both set")


FULL = {
  'seed': 7,
  'grid': {'b': 2, 'a': 3},
  'levels': (('ends', 'embed|head', ('a', 'b')), ('rest', 'block|norm', ('a',))),
  'data': {'source': 'files', 'train': ('x/*.txt', 'y/*.txt')},
  'model': {'width': 64, 'seq_len': 128},
  'train': {'schedule': ((0, (0, 1)), (5, (2,))), 'phases': 9},
  'inner': {'learning_rate': 1},
}


def test_round_trip_through_json():
  s = from_dict(FULL)
  assert s.grid == (('a', 3), ('b', 2)) and s.to_dict()['grid'] == {'a': 3, 'b': 2}
  assert s.train.schedule == ((0, (0, 1)), (5, (2,))) and s.data.train == ('x/*.txt', 'y/*.txt')
  assert s.inner.learning_rate == 1.0 and type(s.inner.learning_rate) is float
  assert from_dict(json.loads(json.dumps(s.to_dict()))) == s
  assert {type(section) for section in vars(s).values()} <= {int, tuple, *typing.get_type_hints(Settings).values()}


def test_coordinates_with_names_survive_json():
  levels = (('all', '.*', ('owner',)),)
  s = from_dict(Settings().to_dict() | {'grid': {'owner': ['clinic', 'court']}, 'levels': levels})
  assert s.num_paths == 2 and s.grid == (('owner', ('clinic', 'court')),)
  assert from_dict(json.loads(json.dumps(s.to_dict()))) == s


@pytest.mark.parametrize('given, globs', [('my/*.txt', ('my/*.txt',)), ('a,b', ('a', 'b')), (['a', 'b'], ('a', 'b'))])
def test_globs_may_be_one_string(given, globs):
  assert from_dict({'data': {'source': 'files', 'train': given}}).data.train == globs
  assert from_dict({'data': {'validation': ''}}).data.validation == ()


@pytest.mark.parametrize(
  'name, nearest',
  [
    ('sed', 'seed'),
    ('modle', 'model'),
    ('train.batchsize', 'train.batch_size'),
    ('train.stepsperphase', 'train.steps_per_phase'),
    ('inner.learn_rate', 'inner.learning_rate'),
    ('outer.nesterov', 'outer.'),
  ],
)
def test_unknown_field_names_the_nearest(name, nearest):
  message = error(nest(name, 1))
  assert message.startswith(f'config.{name}: there is no such field; the nearest is config.{nearest}')


def test_any_unknown_field_has_some_nearest():
  for section in ('', *(f.name + '.' for f in dataclasses.fields(Settings) if dataclasses.is_dataclass(f.type))):
    nearest = error(nest(section + 'zzz', 1)).rsplit('config.', 1)[1]
    assert nearest in DEFAULTS or any(name.startswith(nearest + '.') for name in DEFAULTS) or nearest == 'grid'


@pytest.mark.parametrize('name', [name for name, default in DEFAULTS.items() if not isinstance(default, tuple)])
def test_wrong_types(name):
  default = DEFAULTS[name]
  for wrong in ('two', 2, 0.5, True, None, [1]):
    fits = type(wrong) is type(default) or (type(default), type(wrong)) == (float, int)
    if not fits:
      assert f'config.{name}={wrong!r} should be {fields.PLAIN[type(default)]}' == error(nest(name, wrong))


LEVELS = "tuple: config.levels is written as (('all', '.*', ()),)"


@pytest.mark.parametrize(
  'values, message',
  [
    ({'levels': 'all'}, f"config.levels='all' should be a {LEVELS}"),
    ({'levels': (('all', '.*'),)}, "config.levels[0]=('all', '.*') should have 3 entries: config.levels is"),
    ({'levels': (('all', 1, ()),)}, 'config.levels[0][1]=1 should be a text'),
    ({'levels': (('all', '.*', 'a'),)}, f"config.levels[0][2]='a' should be a {LEVELS}"),
    ({'grid': {'a': 2.0}}, 'config.grid.a=2.0 should be a whole number'),
    ({'grid': {'a': ('x', 1)}}, 'config.grid.a[1]=1 should be a text'),
    ({'grid': {3: 2}}, 'config.grid axis=3 should be a text'),
    ({'grid': {'a': 2, 3: 2}}, 'config.grid axis=3 should be a text'),
    ({'grid': (4, 4)}, "config.grid=((4,), (4,)) should be a dict: config.grid is written as {'a': 4, 'b': 4}"),
    ({'grid': (('a', 2, 3),)}, "config.grid=(('a', 2, 3),) should be a dict"),
    ({'grid': (('a', 2), ('a', 3))}, "config.grid=(('a', 2), ('a', 3)) names an axis twice"),
    ({'data': {'train': 3}}, "config.data.train=3 should be a tuple: config.data.train is written as ('books/*.txt',)"),
    ({'train': {'schedule': ((0, (0.0,)),)}}, 'config.train.schedule[0][1][0]=0.0 should be a whole number'),
  ],
)
def test_wrong_shapes_of_tuples(values, message):
  assert error(values).startswith(message)


def test_fields_that_are_written_in_their_own_way_have_examples():
  written = {name for name, value in DEFAULTS.items() if type(value) not in fields.PLAIN}
  examples = {name: about.example for name, about in ABOUT.items() if about.example}
  assert examples.keys() == {'grid', *written}
  for name, words in examples.items():
    values = GRID | nest(name, ast.literal_eval(words))
    from_dict(values | {'data': {'train': 'x'} | values.get('data', {})})


def test_sinks_of_metrics_change_no_digest_and_may_change():
  other = from_dict({'metrics': {'sinks': 'wandb,my.sink:make', 'project': 'p'}})
  assert other.metrics.sinks == ('wandb', 'my.sink:make')
  assert not settings.differences(IN_FULL, other)
  assert error({'metrics': {'sinks': ('wandb', 'wandb')}}).endswith('names a sink twice')


@pytest.mark.parametrize('name', ['model', 'grid'])
def test_a_section_or_grid_that_is_no_dict(name):
  assert f'config.{name}=3' in error({name: 3})


@pytest.mark.parametrize('name', [name for name, value in DEFAULTS.items() if type(value) in (int, float)])
def test_ranges(name):
  below = ABOUT[name].least - 1
  assert f'config.{name}={below}' in error(nest(name, below if type(DEFAULTS[name]) is int else float(below)))
  if not ABOUT[name].zero:
    assert f'config.{name}=0' in error(nest(name, 0))
  if ABOUT[name].below:
    assert error(nest(name, 1.0)) == f'config.{name}=1.0 should be below 1'
  if most := ABOUT[name].most:
    above = most + type(DEFAULTS[name])(1)
    assert error(nest(name, above)) == f'config.{name}={above} should be {most} or below'


def test_every_field_has_a_description_and_a_default_that_it_allows():
  assert ABOUT.keys() == DEFAULTS.keys() | {'grid'}
  assert all(about.about for about in ABOUT.values())
  assert from_dict({'data': {'source': 'stdlib'}}) == IN_FULL


@pytest.mark.parametrize('name', [name for name, about in ABOUT.items() if about.choices])
def test_choices(name):
  default = DEFAULTS[name]
  assert {*default} <= {*ABOUT[name].choices} if isinstance(default, tuple) else default in ABOUT[name].choices
  assert error(nest(name, 'none such')).startswith(f"config.{name}='none such': choose one of ")
  assert all(choice in error(nest(name, 'none such')) for choice in ABOUT[name].choices)


GRID = {'grid': {'a': 2, 'b': 2}}
OWNERS = {'grid': {'owner': ('clinic', 'court')}, 'levels': (('all', '.*', ('owner',)),)}
TFDS = {'source': 'tfds', 'name': 'c4/en:3.0.1', 'data_dir': 'gs://bucket/datasets'}
OWN_TEXT = {'source': 'files', 'train': ('a',), 'validation': ('b',), 'own_text': True}
APART = OWNERS | {'data': OWN_TEXT, 'routing': {'method': 'owner'}}
SEQIO = {'source': 'seqio', 'name': 'my_task'}
DISCRIMINATIVE = {'method': 'discriminative', 'rounds': 2, 'phases_per_round': 3}


@pytest.mark.parametrize(
  'values, message',
  [
    ({'inner': {'final_fraction': 1.5}}, 'config.inner.final_fraction=1.5 should be 1 or below'),
    ({'inner': {'learning_rate': math.nan}}, 'config.inner.learning_rate=nan should be a finite number'),
    (
      {'outer': {'row_weights': True}, 'inner': {'optimizer': 'sgd'}},
      "config.outer.row_weights needs AdamW's second moments: leave config.inner.optimizer='adamw'",
    ),
    ({'outer': {'learning_rate': math.inf}}, 'config.outer.learning_rate=inf should be a finite number'),
    ({'pretrain': {'batch_size': 0}}, 'config.pretrain.batch_size=0 should be above 0'),
    ({'train': {'batch_size': 0}}, 'config.train.batch_size=0 should be above 0'),
    ({'model': {'head_dim': 7}}, 'config.model.head_dim=7 should be even'),
    ({'model': {'num_kv_heads': 3}}, 'config.model.num_kv_heads=3 should divide config.model.num_heads=16'),
    ({'model': {'full_every': 2}}, 'config.model.full_every=2 requires config.model.window'),
    ({'model': {'rope_local_base': 2.0}}, 'config.model.rope_local_base=2.0 requires config.model.window'),
    ({'model': {'rope_factor': 2.0}}, 'config.model.rope_factor=2.0 requires config.model.rope_scaling'),
    ({'model': {'rope_scaling': 'yarn'}}, "config.model.rope_scaling='yarn' needs config.model.rope_original_len"),
    ({'model': {'rope_low': 4.0}}, 'config.model.rope_low=4.0 should be below config.model.rope_high=4.0'),
    ({'model': {'seq_len': 32}}, 'config.model.seq_len=32 should be above config.routing.prefix_tokens=32'),
    ({'evaluate': {'seq_len': 32}}, 'config.evaluate.seq_len=32 should be above config.routing.prefix_tokens=32'),
    ({'model': {'seq_len': 0}}, 'config.model.seq_len=0 should be above 0'),
    ({'routing': {'top_n': 2}}, 'config.routing.top_n=2 is more than the 1 paths of config.grid'),
    ({'routing': {'method': 'owner'}}, "config.routing.method='owner': 0 axes have names instead of one"),
    (
      OWNERS | {'routing': {'method': 'owner', 'top_n': 2}},
      'config.routing.top_n=2 is more than the 1 paths of an owner',
    ),
    (
      OWNERS
      | {
        'routing': {'method': 'owner'},
        'data': {'source': 'files', 'train': {'court': 'a', 'press': 'b'}, 'validation': ('c',)},
      },
      "text of 'press' has no owner among clinic, court",
    ),
    (
      OWNERS | {'routing': {'method': 'owner', 'capacity': 2.0}},
      'config.routing.capacity requires a router with scores',
    ),
    (OWNERS | {'data': OWN_TEXT}, "config.data.own_text=True requires config.routing.method='owner'"),
    (
      APART | {'data': OWN_TEXT | {'validation': ()}},
      'config.data.own_text=True requires public validation text: name',
    ),
    (
      APART | {'train': {'early_stopping': False}},
      'config.data.own_text=True requires config.train.early_stopping=True',
    ),
    (APART | {'data': OWN_TEXT | {'holdout_fraction': 0.0}}, 'config.data.own_text=True requires config.train.early'),
    (APART | {'train': {'paths_per_phase': 1}}, 'config.train.paths_per_phase=1 needs the text or the modules of all'),
    (
      APART | {'evaluate': {'control': True}},
      'config.evaluate.control=True needs the text or the modules of all owners',
    ),
    (
      APART | {'routing': {'method': 'owner', 'router_fraction': 0.1}},
      'config.routing.router_fraction=0.1 needs the text or the modules of all owners in one place',
    ),
    (GRID | {'routing': {'top_n': 5}}, 'config.routing.top_n=5 is more than the 4 paths of config.grid'),
    (GRID | {'routing': {'method': 'single'}}, "config.routing.method='single' is for one path; config.grid has 4"),
    (GRID | {'train': {'paths_per_phase': 5}}, 'config.train.paths_per_phase=5 is more than the 4 paths'),
    ({'data': {'source': 'files'}}, 'config.data.train is empty: name the text'),
    ({'data': {'source': 'files', 'train': {'books': ()}}}, 'config.data.train: '),
    ({'data': TFDS | {'name': ''}}, 'config.data.name is empty: name what to read, for instance --config.data.name=c4'),
    ({'data': TFDS | {'name': 'c4/en'}}, "config.data.name='c4/en' names no version: add it, as in 'c4/en:3.0.1'"),
    ({'data': TFDS | {'data_dir': ''}}, 'config.data.data_dir is empty: name the folder, or gs://, where tfds has'),
    ({'data': TFDS | {'train': 'a.txt'}}, "config.data.train is for source='files': tfds has splits of its own"),
    ({'data': {'source': 'seqio'}}, 'config.data.name is empty: name what to read, for instance --config.data.name=my'),
    ({'data': SEQIO | {'validation': 'a.txt'}}, "config.data.validation is for source='files': seqio has splits of"),
    (GRID | {'train': {'schedule': ((1, (0,)),)}}, 'config.train.schedule: first phases [1] should start at 0'),
    (GRID | {'train': {'schedule': ((0, (0,)), (0, (1,)))}}, 'config.train.schedule: first phases [0, 0] should'),
    (GRID | {'train': {'schedule': ((0, ()),)}}, 'config.train.schedule: phase 0 names paths ()'),
    (GRID | {'train': {'schedule': ((0, (4,)),)}}, 'config.train.schedule: phase 0 names paths (4,); valid paths are'),
    (GRID | {'train': {'schedule': ((0, (-1,)),)}}, 'config.train.schedule: phase 0 names paths (-1,)'),
    (
      GRID | {'outer': {'lost': 0.5}, 'train': {'paths_per_phase': 2}},
      'config.outer.lost=0.5 requires that all',
    ),
    ({'routing': DISCRIMINATIVE | {'router_fraction': 0}}, 'config.routing.router_fraction=0: routing.method='),
    (
      {'routing': DISCRIMINATIVE | {'router_fraction': 0.1}, 'train': {'phases': 6}},
      'config.routing.phases_per_round=3 times config.routing.rounds=2',
    ),
    (
      GRID | {'levels': (('all', '.*', ('a',)),), 'routing': DISCRIMINATIVE | {'router_fraction': 0.1}},
      "config.routing.method='discriminative': no level varies over the grid axis 'b', so its paths are equal",
    ),
    (
      {'evaluate': {'matrix': True}, 'train': {'early_stopping': False}},
      'config.evaluate.matrix=True needs hold-outs, which config.train.early_stopping=False does not keep',
    ),
    (GRID | {'routing': {'method': 'random', 'capacity': 2.0}}, 'config.routing.capacity requires a router with'),
    (GRID | {'routing': {'capacity': 0.5}}, 'config.routing.capacity=0.5 should be 1 or more'),
    (GRID | {'routing': {'capacity': 2.0, 'top_n': 2}}, 'config.routing.capacity requires config.routing.top_n=1'),
    (
      {'evaluate': {'reroute_every': (64, 1)}},
      'config.evaluate.reroute_every=(64, 1) should be numbers of tokens, each 2 or more',
    ),
    (
      {'evaluate': {'chunk_router_steps': 5}, 'routing': {'router_fraction': 0}},
      'config.evaluate.chunk_router_steps needs router data',
    ),
    (
      GRID | {'evaluate': {'refit_router': True}, 'routing': {'router_fraction': 0}},
      'config.evaluate.refit_router=True needs router data: set config.routing.router_fraction',
    ),
    (
      {'evaluate': {'refit_router': True}, 'routing': {'router_fraction': 0.1, 'method': 'single'}},
      'config.evaluate.refit_router=True has nothing to fit with one path',
    ),
    (
      GRID | {'evaluate': {'refit_router': True}, 'routing': {'router_fraction': 0.1, 'method': 'm:make'}},
      'config.evaluate.refit_router=True has nothing to fit with a router of your own',
    ),
  ],
)
def test_checks_between_fields(values, message):
  assert error(values).startswith(message)


@pytest.mark.parametrize(
  'values',
  [
    GRID | {'routing': {'top_n': 4}},
    GRID | {'train': {'paths_per_phase': 4}},
    GRID | {'train': {'schedule': ((0, (3,)), (2, (0, 1, 2, 3)))}},
    {'routing': {'method': 'single'}},
    {'data': TFDS},
    {'data': SEQIO},
    {'inner': {'final_fraction': 1.0}},
    {'model': {'seq_len': 33}},
    {'pretrain': {'steps': 0}, 'inner': {'warmup_steps': 0, 'clip_norm': 0, 'weight_decay': 0}},
  ],
)
def test_what_is_just_allowed(values):
  assert from_dict(from_dict(values).to_dict()) == from_dict(values)


@given(st.recursive(st.integers(), lambda x: st.dictionaries(st.sampled_from('abc'), x, min_size=1), max_leaves=9))
def test_flatten_keeps_every_leaf(nested):
  if isinstance(nested, dict):
    flat = fields.flatten(nested)
    for name, value in flat.items():
      inside = nested
      for key in name.split('.'):
        inside = inside[key]
      assert inside == value and not isinstance(value, dict)
    assert sum(1 for _ in leaves(nested)) == len(flat)


def leaves(nested):
  for value in nested.values():
    yield from leaves(value) if isinstance(value, dict) else [value]


def test_digest_looks_at_the_named_fields_only():
  s = from_dict(FULL)
  other = dataclasses.replace(s, model=dataclasses.replace(s.model, width=65))
  assert settings.digest(s) == settings.digest(from_dict(json.loads(json.dumps(s.to_dict()))))
  assert settings.digest(s) != settings.digest(other)
  assert settings.digest(s, 'model.') != settings.digest(other, 'model.')
  assert settings.digest(s, 'data.', 'seed') == settings.digest(other, 'data.', 'seed')
  assert settings.digest(s, 'grid') != settings.digest(Settings(), 'grid')
  assert len(settings.digest(s)) == 64


def test_a_field_that_was_added_changes_a_digest_only_with_another_value():
  s = from_dict(FULL)
  before = {name: x for name, x in fields.flatten(s.to_dict()).items() if name.startswith('routing.')}
  assert before.pop('routing.by_document') is False
  assert settings.digest(s, 'routing') == hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()
  other = dataclasses.replace(s, routing=dataclasses.replace(s.routing, by_document=True))
  assert settings.digest(s, 'routing') != settings.digest(other, 'routing')


def test_differences_name_what_may_not_change():
  s = from_dict(FULL)
  assert settings.differences(s, s) == {}
  longer = dataclasses.replace(s, train=dataclasses.replace(s.train, phases=100, offload=True))
  assert settings.differences(s, longer) == {}
  other = from_dict(FULL | {'seed': 8, 'grid': {'a': 3, 'b': 2, 'c': 1}, 'model': {'width': 64, 'seq_len': 129}})
  assert settings.differences(s, other) == {'seed': (7, 8), 'grid.c': (None, 1), 'model.seq_len': (128, 129)}


def test_settings_do_not_change():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Settings().model.width = 3  # type: ignore[misc]


@pytest.mark.parametrize('name, variants', VARIANTS.items())
def test_levels_of_every_config_catch_all_parameters(name, variants):
  """Of those that take no model; pretrained_test.py looks at `upcycle`, chat_run_test.py at `chat`."""
  assert {file.stem for file in CONFIGS.glob('*.py')} == VARIANTS.keys() | {'upcycle', 'chat'}
  for variant in variants.split() or ['']:
    layout, shapes = layout_and_shapes(name, variant)
    assert layout.owner.keys() == shapes.keys()


@functools.cache
def layout_and_shapes(name: str, variant: str):
  get_config = runpy.run_path(str(CONFIGS / f'{name}.py'))['get_config']
  values = (get_config(variant) if variant else get_config()).to_dict()
  values['data']['train'] = ('some.txt',)
  s = from_dict(values)
  shapes = transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))
  return modules.make_layout(s.grid, s.levels, shapes), shapes


@pytest.mark.parametrize(
  'name, variant, of_path, of_all',
  [
    ('c4_8x8', 'shared', 0.15, 1.2),  # the DiPaCo paper's Table 1, in billions
    ('c4_8paths', 'paper', 0.15, 0.5),
    ('c4_8paths', 'tenth', 0.15, 0.5),
    ('c4_flat_moe_64', '', 0.15, 9.7),  # 9.6 there: 64 times 150 M, which is 151 M here
    ('c4_diloco_64', '', 0.15, 0.2),
    ('c4_dense', '1x', 0.15, 0.2),
    ('c4_1300m_dense', '', 1.3, 1.3),
    ('c4_8x8', 'ends', 0.15, 5.1),  # 5.3 there, which no choice of path-specific parameters that it names gives
    ('c4_256paths', 'shared', 0.15, 2.4),  # of 16x16 paths it prints none
  ],
)
def test_the_papers_grids_have_the_papers_parameters(name, variant, of_path, of_all):
  layout, shapes = layout_and_shapes(name, variant)
  sizes = sum(x.size for x in shapes.values()), layout.num_parameters(shapes)
  decimals = 2 if of_path < 1 else 1
  assert (round(sizes[0] / 1e9, decimals), round(sizes[1] / 1e9, 1)) == (of_path, of_all), sizes


@pytest.mark.parametrize('name, variants', VARIANTS.items())
def test_no_level_of_a_few_numbers_makes_all_paths_wait(name, variants):
  for variant in variants.split() or ['']:
    layout, shapes = layout_and_shapes(name, variant)
    largest = max(x.size for x in shapes.values())
    for level in layout.levels if layout.grid.num_paths > 1 else ():
      size = sum(shapes[parameter].size for parameter in layout.names(level))
      assert level.axes or size >= largest, f'{name}:{variant}: all paths wait for {size} numbers of {level.name!r}'
