"""setup.cfg has the minimum version and constraints.txt the exact version of each dependency."""

import configparser

from clone import tracked_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT


def required() -> list[Requirement]:
  """Of setup.cfg, in all extras."""
  config = configparser.ConfigParser()
  config.read(ROOT / 'setup.cfg')
  extras = config['options.extras_require'].values()
  return [Requirement(line) for words in (config['options']['install_requires'], *extras) for line in words.split()]


def pinned() -> dict[str, str]:
  lines = (ROOT / 'constraints.txt').read_text().splitlines()
  pins = [line.split('==') for line in lines if not line.startswith('#')]
  found = {canonicalize_name(name): version for name, version in pins}
  assert len(found) == len(pins)
  return found


def test_every_requirement_has_a_lower_bound():
  bounded = {r.name for r in required() if any(part.operator == '>=' for part in r.specifier)}
  assert not {r.name for r in required()} - bounded


def test_constraints_have_every_requirement_within_its_bounds():
  pins = pinned()
  assert not [str(r) for r in required() if not r.specifier.contains(pins.get(canonicalize_name(r.name), '0'))]


def test_what_a_requirement_needs_by_extra_is_pinned():
  assert {'jax-cuda12-plugin', 'libtpu', 'psycopg-binary', 'jaxlib', 'h11'} <= {*pinned()}


def test_wheels_take_the_files_that_are_not_python():
  config = configparser.ConfigParser()
  config.read(ROOT / 'setup.cfg')
  folders = {name: ROOT.joinpath(*name.split('.')) for name in config['options.package_data']}
  taken = {file for name, folder in folders.items() for file in folder.glob(config['options.package_data'][name])}
  needed = {ROOT / name for name in tracked_files() if name.startswith('dipaco_jax/')}
  assert not {file for file in needed if file.suffix != '.py' and file.name != 'configs'} - taken
