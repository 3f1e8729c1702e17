"""The line that the workers of a running islands run need, for `status`: by what their facts have measured."""

import math

from dipaco_jax.islands import run_costs
from dipaco_jax.islands.island import Island
from dipaco_jax.planning import wire_needs

RECENT = 2  # phases, whose steps tell how long a step takes


def lines(island: Island) -> list[str]:
  """Returns a line for people; [] before a step is timed, or where paths exchange nothing."""
  newest = max(island.registry.newest('checkpoint').values(), default=0)
  step_s, traffic = measured_step_s(island, newest), wire_needs.make_traffic(island.run.settings)
  workers = [role['about'] for role in island.registry.workers()]
  if not step_s or not traffic.groups or not workers:
    return []
  paths = math.ceil(island.active_paths(newest).sum() / len(workers))
  needed = wire_needs.speed(wire_needs.line_bytes_per_s(traffic, step_s, paths) * 8 / 1e6)
  each = f'{paths} path{"s" * (paths > 1)} each, {step_s:.3g} s a step, latency not counted'
  what = f'bandwidth that each worker needs to spend {wire_needs.TARGET:.0%} of its time in inner steps'
  about = 'about ' if paths > 1 else ''
  return [f'{what}: {about}{needed} each way ({each}){done(workers)}']


def measured_step_s(island: Island, newest: int) -> float:
  """Returns the mean seconds of an inner step in the phases up to the newest, or 0 if none is timed."""
  recent = island.registry.facts('checkpoint', at_least=newest - RECENT + 1)
  metas = [fact.meta for fact in recent if fact.meta.get('timed_steps')]
  return math.fsum(meta['timed_s'] for meta in metas) / sum(meta['timed_steps'] for meta in metas) if metas else 0.0


def done(workers: list[dict]) -> str:
  """Describes the throughput of workers while they read and wrote; '' if it is not known."""
  speeds = []
  for way, seconds, verb in (('in', 'reading_s', 'reading'), ('out', 'writing_s', 'writing')):
    reporting = [about for about in workers if seconds in about]
    moved = (math.fsum(about[name] for about in reporting) for name in (f'bytes_{way}', seconds))
    if (speed := run_costs.mbits(*moved)) is not None:
      speeds.append(f'{wire_needs.speed(speed)} {verb}')
  return f'; so far theirs did {" and ".join(speeds)}' if speeds else ''
