"""Writes launch/locks/DEVICE.txt: what the images install, with the sha256 of every file that may be installed.

    python launch/lock.py        needs uv; run it after constraints.txt or setup.cfg has changed

Versions are those of constraints.txt. The image has no compiler, so that all of it are wheels.
"""

import configparser
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parent.parent
EXTRAS = ('postgres', 's3', 'gcs')  # of every image
DEVICES = ('cpu', 'cuda', 'tpu')
PYTHON, PLATFORM = '3.12', 'x86_64-manylinux_2_31'  # of the base image in launch/Dockerfile
BUILD = 'setuptools>=77'  # that pyproject.toml names


def required(device: str) -> list[str]:
  """Returns what setup.cfg requires for an image, and what installs the package itself."""
  project = configparser.ConfigParser()
  project.read(ROOT / 'setup.cfg')
  extras = [*EXTRAS, *([device] if device != 'cpu' else [])]
  sections = [project['options']['install_requires'], *(project['options.extras_require'][name] for name in extras)]
  return [*(line for section in sections for line in section.split('\n') if line), BUILD]


def main():
  options = f'--no-header --no-annotate --generate-hashes --only-binary=:all: --python-version={PYTHON}'
  for device in DEVICES:
    file = ROOT / 'launch' / 'locks' / f'{device}.txt'
    call = ['uv', 'pip', 'compile', '-q', *options.split(), f'--python-platform={PLATFORM}', '-c', 'constraints.txt']
    subprocess.run([*call, '-o', file, '-'], cwd=ROOT, input='\n'.join(required(device)), text=True, check=True)


if __name__ == '__main__':
  main()
