"""Runs tasks of the LM Evaluation Harness on a run, each text by the path that its beginning chooses.

    python -m dipaco_jax.harness --workdir=DIR --tasks=hellaswag,arc_easy        by the router
    python -m dipaco_jax.harness --workdir=DIR --tasks=mine --include_path=DIR2  a task of your own

Programs that call the harness themselves find the model in `dipaco_jax.inference.lm_eval_model`.
"""

import json
import pathlib

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError


def main():
  f = flags.FLAGS
  if not f.workdir or not f.tasks:
    raise InputError('name a run with --workdir=DIR, and tasks with --tasks=NAME,NAME')
  if f.limit is not None and not f.limit > 0:
    raise InputError(f'--limit={f.limit:g} should be above 0; leave it out for all documents')
  command.check_out('out', f.out)
  command.quiet()
  from dipaco_jax.inference import lm_eval_tasks

  try:
    lm_eval_tasks.go_offline_if_unreachable()
    import lm_eval
    from lm_eval.utils import make_table
  except ImportError as e:
    raise InputError(f'the harness is not installed ({e}): pip install "dipaco_jax[harness]"') from e
  from dipaco_jax.inference import lm_eval_model
  from dipaco_jax.processes import display
  from dipaco_jax.storage import files

  command.check_devices()
  with display.doing('loading the tasks'):
    tasks, manager = lm_eval_tasks.load_tasks(f.tasks, f.include_path)
  path = f.path
  model = lm_eval_model.Dipaco(f.workdir, path, f.version, f.batch_size, f.trust_modules)
  options = {'num_fewshot': f.num_fewshot, 'limit': f.limit, 'task_manager': manager, 'log_samples': False}
  results = lm_eval.simple_evaluate(model=model, tasks=tasks, **options)
  print(make_table(results))
  if f.out:
    files.write_file(pathlib.Path(f.out), json.dumps(results['results'], indent=1, default=str) + '\n')


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_list('tasks', [], 'Names of tasks of the harness, separated by commas.')
  command.define_trust()
  flags.DEFINE_string('include_path', None, 'Folder with additional tasks in YAML.')
  flags.DEFINE_string(
    'path',
    None,
    'Path for all texts, as a number such as 3, a name or coordinates such as 1,0. By default, the router chooses.',
  )
  flags.DEFINE_integer(
    'version', None, 'Version of the modules. By default, the version that early stopping chose for each path.'
  )
  flags.DEFINE_integer('batch_size', 8, 'Number of rows in a batch.', lower_bound=1)
  flags.DEFINE_integer(
    'num_fewshot', None, 'Number of examples before each question. By default, the number that the task specifies.'
  )
  flags.DEFINE_float(
    'limit', None, 'Maximum number of documents per task or, if below 1, the fraction of its documents.'
  )
  flags.DEFINE_string('out', None, 'JSON file to write the results to.')
  command.run(main)
