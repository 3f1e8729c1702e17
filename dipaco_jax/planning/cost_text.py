"""Text with the figures of a dry run: in full for one topology, as a table for several."""

from collections.abc import Mapping, Sequence
from typing import Any

from dipaco_jax.planning import wire_needs
from dipaco_jax.processes.display import columns
from dipaco_jax.telemetry.performance import GIB

LINKS = {'data': 'inside paths', 'grid': 'across the grid', 'dcn': 'from slice to slice'}


def parameters_to_text(counts: Mapping[str, int]) -> str:
  """Returns a line with the number of parameters of one path and of all modules."""
  return f'parameters     {counts["parameters_path"]:,} of a path, {counts["parameters_total"]:,} of all modules'


def to_text(estimate: dict[str, Any]) -> str:
  """Returns the figures as a table for people."""

  lines = [
    f'topology       {estimate["topology"]}: {estimate["chips"]} chips, {estimate["chips_per_path"]} to a path, '
    f'{estimate["paths_in_turn"]} paths in turn on each',
    f'HBM a chip     {_gib(estimate["hbm_bytes_per_chip"])} of {_gib(estimate["hbm_capacity_bytes"])}: '
    f'{"fits" if estimate["fits"] else "does not fit"}',
  ]
  lines += [f'  {name:28} {_gib(size)}' for name, size in estimate.get('hbm_bytes_by_kind', {}).items()]
  if not estimate['fits']:
    lines.append(f'what would fit: {estimate["what_fits"] or "a topology with more chips, so that a path has more"}')
  if 'step_s_low' not in estimate:
    return '\n'.join([*lines, *wire_needs.to_text(estimate)])
  lines += [
    f'collectives    of an inner step: {_sent(estimate, "steps")}',
    f'               of an outer step: {_sent(estimate, "outer")}',
  ]
  if (between := estimate.get('slices_bytes_per_phase')) is not None:
    lines.append(f'between slices {between / 1e6:,.1f} MB a phase, of all chips together, as float32')
  if base := estimate.get('pretrain'):
    lines += [
      f'pretraining    on {base["chips"]} chips: {_gib(base["hbm_bytes_per_chip"])} a chip; '
      f'a step {base["step_s_low"]:.3g} to {base["step_s_high"]:.3g} s; '
      f'MFU {base["mfu_low"]:.0%} to {base["mfu_high"]:.0%}',
      f'               collectives of an inner step: {_sent(base, "steps")}',
    ]
  lines += [
    f'a step         {estimate["flops_per_step"]:.3g} FLOPs of a path; {estimate["step_s_low"]:.3g} to '
    f'{estimate["step_s_high"]:.3g} s',
    f'MFU            {estimate["mfu_low"]:.0%} to {estimate["mfu_high"]:.0%}; at least '
    f'{estimate["tokens_per_s"]:,.0f} tokens/s',
    f'outer step     {estimate["outer_bytes_per_chip"] / 1e6:,.1f} MB a chip, {estimate["outer_s"]:.3f} s',
    f'whole run      {estimate["hours_low"]:,.1f} to {estimate["hours"]:,.1f} hours; '
    f'{estimate["chip_hours"]:,.0f} chip hours',
    *wire_needs.to_text(estimate),
  ]
  return '\n'.join(lines)


def _gib(num_bytes: float) -> str:
  return f'{num_bytes / GIB:.2f} GiB'


def _sent(estimate: dict[str, Any], name: str) -> str:
  """Says what collectives of a program send."""
  counts, sizes = estimate[f'{name}_collectives'], estimate[f'{name}_collective_bytes']
  return ', '.join(f'{counts[link]} {link_name}, {sizes[link] / 1e6:,.1f} MB' for link, link_name in LINKS.items())


def to_table(estimates: Sequence[dict[str, Any]]) -> str:
  """Returns a line of figures for each topology."""
  rows = [('topology', 'HBM a chip', 'a step', 'MFU', 'outer step', 'whole run', 'at most')]
  for one in estimates:
    used = f'{_gib(one["hbm_bytes_per_chip"])} of {_gib(one["hbm_capacity_bytes"])}'
    if 'step_s_low' not in one:
      rows.append((one['topology'], f'{used}: does not fit', '', '', '', '', ''))
      continue
    rows.append((
      one['topology'],
      used if one['fits'] else f'{used}: does not fit',
      f'{one["step_s_low"]:.3g} to {one["step_s_high"]:.3g} s',
      f'{one["mfu_low"]:.0%} to {one["mfu_high"]:.0%}',
      f'{one["outer_bytes_per_chip"] / 1e6:,.1f} MB',
      f'{one["hours_low"]:,.1f} to {one["hours"]:,.1f} hours',
      f'{one["chip_hours"]:,.0f} chip hours',
    ))  # fmt: skip
  return '\n'.join(columns(rows))
