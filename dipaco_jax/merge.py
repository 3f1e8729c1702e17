"""Merges the paths of a run into one model, in a folder as Hugging Face's transformers has it.

Examples:

python -m dipaco_jax.merge --workdir=DIR --to=moe --out=DIR2                   a mixture of the paths' MLPs
python -m dipaco_jax.merge --workdir=DIR --to=moe --average=low --out=DIR2     the mean of a level's other parameters
python -m dipaco_jax.merge --workdir=DIR --to=dense --out=DIR2                 the mean of the paths

A merged model has to be trained for a while, first the routers of a mixture alone:

python -m dipaco_jax.main --config=upcycle:dense:DIR2 --workdir=DIR3 --config.inner.frozen='^(?!.*mlp/router)'
"""

import os
import pathlib
import shlex

from absl import flags

from dipaco_jax import export
from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display

ROUTERS_ALONE = '^(?!.*mlp/router)'


def _paths(run, named: list[str]) -> list[int]:
  """Returns the numbers of the paths to merge. Raises InputError if they are less than two, or one is named twice."""
  try:
    paths = [run.layout.grid.find(path) for path in named] or list(run.paths_here)
  except InputError as e:
    raise InputError(f'--paths={e}') from e
  if len({*paths}) < len(paths):
    raise InputError(f'--paths={",".join(named)} names a path twice')
  if len(paths) < 2:
    raise InputError('merging takes two paths or more; dipaco export writes a single one')
  return paths


def main():
  options = flags.FLAGS
  if not options.workdir or not options.out:
    raise InputError('name a run with --workdir=DIR, and where the merged model goes with --out=DIR')
  if not options.to:
    raise InputError('say what the paths become: --to=moe, a mixture of their MLPs, or --to=dense, their mean')
  if '://' in options.out:
    raise InputError(f'--out={options.out}: name a folder of this machine, and copy it from there')
  given = [name for name in ('average', 'experts_per_token', 'rows') if options[name].present]
  if given and options.to == 'dense':
    raise InputError(f'--{given[0]} is for --to=moe: --to=dense takes the mean of all levels')
  export.check_outside(options.workdir, options.out)
  command.quiet()
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  command.check_devices()
  from dipaco_jax.huggingface import config_json, model_folder
  from dipaco_jax.inference import merging, path_arrays
  from dipaco_jax.inference.trained_run import TrainedRun

  run, out = TrainedRun(options.workdir, needs_modules=False), pathlib.Path(options.out)
  if own := run.settings.model.block:
    raise InputError(
      f'config.model.block={own!r} has no counterpart in transformers: it cannot be merged into a folder'
    )
  export.check_tokenizer(run.settings)
  export.check_out(out)
  paths = _paths(run, options.paths)
  version = merging.newest_version(run) if options.version is None else options.version
  planned, model = merging.plan(run, paths), run.settings.model
  if options.to == 'moe':
    model = merging.mixed_model(run, planned, options.average, options.experts_per_token)
  family, _ = config_json.write(model, run.tokenizer.vocab_size, {})
  with display.doing('reading the paths', tells=False):
    if options.to == 'moe':
      params = merging.to_mixture(run, version, planned, options.rows)
    else:
      params = merging.mean(planned, merging.read_modules(run, version, planned))
  path_arrays.check(params, model, f'modules of version {version}')
  name = run.layout.grid.path_name
  about = {'merged': options.to, 'paths': [name(path) for path in paths], 'version': version}
  files = model_folder.make_files(params, model, run.tokenizer, options.dtype, about, run.max_positions)
  with display.doing('writing the model', tells=False):
    export.write(out.resolve(), files)
  what = f'a mixture of {model.num_experts} experts' if options.to == 'moe' else 'the mean'
  print(f'{out}: {what} of {len(paths)} paths at version {version}, as {family.title}')
  train = (
    f'python -m dipaco_jax.main --config={shlex.quote(f"upcycle:dense:{out}")} --workdir=DIR --config.data.train=TEXT'
  )
  print(f'train it   {train}' + (f" --config.inner.frozen='{ROUTERS_ALONE}'" if options.to == 'moe' else ''))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_enum('to', None, ['moe', 'dense'], 'What the paths become: a mixture of experts, or their mean.')
  flags.DEFINE_list('paths', [], 'Paths to merge, by number or name. By default, all.')
  flags.DEFINE_list('average', [], 'Levels whose modules are averaged in all but their MLPs, with --to=moe.')
  flags.DEFINE_integer(
    'experts_per_token',
    0,
    'Number of experts that a token passes through, with --to=moe. By default, 2, or that of paths which are mixtures.',
  )
  flags.DEFINE_integer('rows', 64, "Rows of each path's shard that its experts' routers are made from.", lower_bound=1)
  flags.DEFINE_string('out', None, 'Folder to write to.')
  flags.DEFINE_integer('version', None, 'Version of the modules. By default, the newest.')
  flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Dtype of the weights.')
  command.run(main)
