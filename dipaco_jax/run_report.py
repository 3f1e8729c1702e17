"""The report of a run: report.json, report.html and plots/*.png, from what is in its workdir."""

import importlib.metadata
import pathlib
import platform
from typing import Any

import dipaco_jax
from dipaco_jax import grid as grids
from dipaco_jax import settings

EVALUATE = (
  'perplexity perplexity_interval perplexity_final perplexity_by_path perplexity_by_domain base_perplexity '
  'base_perplexity_interval base_perplexity_by_path base_perplexity_by_domain control_perplexity '
  'control_perplexity_interval control_perplexity_by_path control_perplexity_by_domain ratio_to_base '
  'ratio_to_base_interval ratio_to_control ratio_to_control_interval control_tokens validation_documents '
  'validation_tokens validation_tokens_by_path bits_per_byte base_bits_per_byte reroute mixture'
).split()
TRAIN = (
  'phases steps train_tokens paths parameters_path parameters_total train_flops tokens_per_s model_flops_utilization '
  'step_s outer_s outer_fraction outer_bytes_per_phase synchronous_bytes_per_phase peak_memory_bytes compilations '
  'goodput modules_sha256 island_bytes'
).split()
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


def build(workdir: str | pathlib.Path) -> dict[str, Any]:
  """What report.json holds: figures as measured, None where a stage that measures them is not complete.

  Raises:
    ValueError: there is no run in workdir, or none of its stages is complete.
  """
  from dipaco_jax import failures, history

  workdir = pathlib.Path(workdir)
  s, stages = history.read_settings(workdir), history.read_stages(workdir)
  if not stages:
    raise ValueError(f'--workdir={workdir}: no stage of this run is complete yet; run status on it, and report later')
  results = history.read_results(workdir)
  pretrain, route, train, evaluate = (results.get(name, {}) for name in ('pretrain', 'route', 'train', 'evaluate'))
  report = {name: evaluate.get(name) for name in EVALUATE} | {name: train.get(name) for name in TRAIN}
  failed = failures.read(workdir)
  return report | {
    'excluded': failed.excluded,
    'skipped_steps': sum(failed.skipped.values()),
    'paths': grids.Grid(s.grid).num_paths,
    'held_back': results.get('tokenize', {}).get('held_back'),
    'pretrain_steps': pretrain.get('steps'),
    'pretrain_tokens': pretrain.get('tokens'),
    'domain_nmi': route.get('domain_nmi'),
    'router_accuracy': route.get('calibrated_accuracy', route.get('accuracy')),
    'wall_s': _wall_s(stages),
    'config_sha256': settings.digest(s),
    'versions': versions(),
  }


def _wall_s(stages: dict[str, dict[str, Any]]) -> dict[str, float]:
  """Seconds by stage; those of the dense control, which is trained before it is evaluated, by themselves."""
  found = {name: stage['wall_s'] for name, stage in stages.items()}
  control_s = stages.get('evaluate', {}).get('result', {}).get('control_s')
  if control_s is not None:
    found |= {'control': control_s, 'evaluate': max(0.0, found['evaluate'] - control_s)}
  return found


def versions() -> dict[str, str]:
  """Of what computes: Python, this package and the libraries under it."""
  found = {'python': platform.python_version(), 'dipaco_jax': dipaco_jax.__version__}
  return found | {name.removesuffix('-checkpoint'): importlib.metadata.version(name) for name in PACKAGES}


def write(workdir: str | pathlib.Path) -> dict[str, Any]:
  """Writes report.json, report.html and plots/*.png into the workdir; returns what report.json holds."""
  from dipaco_jax import checkpoint, drawing, pictures, report_page

  workdir = pathlib.Path(workdir)
  report = build(workdir)
  checkpoint.write_json(workdir / 'report.json', report)
  run = _read_run(workdir, report)
  found = pictures.make(run)
  for name, picture in found.items():
    with drawing.left_out(name):
      checkpoint.write_file(workdir / 'plots' / f'{name}.png', drawing.to_png(picture.figure))
  checkpoint.write_file(workdir / 'report.html', report_page.make(run, found))
  return report


def _read_run(workdir: pathlib.Path, report: dict[str, Any]):
  from dipaco_jax import checkpoint, drift, history, pictures

  s = history.read_settings(workdir)
  grid = grids.Grid(s.grid)
  levels = grids.make_levels(grid, s.levels)
  published = checkpoint.versions(workdir)
  return pictures.Run(
    workdir,
    s,
    grid,
    levels,
    history.read_results(workdir),
    report,
    history.read(workdir, grid.num_paths),
    drift.measure(workdir, published[-1], grid, levels) if published else [],
  )
