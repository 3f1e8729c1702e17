"""python -m dipaco_jax.main --config=tiny --workdir=runs/tiny

Trains a DiPaCo from text to report. The same command again continues from where it stopped, for any reason.
Exit status: 0 done; 2 wrong config or input, before any work; 65 training diverged; 69 another of several processes is
gone (start all of them again); 75 the disk is full, gone or read-only, or the text, the bucket or the
registry is away (run it again when it is back); 130 stopped by Ctrl-C, 143 by SIGTERM and 129 by its terminal's end,
with everything saved. If its output is closed, it continues silently.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import sys
import tempfile
from typing import Any

from absl import flags

import dipaco_jax
from dipaco_jax.command_line import command, config_file, gateway_worker, role_process, usage
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core import errors, printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display, processes, stopping, time_use
from dipaco_jax.storage import user_modules
from dipaco_jax.telemetry import profiling
from dipaco_jax.training import devices

FLAGS = flags.FLAGS
flags.DEFINE_string(
  'config', None, 'Config file, or name of an included config, such as tiny or its variant tiny:dense.'
)
flags.DEFINE_string(
  'workdir', None, 'Folder of the run, created if it does not exist, or s3://BUCKET/... or gs://BUCKET/...'
)
flags.DEFINE_string(
  'scratch', None, 'Local folder for a run whose workdir is in a bucket. By default, a folder in ~/.cache.'
)
flags.DEFINE_string(
  'reuse', None, 'Another run, whose tokenizer, base model and shards are reused where the settings are equal.'
)
flags.DEFINE_bool(
  'compile_only', False, 'Whether to only estimate the cost of the run on --topology, without the devices.'
)
flags.DEFINE_string('profile', None, 'START:STEPS. Traces STEPS inner steps from global step START on.')
flags.DEFINE_integer(
  'metrics_port', None, 'Port on this machine at which Prometheus reads progress and speed. 0 means any free port.'
)
flags.DEFINE_string(
  'topology',
  None,
  "Devices for --compile_only: TPUs such as v5e:16x16 or v5e:8x8*4, several separated by commas, or 'here' "
  'for this machine.',
)
flags.DEFINE_bool('distributed', False, 'Whether this process is one of several processes of a job or of a worker.')
flags.DEFINE_string(
  'coordinator', None, 'Address host:port of the first process, with --distributed. Not needed on Cloud TPU.'
)
flags.DEFINE_integer('num_processes', None, 'Number of processes, with --distributed. Not needed on Cloud TPU.')
flags.DEFINE_integer('process_id', None, 'Number of this process from 0, with --distributed. Not needed on Cloud TPU.')
flags.DEFINE_string(
  'role', None, 'Role of this process in islands: worker, outer, evaluator or monitor (see docs/islands.md).'
)
flags.DEFINE_string(
  'registry', None, 'Registry of islands: postgresql://..., sqlite:////FILE or file:PATH. By default, DIPACO_REGISTRY.'
)
flags.DEFINE_string('name', '', 'Name of this process in islands. By default, its role, host and process id.')
flags.DEFINE_string(
  'share', '', 'With --role=outer, i/n: this process updates the i-th of n parts of the modules first, counted from 0.'
)
flags.DEFINE_integer(
  'parent', None, 'With --role, process id of the parent. This process ends when its parent has ended.'
)
flags.DEFINE_bool('backup', False, 'With --role=worker: whether to take only abandoned tasks and copies of late tasks.')
flags.DEFINE_string(
  'owner', '', 'With --role=worker: owner of the text that this worker trains on, if text stays with its owners.'
)
flags.DEFINE_list('data', [], "With --owner: files of the owner's text, globs separated by commas.")
flags.DEFINE_string(
  'store', '', 'With --owner: folder or bucket of the owner for all that does not leave it. It becomes a workdir.'
)
flags.DEFINE_string(
  'replay',
  '',
  'facts.json of a finished run of islands, or its registry. The run is computed again by its decisions, and compared: '
  'in one process or, with --role, by islands.',
)
flags.DEFINE_bool(
  'only_prepare', False, 'With --role=worker: whether to train nothing, and only take tasks that read all text.'
)
flags.DEFINE_float(
  'lease_s', 30.0, 'With --role: seconds without a heartbeat after which a task goes to another process.'
)
OPTIONS = (
  'config', 'workdir', 'scratch', 'reuse', 'profile', 'metrics_port', 'compile_only', 'topology', 'distributed',
  'coordinator', 'num_processes', 'process_id', 'role', 'registry', 'name', 'share', 'parent', 'backup',
  'owner', 'data', 'store', 'only_prepare', 'replay', 'lease_s',
)  # fmt: skip
HERE = 'here'  # a topology: the machine at hand, for which nothing is compiled
ONLY_WITH = {
  'role': ('registry', 'name', 'share', 'parent', 'backup', 'owner', 'only_prepare', 'lease_s'),
  'owner': ('data', 'store'),
  'compile_only': ('topology',),
  'distributed': ('coordinator', 'num_processes', 'process_id'),
}


def parse(argv: list[str]) -> settings_lib.Settings | None:
  """Parses flags and the config, None if a gateway has it; exits with status 2 and one line where they are wrong."""
  try:
    argv, overrides = config_file.split(argv)
    rest = FLAGS(argv)[1:]
    if gateway_worker.is_chosen():
      gateway_worker.check(OPTIONS, [*rest, *(f'--config.{override.name}' for override in overrides)])
      return None
    check_options(rest)
    values = config_file.read(FLAGS.config, overrides, FLAGS.workdir or '')
    if FLAGS.compile_only:
      values['data'] = {}  # a program is the same for any text, and there may be none yet
    settings = user_modules.admit_own(settings_lib.from_dict(values), FLAGS.workdir or '')
    profiling.check(profiling.parse(FLAGS.profile), settings)
    return settings
  except (InputError, flags.Error) as e:
    command.fail(command.explain(e, usage.MEANT))


def check_options(rest: list[str]):
  if rest:
    argument = printable.redacted(rest[0])
    raise InputError(f'{argument!r} is not an option: write --name=value, with patterns of files in quotes')
  if not FLAGS.config:
    raise InputError('--config is missing: a file, or one of ' + ', '.join(config_file.shipped()))
  if not FLAGS.workdir and not FLAGS.compile_only:
    raise InputError('--workdir is missing: name a directory to keep the run in')
  if FLAGS.compile_only and not FLAGS.topology:
    raise InputError('--topology is missing: the TPU to compile for, as --topology=v5e:16x16, or here')
  printable.check_name('--workdir', FLAGS.workdir or '', 4096)
  printable.check_name('--name', FLAGS.name)
  if FLAGS.replay and not FLAGS.role:
    check_replay()
  elif FLAGS.workdir and not FLAGS.role:
    command.check_workdir(FLAGS.workdir, FLAGS.scratch)
  if FLAGS.data and not FLAGS.owner and not FLAGS.role:
    raise InputError("--data is for runs with --owner: name the text of one job as --config.data.train='my/*.txt'")
  if FLAGS.owner and FLAGS.role not in (None, 'worker'):
    raise InputError(f'--owner is for --role=worker, not for --role={FLAGS.role}')
  for needed, names in ONLY_WITH.items():
    if given := [name for name in names if FLAGS[name].present and not FLAGS[needed].value]:
      raise InputError(f'--{given[0]} is for runs with --{needed}: add that, or leave it out')
  if FLAGS.metrics_port is not None and not 0 <= FLAGS.metrics_port < 2**16:
    raise InputError(f'--metrics_port={FLAGS.metrics_port} should be from 0 to {2**16 - 1}; 0 means any free port')
  if FLAGS.profile and FLAGS.role not in (None, 'worker'):
    raise InputError(f'--profile is for processes that train: leave it out with --role={FLAGS.role}')
  command.check_reuse(FLAGS.reuse)
  if FLAGS.lease_s <= 0:
    raise InputError(f'--lease_s={FLAGS.lease_s} should be above 0')
  command.check_processes(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)


def check_replay():
  """Raises InputError where one process cannot compute a run again with these options."""
  for name in ('compile_only', 'distributed', 'reuse', 'scratch'):
    if FLAGS[name].value:
      raise InputError(f'--{name} is for other runs than replays: leave it out with --replay')


def main(argv: list[str] | None = None):
  devices.hide_unused_libtpu()
  with processes.together(), stopping.listening('stopped; run the same command to resume') as signals:
    guarded(sys.argv if argv is None else argv, signals)


def guarded(argv: list[str], signals: stopping.Signals):
  """Runs the command; errors that the user can mend end with one line and an exit status."""
  if tell(argv[1:]):
    return
  try:
    settings = parse(argv)
    if not settings:
      with command.full_disk_told(f'TMPDIR={tempfile.gettempdir()}'):
        role_process.run_behind_gateway()
    elif FLAGS.compile_only:
      compile_only(settings)
    elif FLAGS.role or FLAGS.replay:
      # What is fetched from a bucket is on this machine.
      remote = '://' in FLAGS.workdir
      with command.full_disk_told(f'TMPDIR={tempfile.gettempdir()}' if remote else f'--workdir={FLAGS.workdir}'):
        role_process.run(settings)
    else:
      run_in(FLAGS.workdir, settings, signals)
  except KeyboardInterrupt:
    signals.leave()
  except Exception as e:
    if isinstance(e, errors.Diverged):
      command.fail(f'{e}; {command.AFTER_DIVERGENCE}', command.DIVERGED)
    of_islands = FLAGS.role or FLAGS.replay
    is_explained = isinstance(e, (InputError, errors.Unavailable)) or (isinstance(e, OSError) and of_islands)
    if is_explained and (message_and_status := command.ending(e)):
      command.fail(*message_and_status)
    raise


def tell(argv: list[str]) -> bool:
  """Prints help or the version where that is asked for."""
  if '--version' in argv:
    print(f'dipaco_jax {dipaco_jax.__version__}')
  elif any(a in ('--help', '-h', '-help', '--helpfull', 'help') or a.startswith('--help=') for a in argv):
    print(usage.main_help(__doc__, {name: FLAGS[name].help for name in OPTIONS}))
  else:
    return False
  return True


def run_in(workdir: str, settings: settings_lib.Settings, signals: stopping.Signals):
  """Trains as one job, and prints a summary."""
  command.quiet()
  time_use.begin(time_use.process_age_s())
  watched = role_process.serve_metrics()
  with display.doing('loading JAX', tells=False, at_once=True):
    if FLAGS.distributed:
      processes.join(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    from dipaco_jax.command_line import whole_run

  command_text = f'python -m dipaco_jax.main {shlex.join(map(printable.redacted, sys.argv[1:]))}'
  call = whole_run.Call(workdir, command_text, FLAGS.reuse, FLAGS.scratch, profiling.parse(FLAGS.profile), watched)
  report = whole_run.train(call, settings, signals)
  if report:
    print_summary(workdir, report)


def compile_only(settings: settings_lib.Settings):
  """Prints parameter counts, a table of costs and, as the last line, a JSON object; `here`: counts and two lines."""
  is_here = FLAGS.topology == HERE
  if not is_here:
    os.environ['JAX_PLATFORMS'] = 'cpu'  # the TPU compiler would look for a TPU
  command.quiet()
  with display.doing('loading JAX', tells=False, at_once=True):
    from dipaco_jax.algorithm import inner
    from dipaco_jax.huggingface import model_folder
    from dipaco_jax.planning import barriers, cost_check, cost_text, dry_run, topology
    from dipaco_jax.telemetry import metrics_log, performance

    sized = dataclasses.replace(settings.tokenizer, vocab_size=model_folder.vocab_size(settings))
    settings = dataclasses.replace(settings, tokenizer=sized)
    topologies = [] if is_here else [topology.find_topology(name) for name in FLAGS.topology.split(',')]
    grid = dry_run.layout_and_shapes(settings)
    inner.check_frozen(settings.inner.frozen, grid[1])
    parameters = cost_text.parameters_to_text(dry_run.count_parameters(*grid))
    parameters = '\n'.join([parameters, *(f'barrier        {line}' for line in barriers.lines(*grid))])
    if is_here:
      print(parameters)
      cost_check.check(settings, print)
      return
  estimates = []
  for one in topologies:
    with performance.watch_compilations(), display.doing(f'compiling for {one.name}', tells=False):
      estimates.append(metrics_log.plain(dry_run.estimate(settings, one)))
  if len(estimates) == 1:
    print(parameters, cost_text.to_text(estimates[0]), json.dumps(estimates[0]), sep='\n')
  else:
    print(parameters, cost_text.to_table(estimates), json.dumps({'topologies': estimates}), sep='\n')


def _count_documents(count: int) -> str:
  return f'{count:,} document{"s" * (count != 1)}'


def print_summary(workdir: str, r: dict[str, Any]):
  from dipaco_jax.command_line import bucket_run
  from dipaco_jax.reports import failures, headline

  place = workdir.rstrip('/') if '://' in workdir else pathlib.Path(workdir)

  lines = [
    f'perplexity    {headline.with_interval(r["perplexity"], r["perplexity_interval"])}',
    *(f'              {text}' for text in headline.results(r)),
    f'bits per byte {r["bits_per_byte"]:.3f}',
    f'validated on  {r["validation_tokens"]:,} tokens of {_count_documents(r["validation_documents"])}',
    f'paths         {r["paths"]}, {r["parameters_path"]:,} parameters each, {r["parameters_total"]:,} in all',
    f'trained on    {r["train_tokens"]:,} tokens at {r["tokens_per_s"]:,.0f} tokens/s',
    *([f'learning rate at most {rate:.3g}'] if (rate := r['highest_learning_rate']) else []),
    *([f'epochs        {text}'] if (text := headline.epochs(r)) else []),
    *([f'bytes a token {r["bytes_per_token"]:.2f}'] if r['bytes_per_token'] else []),
    f'wall time     {headline.wall_time(r)}',
    f'report        {place}/report.html',
    f'next          python -m dipaco_jax.generate --workdir={place} --prompt=TEXT',
  ]
  with contextlib.suppress(OSError):  # nobody reads it any more
    here = bucket_run.folder_here(workdir, FLAGS.scratch)
    print('\n'.join([*lines, *failures.in_words(failures.read_failures(here))]), flush=True)


if __name__ == '__main__':
  with processes.ending():
    main()
