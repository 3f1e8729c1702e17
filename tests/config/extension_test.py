"""References to user modules: imports, digests, errors, and the examples of docs/extend.md."""

import dataclasses
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_modules
import pytest

from dipaco_jax.algorithm import outer
from dipaco_jax.config import choices, extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import user_modules

SOURCE = """
import optax

def make(config):
  return optax.sgd(2 * config.learning_rate)

def schedule(config):
  return lambda step: config.learning_rate * (1 - step / config.decay_steps)

def broken(config):
  return 1 / 0

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  """The name of a module of the user's, of which no other test knows, and its file."""
  name = own_modules.write(tmp_path, monkeypatch, SOURCE)
  yield name, tmp_path / f'{name}.py'
  sys.modules.pop(name, None)
  extension.load.cache_clear()


def with_outer(reference):
  return settings.from_dict({'outer': {'optimizer': reference}})


@pytest.mark.parametrize('words, is_one', [
  ('a:b', True), ('my.own.module:make', True), ('adamw', False), ('a:b:c', False), ('a.b', False), (':b', False),
  ('a:', False), ('a b:c', False), ('../a:b', False), ('1a:b', False), (3, False),
])  # fmt: skip
def test_what_is_a_reference(words, is_one):
  assert extension.is_reference(words) == is_one


def test_an_outer_optimizer_is_called_with_its_section(module):
  opt = choices.make_outer_optimizer(with_outer(f'{module[0]}:make').outer)
  new, _, norm = outer.module_step(opt, {'x': jnp.ones(4)}, opt.init({'x': jnp.ones(4)}), {'x': jnp.full(4, 0.25)})
  np.testing.assert_allclose(new['x'], 1 - 2 * 0.7 * 0.25)
  assert float(norm) == 0.5


def test_a_schedule_knows_how_long_the_run_is(module):
  config = settings.Inner(schedule=f'{module[0]}:schedule', learning_rate=0.5)
  made = choices.make_inner(config, 200, 40, 0.0)
  assert float(made.learning_rate(jnp.int32(50))) == pytest.approx(0.5 * 0.75)


def test_the_digest_is_that_of_the_source(module):
  name, file = module
  first = user_modules.admit_own(with_outer(f'{name}:make'))
  assert [named for named, _ in first.extensions] == [name] and not user_modules.find_changed(first)
  file.write_text(SOURCE + '# changed\n')
  second = user_modules.admit_own(with_outer(f'{name}:make'))
  assert user_modules.find_changed(first) == [name] and not user_modules.find_changed(second)
  assert settings.digest(first) != settings.digest(second)
  assert settings.digest(first, 'outer') != settings.digest(second, 'outer')  # of stages that depend on it
  assert settings.digest(first, 'inner') == settings.digest(second, 'inner')
  words = settings.in_words(settings.differences(first, second))
  assert words == f'the source of {name} has changed'


def test_without_references_no_digest_knows_of_them():
  plain = settings.Settings()
  assert user_modules.admit_own(plain) == plain and not plain.extensions


def test_what_is_kept_goes_back_to_settings(module):
  s = user_modules.admit_own(with_outer(f'{module[0]}:make'))
  assert settings.of_run(settings.recorded(s)) == s


@pytest.mark.parametrize('reference, words', [
  ('{}:missing', 'has no function missing'),
  ('{}:NUMBER', 'has no function NUMBER'),
  ('{}_gone:make', 'cannot be imported'),
  ('{}:broken', r'raises ZeroDivisionError: division by zero \(line 11 of .*own_.*py\)'),
])  # fmt: skip
def test_errors_name_the_field(module, reference, words):
  reference = reference.format(module[0])
  user_modules.trust([extension.module_of(reference)])
  with pytest.raises(InputError, match=rf"config.outer.optimizer='{reference}'.*{words}"):
    choices.make_outer_optimizer(with_outer(reference).outer)


def test_a_module_that_is_gone_or_broken_is_an_error_before_any_work(module):
  with pytest.raises(InputError, match=r"config.outer.optimizer='no_such.thing:make' cannot be imported.*PYTHONPATH"):
    user_modules.admit_own(with_outer('no_such.thing:make'))
  module[1].write_text('import does_not_exist\n')
  with pytest.raises(InputError, match='No module named'):
    choices.make_outer_optimizer(with_outer(f'{module[0]}:make').outer)


@pytest.mark.parametrize('name', ['outer.optimizer', 'inner.optimizer', 'inner.schedule'])
def test_the_error_of_a_wrong_choice_tells_of_references(name):
  section, field = name.split('.')
  with pytest.raises(InputError, match=rf"config.{name}='my_module': choose one of .*'package.module:name'"):
    settings.from_dict({section: {field: 'my_module'}})


@pytest.mark.parametrize('changes, words', [
  ({'inner': {'schedule': 'a:b', 'rewarm_steps': 5}}, 'config.inner.rewarm_steps=5: leave that to your'),
  ({'inner': {'schedule': 'a:b'}, 'train': {'learning_rate': 0.1}}, 'config.train.learning_rate=0.1: leave that to'),
  ({'inner': {'optimizer': 'a:b'}, 'mesh': {'shard_states': True}}, "config.inner.optimizer='a:b' may need whole"),
  ({'inner': {'optimizer': 'muon'}, 'mesh': {'shard_states': True}}, "config.inner.optimizer='muon' may need whole"),
])  # fmt: skip
def test_what_does_not_go_together(changes, words):
  with pytest.raises(InputError, match=words):
    settings.from_dict(changes)


def test_of_inner_optimizers_no_first_usual_move_is_known():
  config = dataclasses.replace(settings.Outer(), optimizer='sgd')
  assert np.isinf(outer.screening.first_usual(100, 'a:b')) and choices.make_outer_optimizer(config)
  assert isinstance(jax.eval_shape(optax.identity().init, {}), optax.EmptyState)


# -- the examples of the page, each by a number or two that follow from its text


def outer_example(module, folder):
  opt = module.make(settings.Outer(learning_rate=0.003))
  updates, _ = opt.update({'x': np.ones(2, 'f')}, opt.init({'x': np.ones(2, 'f')}), {'x': np.ones(2, 'f')})
  np.testing.assert_allclose(updates['x'], -0.003 * (1 + 1e-3), rtol=1e-5)


def inner_example(module, folder):
  opt = module.make(settings.Inner(weight_decay=0.5))
  params = {name: np.ones((2, 2), 'f') for name in ('embed/tokens', 'w')}
  updates, _ = opt.update(params, opt.init(params), params)
  np.testing.assert_allclose([updates['embed/tokens'][0, 0], updates['w'][0, 0]], [1, 1.5], rtol=1e-5)


def schedule_example(module, folder):
  rate = module.make(settings.Inner(learning_rate=0.5, warmup_steps=10))
  np.testing.assert_allclose([rate(jnp.int32(step)) for step in (4, 9, 39)], [0.25, 0.5, 0.25], rtol=1e-6)


def router_example(module, folder):
  router, texts = module.make(settings.Routing()), types.SimpleNamespace(lengths=np.arange(8))
  assert router.scores(router.fit(texts, 4, 0), texts).argmax(1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def source_example(module, folder):
  (folder / 'a').mkdir()
  (folder / 'a' / 'b.rst').write_text('text')
  [(name, text, domain)] = module.make(settings.Data(data_dir=str(folder)), 'train')
  assert (name, text(), domain) == ('a/b.rst', 'text', 'a')
  assert not [*module.make(settings.Data(data_dir=str(folder)), 'validation')]


def tokenizer_example(module, folder):
  tokenizer = module.make(settings.Tokenizer())
  assert tokenizer.decode(tokenizer.encode('é')) == 'é' and tokenizer.vocab_size > tokenizer.eos_id


def sink_example(module, folder):
  sink = module.Csv(settings.Metrics(run=str(folder / 'run')))
  sink.write({'kind': 'step', 'stage': 'train', 'step': 2, 'loss': [1.0, 2.0, None]})
  sink.close()
  assert (folder / 'run.csv').read_text().split() == ['train,2,1.5']


def block_example(module, folder):
  block, x = module.make(settings.Model(width=8, num_heads=2, head_dim=4, mlp_dim=8), 0), jnp.ones((1, 3, 8))
  places = jnp.arange(3)[None], jnp.ones((1, 3), jnp.int32)
  hidden, _ = jax.eval_shape(lambda: block.init_with_output(jax.random.key(0), x, *places))[0]
  assert hidden.shape == x.shape


EXAMPLES = {
  f'my_{name.removesuffix("_example")}.py': x for name, x in [*globals().items()] if name.endswith('_example')
}


def test_every_example_of_the_page_is_executed():
  assert own_modules.examples().keys() == EXAMPLES.keys()


@pytest.mark.parametrize('file', EXAMPLES)
def test_an_example_of_the_page_does_what_it_says(file, tmp_path, monkeypatch):
  name = own_modules.write(tmp_path, monkeypatch, own_modules.examples()[file])
  EXAMPLES[file](importlib.import_module(name), tmp_path)
  sys.modules.pop(name)
