"""Damaged files: each is named in a line by the commands that read it, and never gives another result in silence.

Here is a selection, for the commands that only read. One of ten cases is given to `main` too, which makes things again,
with --slow; all of them by hand, see damage.py.
"""

import pathlib
import subprocess
import sys

import damage
import pytest
import slow
import tiny_run

from dipaco_jax.storage import module_store

CASES = [
  ('config.json', damage.halve, 'status'), ('config.json', damage.OTHER_JSON[2], 'generate'),
  ('stages/train.json', damage.flip, 'status'), ('stages/evaluate.json', damage.OTHER_JSON[2], 'status'),
  ('stages/route.json', damage.empty, 'status'), ('stages/tokenize.json', damage.randomize, 'status'),
  ('paths/best.json', damage.OTHER_JSON[1], 'generate'), ('paths/best.json', damage.flip, 'export'),
  ('base/params.safetensors', damage.flip, 'inspect'), ('base/params.safetensors', damage.remove, 'inspect'),
  ('routing/0/router.safetensors', damage.flip, 'inspect'), ('routing/0/SHA256SUMS', damage.empty, 'inspect'),
  ('tokenizer.model', damage.flip, 'generate'), ('tokenizer.model.sha256', damage.halve, 'export'),
  ('modules/BEST/index-0.json', damage.halve, 'export'),
  ('modules/BEST/ends/shared.safetensors', damage.empty, 'export'),
  ('report.json', damage.flip, 'export'),
]  # fmt: skip


@pytest.mark.parametrize('name, how, reader', CASES, ids=[f'{name}-{how.__name__}' for name, how, _ in CASES])
def test_what_only_reads_names_the_file(name, how, reader, undisturbed, tmp_path):
  damage.copy(undisturbed, tmp_path / 'run')
  name = name.replace('BEST', str(module_store.best_versions(undisturbed)[0]))
  how(tmp_path / 'run' / name)
  said = damage.caught(lambda: damage.READERS[reader](tmp_path / 'run'))
  assert said.status == 2, said
  assert not damage.wrong(said, None, tmp_path / 'run', name)
  damage.follow(said, tmp_path / 'run')


@pytest.fixture(scope='module')
def lengthened(tmp_path_factory) -> pathlib.Path:
  """A run whose cosine does not follow its phases, so that a phase more is what it would have been."""
  folder = tmp_path_factory.mktemp('lengthened')
  tiny_run.run(tiny_run.write_config(folder), folder / 'run', damage.DECAY, own_cache=True)
  return folder


NAMES = [how.__name__ for how in (*damage.DAMAGES, *damage.OTHER_JSON)]


@pytest.mark.parametrize('how', slow.but(NAMES, *NAMES))
def test_advice_leads_to_the_same_modules(how, lengthened):
  command = [sys.executable, damage.__file__, f'--config={lengthened}/config.py', f'--workdir={lengthened}/run']
  done = subprocess.run([*command, f'--damages={how}', '--every=10'], capture_output=True, text=True, timeout=1800)
  assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
