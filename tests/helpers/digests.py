"""One run by `launch/local.py`, by 1, 3 and 5 workers, in SQLite and PostgreSQL, in a folder and on S3: the same bits.

    python tests/helpers/digests.py [--config=configs/tiny.py] [--run=main --run=sqlite,folder,3 --run=postgresql,s3,5]

Without a config, one of seconds; without runs, seven. `main` is the run in one process: it rounds its sums elsewhere.
Prints a table, as it comes; ends with status 1 where the modules of islands differ, or a report lacks something that
main's has.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import backends
import tiny_run
from repository import ROOT

from dipaco_jax.storage import object_store

RUNS = [
  'main', 'sqlite,folder,1', 'sqlite,folder,3', 'sqlite,folder,5', 'postgresql,folder,3', 'sqlite,s3,3',
  'postgresql,s3,3',
]  # fmt: skip


def run(command: list[str], folder: pathlib.Path) -> str:
  """What it prints; it is stopped gently if we are, for it has children to stop. Raises CalledProcessError."""
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'TMPDIR': str(folder)}
  process = subprocess.Popen([sys.executable, *command], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  try:
    out, _ = process.communicate()
  except BaseException:
    process.terminate()
    process.wait()
    raise
  if process.returncode:
    raise subprocess.CalledProcessError(process.returncode, command)
  return out


def of_islands(config: pathlib.Path, folder: pathlib.Path, name: str) -> dict:
  """The report of a run, which is read from where it was left."""
  backend_name, _, workers = name.rpartition(',')
  with backends.opened(backend_name) as backend:
    workdir, url = backend.storage(folder / 'run'), backend.registry(folder)
    where = [f'--workdir={workdir}', f'--registry={url}']
    out = run(['launch/local.py', f'--config={config}', *where, f'--workers={workers}'], folder)
    print(run(['-m', 'dipaco_jax.status', *where], folder), file=sys.stderr)
    report = json.loads(bytes(object_store.open_storage(workdir).fetch('report.json')))
  assert f'perplexity {report["perplexity"]:.2f}' in out, out
  return report


def of_main(config: pathlib.Path, folder: pathlib.Path) -> dict:
  run(['-m', 'dipaco_jax.main', f'--config={config}', f'--workdir={folder / "run"}'], folder)
  return json.loads((folder / 'run' / 'report.json').read_text())


def show(name: str, report: dict, wall_s: float):
  print(f'| {name} | {report["modules_sha256"][:16]} | {report["perplexity"]:.4f} | {wall_s:.0f} |', flush=True)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', type=pathlib.Path, help='as for dipaco_jax.main')
  parser.add_argument('--run', action='append', help='main, or database,objects,workers; may be repeated')
  options = parser.parse_args()
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  print('| run | modules_sha256 | perplexity | s |\n|---|---|---|---|')
  reports: dict[str, dict] = {}
  for name in options.run or RUNS:
    with tempfile.TemporaryDirectory() as temporary:
      folder, began = pathlib.Path(temporary), time.monotonic()
      config = options.config or tiny_run.write_config(folder)
      reports[name] = of_main(config, folder) if name == 'main' else of_islands(config, folder, name)
    show(name, reports[name], time.monotonic() - began)
  expected = reports.pop('main', {})
  lacking = {name: sorted(expected.keys() - report.keys()) for name, report in reports.items()}
  digests = {report['modules_sha256'] for report in reports.values()}
  print(f'{len(digests)} digest{"s" * (len(digests) > 1)}; what reports lack: {lacking}')
  return 0 if len(digests) == 1 and not any(lacking.values()) else 1


if __name__ == '__main__':
  sys.exit(main())
