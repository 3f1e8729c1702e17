"""Exports paths of a run for other libraries, each to a folder as Hugging Face's transformers has its family.

Examples:

python -m dipaco_jax.export --workdir=DIR --path=3 --out=DIR2       one path, by its number or coordinates (1,0)
python -m dipaco_jax.export --workdir=DIR --all --out=DIR2          every path, in DIR2/0, DIR2/1, ...
python -m dipaco_jax.export --workdir=DIR --base --out=DIR2         the base that the paths started from
"""

import functools
import os
import pathlib

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display


def check_tokenizer(s: settings.Settings):
  """Raises InputError if the tokenizer is the user's own."""
  if extension.is_reference(kind := s.tokenizer.kind):
    raise InputError(f'config.tokenizer.kind={kind!r} is code of your own: no other program could read such an export')


def check_outside(workdir: str, out: str):
  """Raises InputError if the place is in the workdir of the run, where its files would be among the run's."""
  if '://' in workdir:
    return
  if pathlib.Path(out).resolve().is_relative_to(pathlib.Path(workdir).resolve()):
    raise InputError(f'--out={out} is in --workdir={workdir}, among the files of the run: name a folder outside of it')


def check_out(out: pathlib.Path):
  """Raises InputError if the place exists and is not an export of this program."""
  from dipaco_jax.huggingface import model_folder

  if not out.exists() and not out.is_symlink():
    return
  config = out / 'config.json'
  empty = out.is_dir() and not any(out.iterdir())
  if not empty and not (config.is_file() and model_folder.is_our_config(config.read_bytes())):
    raise InputError(f'--out={out} is not empty and not an export: name another folder, or remove what is there')


def export(run, number: int, version: int, out: pathlib.Path, dtype: str) -> int:
  """Writes a path's folder atomically, replacing an existing export; returns the version.

  Raises InputError.
  """
  from dipaco_jax.storage import seals

  with seals.parsing('report.json', 'stages/pretrain.json'):
    files = _make_files(run, number, version, dtype)
  write(out, files)
  return version


def _make_files(run, number: int, version: int, dtype: str) -> dict[str, bytes]:
  """Returns {name: content} of a path's folder."""
  from dipaco_jax.data import tokenizer_files
  from dipaco_jax.huggingface import config_json, model_folder
  from dipaco_jax.reports import model_card

  module_files = run.module_files(number, version)
  params = {name: x for file in module_files.values() for name, x in run.finite_arrays(*file).items()}
  run.check_parameters(params, f'modules of path {number}, version {version}')
  modules = {level: name.removesuffix('.safetensors') for level, (name, _) in module_files.items()}
  facts = model_card.Facts(
    settings=run.settings,
    number=number,
    coordinates=run.layout.grid.coordinates(number),
    version=version,
    modules=modules,
    # 'phases' is None in a report that was written before training ended.
    measured=run.best_versions[number] == version and version <= (run.report.get('phases') or 0),
    report=run.report,
    dtype=dtype,
    parameters=sum(x.size for x in params.values()),
    family=config_json.write(run.settings.model, len(params['embed/tokens']), {})[0],
    adds_bos=run.tokenizer.bos_id >= 0,
    has_pieces=tokenizer_files.MODEL in run.tokenizer.files,
    origin=run.origin,
  )
  named = {level: {'name': modules[level], 'sha256': sha256} for level, (_, sha256) in module_files.items()}
  about = {'path': number, 'coordinates': list(facts.coordinates), 'version': version, 'modules': named}
  files = model_folder.make_files(params, run.settings.model, run.tokenizer, dtype, about, run.max_positions)
  files['README.md'] = model_card.render(facts).encode()
  return files


def export_base(run, out: pathlib.Path, dtype: str):
  """Writes the folder of the base. Raises InputError."""
  from dipaco_jax.huggingface import model_folder

  about = {'base': True}
  write(out, model_folder.make_files(run.base, run.settings.model, run.tokenizer, dtype, about, run.max_positions))


def write(out: pathlib.Path, files: dict[str, bytes]):
  """Writes a folder, whole or not at all. Raises InputError."""
  from dipaco_jax.storage import publishing

  try:
    with publishing.publish_directory(out, sealed=False) as aside:
      for name, data in files.items():
        (aside / name).write_bytes(data)
  except OSError as e:
    raise InputError(f'--out={out}: {e.strerror}; name a folder that can be made and written') from e


def main():
  options = flags.FLAGS
  if not options.workdir or not options.out:
    raise InputError('name a run with --workdir=DIR, and where its paths go with --out=DIR')
  if (options.path is not None) + options.all + options.base != 1:
    raise InputError('name one path with --path=3, all of them with --all, or the base with --base, one of these')
  if options.base and options.version is not None:
    raise InputError('--version is of paths: the base has one')
  if '://' in options.out:
    raise InputError(f'--out={options.out}: name a folder of this machine, and copy it from there')
  check_outside(options.workdir, options.out)
  command.quiet()
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # nothing is computed: a device that a server holds is not needed
  command.check_devices()
  from dipaco_jax.inference.trained_run import TrainedRun

  run, out = TrainedRun(options.workdir, needs_modules=False), pathlib.Path(options.out)
  if own := run.settings.model.block:
    use = f'serve it with `python -m dipaco_jax.serve --workdir={options.workdir}`, or use it by dipaco_jax.load'
    raise InputError(f'config.model.block={own!r} has no counterpart in transformers: {use}')
  check_tokenizer(run.settings)
  if options.base:
    check_out(out)
    with display.doing('writing the base', tells=False):
      export_base(run, out.resolve(), options.dtype)
    print(f'{out}: the base')
    return
  numbers = range(run.layout.grid.num_paths) if options.all else [run.number(options.path)]
  name = run.layout.grid.path_name
  folders = {number: out / name(number) if options.all else out for number in numbers}
  for folder in folders.values():
    check_out(folder)
  for number, folder in folders.items():
    to = folder.resolve()  # a link stays a link
    of = functools.partial(export, run, number, out=to, dtype=options.dtype)
    with display.doing(f'writing path {name(number)}', tells=False):
      version = run.at_version(number, options.version, of)
    print(f'{folder}: path {name(number)} at version {version}')


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_string('path', None, 'Path to export, by its number, its name or its coordinates, such as 1,0.')
  flags.DEFINE_bool('all', False, 'Whether to export all paths, each to its own folder below --out.')
  flags.DEFINE_bool('base', False, 'Whether to export the base model, from which all paths started.')
  flags.DEFINE_string('out', None, 'Folder to write to.')
  flags.DEFINE_integer(
    'version', None, 'Version of the modules. By default, the version that early stopping chose for each path.'
  )
  flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Dtype of the exported weights; they are trained in float32.'
  )
  command.run(main)
