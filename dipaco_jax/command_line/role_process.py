"""A process of islands: it begins, checks its machine, does the work of its role, and says how the run has ended."""

import contextlib
import os
from typing import Any

from absl import flags

from dipaco_jax.command_line import command, supervision
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display, processes, stopping, time_use
from dipaco_jax.storage import gateway_link
from dipaco_jax.telemetry import profiling

FLAGS = flags.FLAGS  # of main


def serve_metrics() -> Any:
  """Begins to answer Prometheus where that is asked for; raises InputError if the port cannot be had."""
  if FLAGS.metrics_port is None:
    return None
  from dipaco_jax.telemetry import metrics_server

  server, url = metrics_server.serve(FLAGS.metrics_port)
  stopping.say(f'metrics for Prometheus: {url}')
  return server


def run_behind_gateway():
  """Works for a run that only its gateway knows."""
  watched = begin_role()
  with display.doing('loading JAX', tells=False, at_once=True):
    from dipaco_jax.islands import behind_gateway
    from dipaco_jax.reports import headline

  link = gateway_link.from_environment()
  assert link
  own = behind_gateway.Own(FLAGS.owner, tuple(FLAGS.data), FLAGS.store)
  run = behind_gateway.open_run(link, FLAGS.name, own)
  check_machine(run.settings)
  profile = profiling.parse(FLAGS.profile)
  profiling.check(profile, run.settings)
  with contextlib.closing(profiling.Profiler(run.local, profile)) as profiler:
    outcome = behind_gateway.serve(run, _process('', watched, profiler))
  if outcome:
    lines = [f'{link.address.url}: finished', *headline.outcome(outcome)]
    lines += [supervision.next_of_owner(FLAGS.store, run.owner)] if run.owner else []
    print('\n'.join(lines))


def begin_role() -> Any:
  """Begins a process of islands; returns its server of metrics, if it has one."""
  command.quiet()
  time_use.begin(time_use.process_age_s())
  if FLAGS.parent:
    stopping.follow_parent(FLAGS.parent)
  return serve_metrics()


def check_machine(settings: settings_lib.Settings):
  """Raises InputError if this machine cannot do the work of a role; keeps what it compiles."""
  from dipaco_jax.pipeline import preflight
  from dipaco_jax.training import compilation_cache

  command.check_devices()
  preflight.check_model(settings)
  if is_worker():
    preflight.check_worker_costs(settings)
  compilation_cache.keep()


def is_worker() -> bool:
  """Returns whether this process trains: a worker, or the one process of a replay without roles."""
  return (FLAGS.role or 'worker') == 'worker'


def run(settings: settings_lib.Settings):
  """Works in a role, or in all of them without --role, for a replay, until the run is finished."""
  if not is_worker():
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # accelerators of this machine are the workers'
  watched = begin_role()
  with display.doing('loading JAX', tells=False, at_once=True):
    from dipaco_jax.islands import roles
    from dipaco_jax.reports import headline

  if FLAGS.role not in (None, *roles.ROLES):
    raise InputError(f'--role={FLAGS.role}: there are {", ".join(roles.ROLES)}')
  if FLAGS.backup and FLAGS.role != 'worker':
    raise InputError(f'--backup is for --role=worker, not for --role={FLAGS.role}')
  if FLAGS.only_prepare and (FLAGS.role != 'worker' or FLAGS.backup or FLAGS.distributed):
    raise InputError('--only_prepare is for one --role=worker: leave out --backup, --distributed and other roles')
  url = roles.check(FLAGS.registry, FLAGS.share) if FLAGS.role else ''
  roles.check_settings(settings)
  if not FLAGS.role:
    roles.check_sources(FLAGS.workdir, settings, FLAGS.replay)
  if FLAGS.distributed:
    processes.join(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
  check_machine(settings)
  place = roles.make_local_place(FLAGS.workdir) if not FLAGS.owner else roles.local_place(FLAGS.store or FLAGS.workdir)
  with contextlib.closing(profiling.Profiler(place, profiling.parse(FLAGS.profile))) as profiler:
    outcome = roles.run_role(_process(url, watched, profiler), settings)
  if outcome:
    lines = [f'{FLAGS.workdir}: finished', *headline.outcome(outcome), f'the report: {FLAGS.workdir}/report.html']
    lines += [supervision.next_of_owner(FLAGS.store, FLAGS.owner)] if FLAGS.owner else []
    print('\n'.join(lines))
    if not FLAGS.role and (problem := supervision.describe_differing(outcome)):
      command.fail(problem, 1)


def _process(url: str, metrics: Any, profiler: profiling.Profiler) -> Any:
  """Returns this process of an islands run, as the flags describe it."""
  from dipaco_jax.islands import roles

  return roles.Process(
    role=FLAGS.role or 'worker',
    workdir=FLAGS.workdir,
    lease_s=FLAGS.lease_s,
    url=url,
    name=FLAGS.name,
    share=FLAGS.share,
    is_backup=FLAGS.backup,
    only_prepares=FLAGS.only_prepare,
    resumes=not FLAGS.parent,  # a parent has resumed the run before it starts the first of many
    metrics=metrics,
    profiler=profiler,
    owner=FLAGS.owner,
    globs=tuple(FLAGS.data),
    store=FLAGS.store,
    replay=FLAGS.replay,
    has_all_roles=not FLAGS.role,
  )
