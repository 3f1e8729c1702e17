"""8 fake CPU devices, quick compilation, and a fixture against mixing dtypes by accident."""

import fcntl
import gc
import os
import pathlib

import quick_xla

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {quick_xla.on(8)}'
os.environ['LOKY_MAX_CPU_COUNT'] = '1'  # scikit-learn asks lscpu, which a bare machine may lack, and warns

import jax  # after the environment, which it reads once
import pytest
import tiny_run

# Files of minutes, which begin before the others, so that no worker is left with one at the end.
LONGEST = 'invariant_6_resume invariant_8_islands stopped_islands reuse source_seqio generate route_server'.split()
LONGEST_SLOW = (  # with --slow, these too: one of them alone at the end would be most of ten minutes
  'resharding_round two_processes chaos benchmarks worker_hosts bandwidth experiments local damaged_files pretrained '
  'invariant_6_file_kinds extend bucket_run lineage recipe wire lost_disks stopped_anywhere sources_agree skypilot '
  'invariant_11_poisoned experiments_scripts three_owners hub_run owners_killed'
).split()

TOGETHER = (  # groups of files, each of which runs in one worker: the files of a group share what takes seconds to make
  (  # a prepared run
    'islands/stopped_islands',
    'invariants/invariant_8_islands',
    'islands/auditor',
    'islands/judge',
    'islands/run_costs',
    'islands/live_metrics',
  ),
  ('data/source_seqio', 'data/source_tfds'),  # TensorFlow
)

MAPS = pathlib.Path('/proc/self/maps')  # on Linux, which lets a process have 65,530, and ends one that wants more
MANY_MAPS = 20_000


@pytest.fixture
def strict_dtypes():
  """float32 with bfloat16 or with int32 is an error, unless a cast says that it is meant.

  For `pytestmark = pytest.mark.usefixtures('strict_dtypes')`. Not for everyone: Optax's Adam mixes them.
  """
  with jax.numpy_dtype_promotion('strict'):
    yield


def pytest_addoption(parser):
  parser.addoption('--chaos_s', type=float, default=6, help='how long faults come in chaos_test.py (6)')
  parser.addoption('--chaos_seed', type=int, default=0, help='of the first run in chaos_test.py (0)')
  parser.addoption('--chaos_wire', default='lan', help='config.outer.wire in chaos_test.py; thin: own levels too (lan)')
  parser.addoption('--chaos_on', default='', help='postgresql,folder or sqlite,s3 ...: else runs take turns')
  parser.addoption('--slow', action='store_true', help='those too that CI leaves out for their time')
  parser.addoption('--stops', type=int, default=20, help='signals in stopped_anywhere_test.py (20)')
  parser.addoption('--protocol_runs', type=int, default=1, help='of each kind in protocol_test.py (1)')
  parser.addoption('--all_crash_points', action='store_true', help='stopped_islands_test.py stops at every point')
  parser.addoption('--islands_on', help='where tests of islands run: all, or one of backends.py, as postgresql,s3')


def pytest_xdist_make_scheduler(config, log):
  """With --dist=loadfile: gives a worker whole files, and the files of a group of TOGETHER to the same worker."""
  if config.getoption('dist') != 'loadfile':
    return None
  from xdist.scheduler.loadfile import LoadFileScheduling

  groups = {f'tests/{name}_test.py': names[0] for names in TOGETHER for name in names}

  class Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid):
      file = super()._split_scope(nodeid)
      return groups.get(file, file)

  return Scheduling(config, log)


def pytest_ignore_collect(collection_path, config):
  """Without --slow, a file of which every test is slow is not even imported, unless it is asked for by name."""
  named = {pathlib.Path(argument.partition('::')[0]).resolve() for argument in config.args}
  if config.getoption('--slow') or not collection_path.name.endswith('_test.py') or collection_path in named:
    return None
  return True if b'\npytestmark = pytest.mark.slow' in collection_path.read_bytes() else None


def pytest_collection_modifyitems(config, items):
  if not config.getoption('--slow'):
    slow = pytest.mark.skip(reason='slow: --slow runs it')
    for item in items:
      if item.get_closest_marker('slow'):
        item.add_marker(slow)
  first = [*(LONGEST_SLOW if config.getoption('--slow') else []), *LONGEST]
  items.sort(key=lambda item: item.path.stem.removesuffix('_test') not in first)


@pytest.fixture(autouse=True, scope='module')
def few_programs():
  """Each program that XLA has compiled maps memory: where they are many, those of earlier files are forgotten."""
  yield
  if MAPS.exists() and MAPS.read_bytes().count(b'\n') > MANY_MAPS:
    jax.clear_caches()
    gc.collect()


def pytest_generate_tests(metafunc):
  """`@pytest.mark.on(*names)`: the fixture `backend` is each of these, unless --islands_on says which."""
  if mark := metafunc.definition.get_closest_marker('on'):
    import backends  # SQLAlchemy and more: for few tests

    wanted = metafunc.config.getoption('--islands_on')
    names = backends.NAMES if wanted == 'all' else [wanted] if wanted else mark.args
    metafunc.parametrize('backend', names, indirect=True, scope='module')


@pytest.fixture(scope='module')
def backend(request):
  import backends

  with backends.opened(request.param) as opened:
    yield opened


def pytest_configure(config):
  """Tests, workers of pytest-xdist and later runs share what XLA compiled."""
  os.fsync = lambda handle: None  # processes die here, the machine does not; it takes milliseconds, thousands of times
  gc.set_threshold(20_000, 20, 20)  # tracing makes many objects that stay: a tenth of the tests' time went into looking
  config.addinivalue_line('markers', 'slow: runs with --slow')
  config.addinivalue_line('markers', 'on(*names): of backends.py, with which the test runs')
  quick_xla.share_contexts()
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(config.cache.mkdir('xla'))  # for processes that tests start
  jax.config.update('jax_compilation_cache_dir', os.environ['JAX_COMPILATION_CACHE_DIR'])
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')  # as commands do: else programs have other names


@pytest.fixture(scope='session')
def undisturbed(tmp_path_factory, worker_id, pytestconfig):
  """The workdir of a finished run of the command, to read and not to touch; made once for all workers.

  With --slow it has an XLA cache of its own, which slow tests look into and copy.
  """
  temp = tmp_path_factory.getbasetemp()
  folder = (temp if worker_id == 'master' else temp.parent) / 'undisturbed'
  folder.mkdir(exist_ok=True)
  with open(folder / 'lock', 'w') as f:
    fcntl.flock(f, fcntl.LOCK_EX)
    if not (folder / 'run' / 'report.json').exists():
      own_cache = pytestconfig.getoption('--slow')
      options = tiny_run.CONTROL, tiny_run.SAMPLES
      tiny_run.run(tiny_run.write_config(folder), folder / 'run', *options, own_cache=own_cache)
  return folder / 'run'
