"""Machines that reach nothing but one port of a hub: network namespaces, each with folders that no other can see."""

import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence
from typing import Self

HUB = '10.77.0.1'
HIDDEN = 'for folder in {others}; do mount -t tmpfs none "$folder" || exit 1; done; exec "$@"'


def ip(*words: str):
  subprocess.run(['ip', *words], check=True, capture_output=True, text=True)


def missing() -> str:
  """Says what is missing for namespaces here; '' if nothing is."""
  if not shutil.which('ip'):
    return 'ip is not installed: it is part of iproute2'
  try:
    with Machines(pathlib.Path(os.devnull), ['a'], 8443):
      return ''
  except subprocess.CalledProcessError as e:
    return f'no network namespaces here, which root has on Linux: {e.stderr.strip()}'


class Machines:
  """The hub's machine and others, by name; `folder` has a folder of each."""

  def __init__(self, folder: pathlib.Path, names: Sequence[str], port: int):
    self.folder, self.names, self.port = folder, ['hub', *names], port

  def namespace(self, name: str) -> str:
    return f'dj{os.getpid()}{name}'

  def __enter__(self) -> Self:
    try:
      for i, name in enumerate(self.names):
        ip('netns', 'add', self.namespace(name))
        ip('-n', self.namespace(name), 'link', 'set', 'lo', 'up')
        if i:
          self.connect(i - 1, self.namespace(name))
    except BaseException:
      self.__exit__()
      raise
    return self

  def connect(self, i: int, name: str):
    """Makes a line from the hub to another machine, which has a route to one port of the hub and no other."""
    hub = self.namespace('hub')
    ip('-n', hub, 'link', 'add', f'to{i}', 'type', 'veth', 'peer', 'name', 'out', 'netns', name)
    for namespace, device, last in ((hub, f'to{i}', 1), (name, 'out', 2)):
      ip('-n', namespace, 'address', 'add', f'10.77.{i}.{last}/30', 'dev', device)
      ip('-n', namespace, 'link', 'set', device, 'up')
    if i:
      ip('-n', name, 'route', 'add', HUB, 'via', f'10.77.{i}.1')
    ip('-n', name, 'rule', 'add', 'pref', '10', 'to', HUB, 'ipproto', 'tcp', 'dport', str(self.port), 'lookup', 'main')
    for rule in ('32766', '32767'):  # the routes for all else
      ip('-n', name, 'rule', 'del', 'pref', rule)

  def inside(self, name: str) -> list[str]:
    """The command that runs another one on a machine, without the folders of the others."""
    others = ' '.join(str(self.folder / other) for other in self.names if other != name)
    return ['ip', 'netns', 'exec', self.namespace(name), 'sh', '-c', HIDDEN.format(others=others), 'sh']

  def __exit__(self, *_):
    for name in self.names:
      subprocess.run(['ip', 'netns', 'delete', self.namespace(name)], capture_output=True)
