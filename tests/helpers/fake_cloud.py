"""Around launch/tpu_vm.sh, the real one: a recorder for gcloud, and what runs on its hosts, which are folders."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Collection

import fake_gcloud
import psutil
import pytest
import tiny_run
from repository import ROOT

SCRIPT = ROOT / 'launch' / 'tpu_vm.sh'
# Bash cannot trap what it was started to ignore, as background jobs are.
LISTENING = 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])'
TPU = ['--name=one', '--zone=us-west4-a', '--topology=v5e:2x4', '--project=mine', '--pause_s=0']
PROGRAM = ['--config=configs/tiny.py', '--workdir=/mnt/mine/runs/one']
RUN = ['run', *TPU, '--', *PROGRAM]
PYTHON3 = """#!/bin/sh
echo "$*" >> "$FAKE_CLOUD/python3"
case "$*" in *' venv '*) mkdir -p .venv/bin && cp "$FAKE_CLOUD/program" .venv/bin/python ;; esac
"""
DISK = '/dev/disk/by-id/google-persistent-disk-1'
# The disk is a file, which really is looked at.
SUDO = f"""#!/bin/bash
disk={DISK}
echo "$*" >> "$FAKE_CLOUD/sudo"
case $1 in
  cmp) exec "${{@/$disk/$FAKE_CLOUD/disk}}" ;;
  mkfs.ext4) echo ext4 > "$FAKE_CLOUD/disk" ;;
  mount) [[ $2 != $disk ]] || grep -q ext4 "$FAKE_CLOUD/disk" || {{ echo 'wrong fs type' >&2; exit 32; }} ;;
esac
"""
# In the place of Python: `ends` says with which status, or that it runs until somebody stops it.
STUB = """#!/bin/bash
printf '%s\\0' "$@" > "$HOME/arguments"
echo begun >> "$FAKE_CLOUD/begun"
trap 'echo saved >> "$FAKE_CLOUD/saved"; exit 143' TERM
while [[ $(< "$FAKE_CLOUD/ends") == never ]]; do sleep 0.05; done
echo finished
exit "$(< "$FAKE_CLOUD/ends")"
"""


class Cloud:
  """A fake one in a folder, and the script beside it."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.put('bin/gcloud', f'#!/bin/sh\nexec {sys.executable} -ISB {fake_gcloud.__file__} "$@"\n')
    self.put('host_bin/python3', PYTHON3)
    self.put('host_bin/sudo', SUDO)
    self.put('host_bin/mountpoint', '#!/bin/sh\nexit 1\n')
    self.put('program', STUB)
    self.put('coming', 'ACTIVE')
    self.put('ends', '0')
    self.env = os.environ | {'FAKE_CLOUD': str(folder), 'PATH': f'{folder}/bin:{os.environ["PATH"]}'}

  def put(self, name: str, text: str):
    file = self.folder / name
    file.parent.mkdir(exist_ok=True)
    aside = file.with_suffix('.new')
    aside.write_text(text)
    aside.chmod(0o755)
    aside.replace(file)  # others may look at it just now

  def lines(self, name: str) -> list[str]:
    file = self.folder / name
    return file.read_text().splitlines() if file.exists() else []

  def calls(self, *words: str) -> list[list[str]]:
    """Of gcloud, those that have these words."""
    return [call for call in map(json.loads, self.lines('calls')) if set(words) <= set(call)]

  def verbs(self) -> list[str]:
    return [call[3] for call in self.calls() if call[3] != 'describe']

  def start(self, *args: str) -> subprocess.Popen:
    """As from a terminal, where Ctrl-C goes to all processes of the foreground."""
    return subprocess.Popen(
      [sys.executable, '-ISc', LISTENING, SCRIPT, *args],
      env=self.env,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,
    )

  def __call__(self, *args: str, status: int = 0) -> tuple[str, str]:
    return ended(self.start(*args), status)

  def installed(self, *options: str):
    self('create', *TPU, *options)
    self('install', *TPU, *options)
    (self.folder / 'calls').unlink()
    return self

  def processes(self, name: str = '') -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
      with contextlib.suppress(psutil.Error):
        if process.environ().get('FAKE_CLOUD') == str(self.folder) and name in process.name():
          found.append(process)
    return found

  def kill(self, but: Collection[int] = ()):
    """All processes but those of some sessions."""
    for process in self.processes():
      with contextlib.suppress(psutil.Error, ProcessLookupError):
        if os.getsid(process.pid) not in but:
          process.kill()

  def jobs(self) -> list[int]:
    """Sessions of the programs on hosts."""
    return [int(file.read_text()) for file in self.folder.glob('hosts/*/dipaco_run/pid')]

  def preempt(self):
    for pid in self.jobs():
      os.killpg(pid, signal.SIGKILL)
    self.put('preempted', '')


def ended(process: subprocess.Popen, status: int) -> tuple[str, str]:
  out, err = process.communicate(timeout=tiny_run.PATIENCE_S)
  assert process.returncode == status, (out, err)
  return out, err


def wait_for(what):
  until = time.monotonic() + tiny_run.PATIENCE_S
  while not what():
    assert time.monotonic() < until
    time.sleep(0.05)


@pytest.fixture
def cloud(tmp_path):
  made = Cloud(tmp_path)
  yield made
  left = made.processes()
  made.kill()
  assert not left
