"""python -m dipaco_jax.main --config=configs/tiny.py --workdir=runs/tiny

Trains a DiPaCo from text to report. The same command again goes on from where it stopped, whatever stopped it.
Exit status: 0 done; 2 wrong config or input, before any work; 65 training diverged; 69 another of several processes is
gone (start all of them again); 75 the disk is full or gone (run it again when there is space); 130 stopped by Ctrl-C,
143 by SIGTERM and 129 by its terminal's end, with everything saved. Where nobody reads what it says any more, it goes
on in silence.
"""

import contextlib
import json
import logging
import os
import pathlib
import shlex
import shutil
import signal
import sys
import threading
import time

from absl import flags
from ml_collections import ConfigDict, config_flags

from dipaco_jax import checks, command, display, plain, processes, stopping
from dipaco_jax import settings as settings_lib

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file('config', None, 'A config file, for instance configs/tiny.py or configs/tiny.py:dense.')
flags.DEFINE_string('workdir', None, 'Where everything is kept; made if it is not there.')
flags.DEFINE_string('reuse', None, 'A run whose base and shards are taken, as far as its settings are these.')
flags.DEFINE_bool('compile_only', False, 'Says what the run will cost on --topology, which need not be there.')
flags.DEFINE_string('topology', None, 'With --compile_only: a TPU, as v5e:16x16, or v5e:8x8*4 for four slices of that.')
flags.DEFINE_bool('distributed', False, 'One of several processes of a job that all see the workdir, or of one worker.')
flags.DEFINE_string('coordinator', None, 'host:port of the first process; not needed on Cloud TPU.')
flags.DEFINE_integer('num_processes', None, 'Not needed on Cloud TPU.')
flags.DEFINE_integer('process_id', None, 'From 0; not needed on Cloud TPU.')
flags.DEFINE_string('role', None, 'One process of many: worker, outer, evaluator or monitor; see launch/README.md.')
flags.DEFINE_string('registry', None, 'With --role: postgresql://..., sqlite:////FILE, file:PATH; or DIPACO_REGISTRY.')
flags.DEFINE_string('name', '', 'With --role: of this process, by default its role and host.')
flags.DEFINE_string('share', '', 'With --role=outer: 0/4 takes the first of four parts of the modules before others.')
flags.DEFINE_integer('parent', None, 'With --role: ends, as by SIGTERM, when its parent is no more this process.')
flags.DEFINE_bool('backup', False, 'With --role=worker: does what is left lying, and copies what stragglers are at.')
flags.DEFINE_float('lease_s', 30.0, 'With --role: after so many seconds of silence a task goes to another.')
OPTIONS = (
  'config', 'workdir', 'reuse', 'compile_only', 'topology', 'distributed', 'coordinator', 'num_processes', 'process_id',
  'role', 'registry', 'name', 'share', 'parent', 'backup', 'lease_s',
)  # fmt: skip


def parse(argv: list[str]) -> settings_lib.Settings:
  """Flags and the config; anything wrong with them ends with status 2 and one line."""
  try:
    rest = FLAGS(argv)
    if FLAGS.config is None:
      raise ValueError('--config is missing: for instance --config=configs/tiny.py')
    if not FLAGS.workdir and not FLAGS.compile_only:
      raise ValueError('--workdir is missing: name a directory to keep the run in')
    plain.check('workdir', FLAGS.workdir or '', 4096)
    plain.check('name', FLAGS.name)
    if FLAGS.workdir and '://' in FLAGS.workdir and not FLAGS.role:
      raise ValueError(
        f'--workdir={FLAGS.workdir}: one job needs a file system: mount the bucket there, name a disk, or run as '
        'islands, which keep their work in buckets (--role; launch/README.md)'
      )
    if len(rest) > 1:
      raise ValueError(f'{rest[1]!r} is not an option: write --name=value')
    if not isinstance(FLAGS.config, ConfigDict):
      raise ValueError('--config: get_config() should return a ConfigDict of settings.Settings().to_dict()')
    values = FLAGS.config.to_dict()
    if FLAGS.compile_only:
      values['data'] = {}  # a program is the same for any text, and there may be none yet
    return settings_lib.from_dict(values)
  except Exception as e:  # config files are Python, and absl raises many kinds
    command.fail(command.explain(e, argv))


def main(argv: list[str] | None = None):
  with processes.together(), stopping.listening('stopped; the same command goes on from here') as signals:
    guarded(sys.argv if argv is None else argv, signals)


def guarded(argv: list[str], signals: stopping.Signals):
  """All of it; what is the user's to mend ends in one line."""
  if any(a in ('--help', '-h', '-help', '--helpfull') for a in argv[1:]):
    return help_and_exit()
  try:
    settings = parse(argv)
    if FLAGS.compile_only:
      return compile_only(settings)
    if FLAGS.role:
      return run_role(settings)
    run_in(pathlib.Path(FLAGS.workdir), settings, signals)
  except KeyboardInterrupt:
    signals.leave()
  except Exception as e:
    if command.disk_is_full(e):
      words = f'the disk of --workdir={FLAGS.workdir} is full; run the same command again when there is space'
      command.fail(words, command.TRY_AGAIN)
    if isinstance(e, checks.Diverged):
      command.fail(f'{e}; {command.AFTER_DIVERGENCE}', command.DIVERGED)
    if not checks.is_input_error(e):
      raise
    command.fail(' '.join(str(e).split()))


def help_and_exit():
  print(__doc__)
  print('options:')
  for name in OPTIONS:
    print(f'  --{name:20} {FLAGS[name].help}')
  print(f'  --{"config.FIELD=VALUE":20} Overrides a field of the config; the fields and their defaults:\n')
  for name, value in checks.flatten(settings_lib.Settings().to_dict()).items():
    print(f'    {name:34} {value!r}')


def run_in(workdir: pathlib.Path, settings: settings_lib.Settings, signals: stopping.Signals):
  """Checks everything that can be checked, then runs the stages."""
  command.quiet()
  with display.doing('loading JAX', tells=False, at_once=True):
    if FLAGS.distributed:
      processes.join(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    import jax

    from dipaco_jax import checkpoint, metrics, reuse, spmd, stages, text, tokenizing  # JAX: not for --help
    from dipaco_jax import run as run_lib

  with display.doing('looking for devices'):
    first = jax.process_index() == 0
  display.STDERR.silent = not first
  if not finished_tokenizing(workdir):
    with display.doing('looking at the text'):
      text.check(settings.data)
      tokenizing.check_input(settings)
  with display.doing('looking at the model'):
    check_model(settings)
  with contextlib.ExitStack() as open_:
    open_.enter_context(kept(workdir))
    if first:
      open_.enter_context(checkpoint.hold(workdir))
      settle_config(workdir, settings)
    checkpoint.barrier('config')
    compilation_cache(workdir)
    run = run_lib.Run(
      workdir, settings, open_.enter_context(metrics.Metrics(workdir, first)), metrics.count_compilations(),
      signals.requested, signals.graceful,
    )  # fmt: skip
    metrics.tell_compilations()
    run_lib.note_environment(run)
    if FLAGS.reuse and first:
      reuse.take(run, pathlib.Path(FLAGS.reuse))
    checkpoint.barrier('reuse')
    try:
      stages.run_all(run)
    except spmd.Stopped:
      checkpoint.barrier('stopped')  # the first process takes the coordinator with it
      raise
    run.metrics.close()
    if first:
      finish(workdir)
    checkpoint.barrier('finished')  # the others' end waits for the first's no longer than some minutes


def compile_only(settings: settings_lib.Settings):
  """A table of what the run will cost, and as the last line the same as one JSON object."""
  if not FLAGS.topology:
    raise ValueError('--topology is missing: the TPU to compile for, as --topology=v5e:16x16')
  os.environ['JAX_PLATFORMS'] = 'cpu'  # the TPU compiler would look for a TPU
  command.quiet()
  with display.doing('loading JAX', tells=False, at_once=True):
    from dipaco_jax import dry_run, metrics, topology

    there = topology.find(FLAGS.topology)
  metrics.tell_compilations()
  with display.doing(f'compiling for {FLAGS.topology}', tells=False):
    found = dry_run.run(settings, there)
  print(dry_run.table(found))
  print(json.dumps(metrics.plain(found)))


def run_role(settings: settings_lib.Settings):
  """One process of an islands run."""
  command.quiet()
  with display.doing('loading JAX', tells=False, at_once=True):
    from dipaco_jax import roles

  if FLAGS.role not in roles.ROLES:
    raise ValueError(f'--role={FLAGS.role}: there are {", ".join(roles.ROLES)}')
  if FLAGS.backup and FLAGS.role != 'worker':
    raise ValueError(f'--backup is for --role=worker, not for --role={FLAGS.role}')
  if FLAGS.distributed:
    processes.join(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
  if FLAGS.parent:
    threading.Thread(target=follow, args=(FLAGS.parent,), daemon=True).start()
  check_model(settings)
  compilation_cache(roles.make_local_place(FLAGS.workdir))
  roles.run_role(
    FLAGS.role, settings, FLAGS.workdir, FLAGS.registry, FLAGS.name, FLAGS.share, FLAGS.lease_s, FLAGS.backup
  )


def follow(parent: int):
  """Ends this process after its parent."""
  while os.getppid() == parent:
    time.sleep(1)
  os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def kept(workdir: pathlib.Path):
  """Makes the workdir, and takes it away again where input proves wrong before the first stage is complete."""
  try:
    new = not (workdir.exists() and any(workdir.iterdir()))
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / 'lock').touch()
  except OSError as e:
    if command.disk_is_full(e):
      raise
    raise ValueError(f'--workdir={workdir}: {e.strerror}; name a directory that can be made and written') from e
  try:
    yield
  except Exception as e:
    if not is_there(workdir / 'lock'):
      words = f'--workdir={workdir} is gone; run the same command again when it is there'
      command.fail(words, command.TRY_AGAIN)
    has_text = finished_tokenizing(workdir) or any(workdir.glob('tokenize-*/sequences/*'))
    if isinstance(e, ValueError) and new and not has_text:
      shutil.rmtree(workdir, ignore_errors=True)
    raise


def is_there(file: pathlib.Path) -> bool:
  """Also not where its file server, or the disk, does not answer."""
  try:
    file.stat()
  except OSError:
    return False
  return True


def finished_tokenizing(workdir: pathlib.Path) -> bool:
  return (workdir / 'stages' / 'tokenize.json').exists()


def check_model(settings: settings_lib.Settings):
  """Patterns against the model's parameters, devices against batches: before any work."""
  import jax

  from dipaco_jax import mesh, model, modules

  if settings.model.attention == 'splash' and jax.default_backend() != 'tpu':
    raise ValueError("config.model.attention='splash' is for TPU: use 'auto'")
  shapes = model.shapes(model.make(settings.model, settings.tokenizer.vocab_size))
  layout = modules.make_layout(settings.grid, settings.levels, shapes)
  mesh.place(layout.grid, settings.mesh, settings.batch_sizes('train'), jax.devices())
  mesh.place(modules.grid_lib.Grid(), settings.mesh, settings.batch_sizes('pretrain'), jax.devices())


def settle_config(workdir: pathlib.Path, settings: settings_lib.Settings):
  """Writes config.json and the command; refuses another config than the run began with, naming the fields."""
  from dipaco_jax import checkpoint, history

  file = workdir / 'config.json'
  if file.exists():
    old = history.read_settings(workdir)
    if changed := settings_lib.differences(old, settings):
      words = '; '.join(f'config.{name} was {a!r}, is {b!r}' for name, (a, b) in changed.items())
      raise ValueError(f'--workdir={workdir} holds a run with another config ({words}): use another --workdir')
    trained = max(checkpoint.versions(workdir), default=0)
    if settings.train.phases < trained:
      raise ValueError(f'config.train.phases={settings.train.phases}: {trained} are trained; name as many or more')
    if old.train.phases < settings.train.phases and not settings.inner.decay_steps:
      logging.warning(
        'more phases stretch the cosine, so the learning rate steps up; --config.inner.decay_steps states its length '
        'from the start'
      )
  checkpoint.write_json(file, settings.to_dict())
  words = shlex.join(map(plain.redacted, sys.argv[1:]))
  checkpoint.write_file(workdir / 'command.txt', os.fsencode(f'python -m dipaco_jax.main {words}\n'))


def compilation_cache(workdir: pathlib.Path):
  """A resumed run takes its programs from there; or from where JAX_COMPILATION_CACHE_DIR says."""
  import jax

  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    jax.config.update('jax_compilation_cache_dir', str((workdir / 'cache').absolute()))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')  # else a workdir that was moved compiles anew


def finish(workdir: pathlib.Path):
  """The report, and a summary of it."""
  from dipaco_jax import failures, headline, run_report, trees

  with display.doing('writing the report'):
    r = run_report.write(workdir)
    trees.tidy(workdir)
  if r['perplexity'] is None:
    raise checks.Diverged('training diverged: the perplexity is not finite')
  lines = [
    f'perplexity    {headline.figure(r["perplexity"], r["perplexity_interval"])}',
    *(f'              {words}' for words in headline.changes(r)),
    f'bits per byte {r["bits_per_byte"]:.3f}',
    f'validated on  {r["validation_tokens"]:,} tokens of {r["validation_documents"]:,} documents',
    f'paths         {r["paths"]}, {r["parameters_path"]:,} parameters each, {r["parameters_total"]:,} in all',
    f'trained on    {r["train_tokens"]:,} tokens at {r["tokens_per_s"]:,.0f} tokens/s',
    f'report        {workdir / "report.html"}',
    f'next          python -m dipaco_jax.status --workdir={workdir}',
  ]
  with contextlib.suppress(OSError):  # nobody reads it any more
    print('\n'.join([*lines, *failures.words(failures.read(workdir))]), flush=True)


if __name__ == '__main__':
  with processes.ending():
    main()
