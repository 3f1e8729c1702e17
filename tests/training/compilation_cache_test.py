"""Compiled programs are code: they are kept where only this user can write, and never in a workdir."""

import pathlib
import stat

import jax
import pytest

from dipaco_jax.training import compilation_cache


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
  """The user's cache, with nothing said about where JAX keeps programs."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
  with compilation_cache.set_back():
    jax.config.update(compilation_cache.FOLDER, None)
    yield tmp_path / 'home'


def test_programs_go_to_a_private_folder_of_the_user(cache_home):
  compilation_cache.keep()
  folder = pathlib.Path(getattr(jax.config, compilation_cache.FOLDER))
  assert folder == compilation_cache.user_folder() and folder.parent == cache_home / 'dipaco_jax'
  assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_folder_that_the_user_names_is_used(cache_home):
  jax.config.update(compilation_cache.FOLDER, '/somewhere/else')
  compilation_cache.keep()
  assert getattr(jax.config, compilation_cache.FOLDER) == '/somewhere/else' and not cache_home.exists()


def of_others(folder: pathlib.Path, monkeypatch):
  uid = folder.stat().st_uid + 1
  monkeypatch.setattr(compilation_cache.os, 'geteuid', lambda: uid)


def writable_by_the_group(folder: pathlib.Path, monkeypatch):
  folder.chmod(0o770)


def in_a_folder_of_everybody(folder: pathlib.Path, monkeypatch):
  folder.parent.chmod(0o777)


def a_file(folder: pathlib.Path, monkeypatch):
  folder.rmdir()
  folder.touch()


def inside_a_file(folder: pathlib.Path, monkeypatch):
  folder.rmdir()
  folder.parent.rmdir()
  folder.parent.touch()


@pytest.mark.parametrize('change', [of_others, writable_by_the_group, in_a_folder_of_everybody, a_file, inside_a_file])
def test_a_folder_that_others_can_write_into_is_not_used(change, monkeypatch, caplog):
  folder = compilation_cache.user_folder()
  folder.mkdir(parents=True)
  change(folder, monkeypatch)
  compilation_cache.keep()
  assert not getattr(jax.config, compilation_cache.FOLDER)
  [record] = caplog.records
  assert 'compiled programs are not cached' in record.message and str(folder.parent) in record.message


def test_a_folder_with_the_sticky_bit_may_be_above(cache_home):
  cache_home.mkdir()
  cache_home.chmod(0o1777)
  assert compilation_cache.make_private(compilation_cache.user_folder()) == ''


def test_no_file_of_the_package_keeps_programs_in_a_workdir():
  package = pathlib.Path(compilation_cache.__file__).parent.parent
  users = [file.name for file in package.rglob('*.py') if compilation_cache.FOLDER in file.read_text()]
  assert users == ['compilation_cache.py']
