"""The figures of a dry run, for people: of one topology in full, of several as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from dipaco_jax.planning import wire_needs
from dipaco_jax.training.display import columns
from dipaco_jax.training.performance import GIB

LINKS = {'data': 'inside paths', 'grid': 'across the grid', 'dcn': 'from slice to slice'}


def parameters_to_text(counts: Mapping[str, int]) -> str:
  """Returns a line with the number of parameters of one path and of all modules."""
  return f'parameters     {counts["parameters_path"]:,} of a path, {counts["parameters_total"]:,} of all modules'


def to_text(found: dict[str, Any]) -> str:
  """Returns the figures as a table for people."""

  lines = [
    f'topology       {found["topology"]}: {found["chips"]} chips, {found["chips_per_path"]} to a path, '
    f'{found["paths_in_turn"]} paths in turn on each',
    f'HBM a chip     {_gib(found["hbm_bytes_per_chip"])} of {_gib(found["hbm_capacity_bytes"])}: '
    f'{"fits" if found["fits"] else "does not fit"}',
  ]
  lines += [f'  {name:28} {_gib(size)}' for name, size in found.get('hbm_bytes_by_kind', {}).items()]
  if not found['fits']:
    lines.append(f'what would fit: {found["what_fits"] or "a topology with more chips, so that a path has more"}')
  if 'step_s_low' not in found:
    return '\n'.join([*lines, *wire_needs.to_text(found)])
  lines += [
    f'collectives    of an inner step: {_sent(found, "steps")}',
    f'               of an outer step: {_sent(found, "outer")}',
  ]
  if (between := found.get('slices_bytes_per_phase')) is not None:
    lines.append(f'between slices {between / 1e6:,.1f} MB a phase, of all chips together, as float32')
  if base := found.get('pretrain'):
    lines += [
      f'pretraining    on {base["chips"]} chips: {_gib(base["hbm_bytes_per_chip"])} a chip; '
      f'a step {base["step_s_low"]:.3g} to {base["step_s_high"]:.3g} s; '
      f'MFU {base["mfu_low"]:.0%} to {base["mfu_high"]:.0%}',
      f'               collectives of an inner step: {_sent(base, "steps")}',
    ]
  lines += [
    f'a step         {found["flops_per_step"]:.3g} FLOPs of a path; {found["step_s_low"]:.3g} to '
    f'{found["step_s_high"]:.3g} s',
    f'MFU            {found["mfu_low"]:.0%} to {found["mfu_high"]:.0%}; at least {found["tokens_per_s"]:,.0f} tokens/s',
    f'outer step     {found["outer_bytes_per_chip"] / 1e6:,.1f} MB a chip, {found["outer_s"]:.3f} s',
    f'whole run      {found["hours_low"]:,.1f} to {found["hours"]:,.1f} hours; {found["chip_hours"]:,.0f} chip hours',
    *wire_needs.to_text(found),
  ]
  return '\n'.join(lines)


def _gib(num_bytes: float) -> str:
  return f'{num_bytes / GIB:.2f} GiB'


def _sent(found: dict[str, Any], name: str) -> str:
  """Says what collectives of a program send."""
  counts, sizes = found[f'{name}_collectives'], found[f'{name}_collective_bytes']
  return ', '.join(f'{counts[link]} {words}, {sizes[link] / 1e6:,.1f} MB' for link, words in LINKS.items())


def to_table(found: Sequence[dict[str, Any]]) -> str:
  """Returns a line of figures for each topology."""
  rows = [('topology', 'HBM a chip', 'a step', 'MFU', 'outer step', 'whole run', 'at most')]
  for one in found:
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
