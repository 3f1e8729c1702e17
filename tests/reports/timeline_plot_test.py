"""Who did what when, and the bytes of every role: from tasks and facts in a registry to the report's pictures."""

import json
import time
import types

import pytest
import synthetic

from dipaco_jax.config import settings
from dipaco_jax.islands import run_history
from dipaco_jax.islands.island import Island
from dipaco_jax.registry import registry as registry_lib
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.reports import island_figures, run_data, run_report, timeline_plot
from dipaco_jax.reports.timeline_plot import Task
from dipaco_jax.storage import object_store as storage_lib

RUN = types.SimpleNamespace(settings=settings.Settings(grid=(('a', 4),)))


@pytest.fixture
def island(tmp_path):
  registry = registry_lib.Registry(f'sqlite:///{tmp_path}/registry.db')
  yield Island(RUN, registry, storage_lib.open_storage(str(tmp_path / 'objects')), 'worker-1')
  registry.close()


def do(island, owner, kind, number):
  island.registry.add_tasks([NewTask(kind, '3', number)])
  task = island.registry.claim(owner, [kind])
  time.sleep(0.01)  # or its times may be the same to the millisecond
  island.registry.complete(task, [Fact(kind, '3', number, '', '', {})])


def test_timeline_of_what_is_done(island):
  do(island, 'worker-1', 'train', 0)
  do(island, 'outer-0', 'outer', 1)
  do(island, 'worker-1', 'train', 1)
  island.registry.add_tasks([NewTask('train', '3', 2)])
  island.registry.claim('worker-1', ['train'])
  found = run_history.timeline(island, {})['tasks']
  assert [task[:3] for task in found] == [['worker-1', 'train', 1], ['worker-1', 'train', 2], ['outer-0', 'outer', 1]]
  train, later, outer = [task[3:] for task in found]
  assert 0 == train[0] <= train[1] <= outer[0] <= outer[1] <= later[0] <= later[1] < 60


def test_a_replay_is_a_bar_before_its_task_in_the_row_of_the_worker(island):
  do(island, 'worker-1', 'train', 0)
  do(island, 'worker-1', 'train', 1)
  [task] = [task for task in island.registry.tasks('done', 'train') if task['number']]
  half = (task['ended'] - task['claimed']) / 2
  about = {'replay': {'phases': [0], 'seconds': half}}
  replayed = run_history.replays([Fact('checkpoint', '3', 0, '', '', {}), Fact('checkpoint', '3', 1, '', '', about)])
  found = run_history.timeline(island, replayed)['tasks']
  assert [task[1:3] for task in found] == [['train', 1], ['replay', 2], ['train', 2]]
  assert found[1][4] == found[2][3] <= found[2][4]
  rows = timeline_plot.rows([Task(*task) for task in found[::-1]])
  assert list(rows) == ['worker-1'] == list(timeline_plot.shown(rows))
  assert [task.kind for task in rows['worker-1']] == ['train', 'replay', 'train']
  labels = [text.get_text() for text in timeline_plot.draw(rows).axes[0].get_legend().get_texts()]
  assert labels == ['train', 'outer', 'evaluate', 'replay']


def test_rows():
  tasks = [
    Task('outer-0', 'outer', 1, 3, 5),
    Task('worker-10', 'train', 1, 0, 4),
    Task('worker-9', 'train', 2, 4, 6),
    Task('worker-9', 'train', 1, 0, 5),
  ]
  found = timeline_plot.rows(tasks)
  assert list(found) == ['worker-9', 'worker-10', 'outer-0']
  assert found['worker-9'] == [Task('worker-9', 'train', 1, 0, 4), Task('worker-9', 'train', 2, 4, 6)]
  many = timeline_plot.rows([Task(f'w{i}', 'train', 1, 0, 1) for i in range(40)] + tasks[:1])
  assert list(timeline_plot.shown(many)) == [f'w{i}' for i in range(timeline_plot.MAX_ROWS)] + ['outer-0']


def test_phases_at_once_are_those_of_one_moment():
  barrier = [Task('a', 'train', 1, 0, 9), Task('b', 'train', 1, 0, 4), Task('b', 'train', 2, 9, 12)]
  assert timeline_plot.phases_at_once(barrier) == 1
  assert timeline_plot.phases_at_once([*barrier, Task('b', 'train', 2, 5, 8), Task('c', 'outer', 3, 1, 2)]) == 2


@pytest.mark.slow
def test_a_report_of_islands_has_their_pictures(tmp_path):
  synthetic.make(tmp_path, phases=2)
  file = tmp_path / 'stages' / 'train.json'
  record = json.loads(file.read_text())
  record['result']['island_bytes'] = {'worker': {'in': 2_000_000, 'out': 1}, 'outer': {'in': 0, 'out': 3}}
  file.write_text(json.dumps(record))
  tasks = [Task('worker-0', 'train', 1, 0, 2), Task('worker-1', 'train', 2, 1, 400), Task('outer-0', 'outer', 1, 2, 3)]
  (tmp_path / 'timeline.json').write_text(json.dumps({'tasks': tasks}))
  run_report.write(tmp_path)
  assert {'timeline.png', 'island_bytes.png'} <= {file.name for file in (tmp_path / 'plots').iterdir()}
  page = (tmp_path / 'report.html').read_text()
  assert '2 MB, 1 bytes' in page and '2 different phases' in page and 'worker-1' in page and 'minutes' in page


def test_the_caption_says_what_waits_for_all(tmp_path):
  synthetic.make(tmp_path, axes=(('a', 2),), phases=1)
  (tmp_path / 'timeline.json').write_text(json.dumps({'tasks': [Task('w', 'train', 1, 0, 2)]}))
  run = run_data.read_run(tmp_path, run_report.make_report(tmp_path))
  shared = [level.name for level in run.levels if not level.axes]
  caption = island_figures.timeline(run).caption
  assert shared and f'{shared[0]} is a module of all paths' in caption and 'different phases' not in caption
