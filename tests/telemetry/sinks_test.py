"""Sinks get each row once, whatever they do and whenever the run is killed; training waits for none of them."""

import contextlib
import json
import sys
import time

import own_modules
import pytest

from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import object_store, user_modules
from dipaco_jax.telemetry import metrics_log, sinks

SOURCE = """
import json, pathlib, time

class Sink:
  def __init__(self, config):
    self.folder = pathlib.Path(config.project)
    self.rows = self.folder / f'{config.run}.jsonl'

  def write(self, row):
    while (self.folder / 'hang').exists():
      time.sleep(0.01)
    if (self.folder / 'raise').exists():
      raise ValueError('no\\nspace at https://me:secret@host')
    with open(self.rows, 'a') as f:
      print(json.dumps(row), file=f)

  def close(self):
    (self.folder / 'closed').touch()

def nothing(config):
  return None

def raises(config):
  return 1 / 0
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  """The name of a module of the user's, of which no other test knows."""
  name = own_modules.write(tmp_path, monkeypatch, SOURCE)
  yield name
  sys.modules.pop(name, None)
  extension.load.cache_clear()


def made(*names, **fields):
  return sinks.make(settings.from_dict({'metrics': {'sinks': names} | fields}), 'my_run')


@pytest.fixture
def fed(tmp_path, module):
  """Feeds the module's sink with the metrics of a workdir; what it has got is in my_run.jsonl."""

  def start(*more):
    at = dict(project=str(tmp_path))
    rows, memory = lambda: sinks.follow(tmp_path), sinks.in_workdir(tmp_path)
    return sinks.fed(made(f'{module}:Sink', *more, **at), rows, memory, poll_s=0.01)

  return start


def got(tmp_path):
  return [json.loads(line) for line in (tmp_path / 'my_run.jsonl').read_text().splitlines()]


def updates(tmp_path):
  return [row['updates'] for row in got(tmp_path)]


def test_a_sink_gets_the_rows_of_the_record(tmp_path, fed):
  with fed(), metrics_log.Metrics(tmp_path) as rows:
    for n in range(1, 4):
      rows.write('step', 'train', n, loss=[float(n), float('nan')])
    rows.write('phase', 'train', 3, norm={'low': {'0': 1.0}})
  assert got(tmp_path) == list(metrics_log.read_rows(tmp_path)) and len(got(tmp_path)) == 4
  assert (tmp_path / 'closed').exists()


def test_what_is_made_again_comes_once(tmp_path, fed):
  with metrics_log.Metrics(tmp_path) as rows:
    with fed():
      for n in range(1, 6):
        rows.write('step', 'train', n)
      rows.write('phase', 'train', 5)
    rows.write('step', 'train', 6)  # of which the sink knows nothing when the process is killed
  with metrics_log.Metrics(tmp_path) as rows, fed():
    rows.rewind('train', 3)
    for n in range(4, 8):
      rows.write('step', 'train', n)
      if n == 5:
        rows.write('phase', 'train', 5)
    rows.rewind('control', 0)
    rows.write('step', 'control', 1)
  assert [(row['kind'], row['stage'], row['updates']) for row in got(tmp_path)] == [
    *(('step', 'train', n) for n in range(1, 6)),
    ('phase', 'train', 5),
    ('step', 'train', 6),
    ('step', 'train', 7),
    ('step', 'control', 1),
  ]


def test_rows_that_are_passed_over_are_reported_once_though_the_record_is_rewound(tmp_path):
  written, skipped = [], []
  made = sinks.ReadySink('own', lambda kept: sinks.Taker(written.append, skipped.append, lambda: None))
  memory = sinks.Memory(lambda name: {'rows': {'train': [2, ['step']]}}, lambda name, text: None)
  with metrics_log.Metrics(tmp_path) as rows:
    for n in range(1, 4):
      rows.write('step', 'train', n)
    with sinks.fed([made], lambda: sinks.follow(tmp_path), memory, poll_s=0.01):
      while not written:
        time.sleep(0.01)
      rows.rewind('train', 1)
      for n in range(2, 5):
        rows.write('step', 'train', n)
  assert [[row['updates'] for row in found] for found in (skipped, written)] == [[1, 2], [3, 4]]


def test_a_sink_that_is_new_gets_all_rows(tmp_path, fed):
  with metrics_log.Metrics(tmp_path) as rows:
    for n in range(3):
      rows.write('step', 'train', n)
  with fed():
    pass
  assert updates(tmp_path) == [0, 1, 2]


def test_a_line_that_is_being_written_waits(tmp_path):
  row = dict(kind='step', stage='train', updates=1, time=0.0)
  line, rows = metrics_log.to_line(row), sinks.follow(tmp_path)
  with contextlib.closing(rows):
    assert next(rows) is None
    with open(tmp_path / 'metrics.jsonl', 'wb', buffering=0) as f:
      f.write(line + line[:20])
      assert [next(rows) for _ in range(3)] == [row, None, None]
      f.write(line[20:])
      assert [next(rows) for _ in range(2)] == [row, None]


def test_an_error_is_one_warning_and_the_sink_continues_with_the_next_start(tmp_path, fed, module, caplog):
  (tmp_path / 'raise').touch()
  with fed(), metrics_log.Metrics(tmp_path) as rows:
    for n in range(3):
      rows.write('step', 'train', n)
    while not caplog.messages:
      time.sleep(0.01)
    rows.write('step', 'train', 3)
  [said] = caplog.messages
  assert said.startswith(f'config.metrics.sinks: {module}:Sink is disabled from now on: ValueError: no space at')
  assert f'(line 13 of {tmp_path / module}.py)' in said and 'secret' not in said
  assert not (tmp_path / 'my_run.jsonl').exists() and (tmp_path / 'closed').exists()
  (tmp_path / 'raise').unlink()
  with fed():
    pass
  assert updates(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize('limit, raised', [('CLOSE_S', False), ('STOP_S', True)])
def test_nobody_waits_long_for_a_sink_that_hangs(tmp_path, fed, module, monkeypatch, caplog, limit, raised):
  monkeypatch.setattr(sinks, limit, 0.2)
  (tmp_path / 'hang').touch()
  began = time.monotonic()
  try:
    with fed(), metrics_log.Metrics(tmp_path) as rows:
      for n in range(3):
        rows.write('step', 'train', n)
      if raised:
        raise KeyboardInterrupt
  except KeyboardInterrupt:
    assert raised
  assert time.monotonic() - began < 2
  [message] = [message for message in caplog.messages if module in message]  # threads of earlier tests log, too
  assert 'has not accepted all rows within 0.2 s' in message
  (tmp_path / 'hang').unlink()


def test_what_takes_time_to_settle_is_noted_later():
  noted, taken = [], [0]
  at = lambda text: json.loads(text)['rows'].get('train', [0])[0]  # noqa: E731
  memory = sinks.Memory(lambda name: {}, lambda name, text: noted.append((at(text), taken[-1])))
  rows = [dict(kind='step', stage='train', updates=n, time=0.0) for n in range(1, 9)]

  def slowly(row):
    time.sleep(0.05)
    taken.append(row['updates'])

  slow = sinks.ReadySink('slow', lambda kept: sinks.Taker(slowly, slowly, lambda: None), settles_s=0.12)
  with sinks.fed([slow], lambda: (row for row in [*rows, None, None]), memory, poll_s=0.01):
    pass
  first, *between, last = noted
  assert first == (0, 0) and last == (8, 8)
  assert between and all(said <= has - 2 for said, has in between)


def test_how_far_a_sink_is_is_noted_while_no_row_comes():
  noted, closed = [], []
  memory = sinks.Memory(lambda name: {}, lambda name, text: noted.append((bool(closed), text)), every_s=0.05)
  row = dict(kind='step', stage='train', updates=7, time=0.0)
  made = sinks.ReadySink('own', lambda kept: sinks.Taker(lambda row: None, lambda row: None, lambda: closed.append(1)))
  with sinks.fed([made], lambda: (row if n == 0 else None for n in range(1000)), memory, poll_s=0.01):
    while len(noted) < 2:
      time.sleep(0.01)
    time.sleep(0.2)
  assert [(at_end, '7' in text) for at_end, text in noted] == [(False, False), (False, True)]


def test_the_memory_in_a_place_that_others_share(tmp_path):
  memory = sinks.in_storage(object_store.open_storage(str(tmp_path)))
  assert memory.load('a.b:c') == {}
  memory.save('a.b:c', '{"rows": {}}')
  assert memory.load('a.b:c') == {'rows': {}} == sinks.in_workdir(tmp_path).load('a.b:c')
  (tmp_path / 'sinks' / 'a.b:c.json').write_text('{"ro')
  assert memory.load('a.b:c') == {} == sinks.in_workdir(tmp_path).load('a.b:c')


@pytest.mark.parametrize('name, words', [
  ('{}:gone', 'has no function gone'),
  ('{}:nothing', r'should return an object with write\(row\) and close\(\)'),
  ('{}:raises', 'raises ZeroDivisionError'),
  ('no_such_module:make', 'cannot be imported'),
])  # fmt: skip
def test_what_is_no_sink_is_an_error_before_any_work(module, name, words):
  name = name.format(module)
  user_modules.trust([extension.module_of(name)])
  with pytest.raises(InputError, match=f"config.metrics.sinks='{name}'.*{words}"):
    made(name)


def test_the_example_of_the_page(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'my_sink.py').write_text(own_modules.examples()['my_sink.py'])
  user_modules.trust(['my_sink'])
  memory = sinks.in_workdir(tmp_path)
  with metrics_log.Metrics(tmp_path) as rows, sinks.fed(made('my_sink:Csv'), lambda: sinks.follow(tmp_path), memory):
    rows.write('step', 'train', 4, step=2, loss=[1.0, 2.0])
    rows.write('phase', 'train', 4, step=2)
    rows.write('step', 'train', 8, step=4, loss=[None])
  assert (tmp_path / 'my_run.csv').read_text().splitlines() == ['train,2,1.5', 'train,4,']
  sys.modules.pop('my_sink')


@pytest.mark.parametrize('name', sinks.BUILT_IN)
def test_a_library_that_is_not_there_is_named(monkeypatch, name):
  monkeypatch.setattr(sinks.importlib.util, 'find_spec', lambda module: None)
  with pytest.raises(InputError, match=rf"pip install 'dipaco_jax\[{name}\]'"):
    made(name)


def test_without_sinks_nothing_is_made_and_events_are_a_choice(tmp_path):
  assert made() == made('tensorboard') == []
  with metrics_log.Metrics(tmp_path, events=False) as rows:
    rows.write('step', 'train', 1)
    rows.rewind('train', 1)
  assert not (tmp_path / 'events').exists()
