"""A Slurm cluster of the tests' own: two nodes on this machine, and a partition whose jobs preempt the other's."""

import contextlib
import getpass
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable

import ports
import pytest

PATH = f'{os.environ["PATH"]}:/usr/sbin'  # has the daemons
PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch')
PATIENCE_S = 240
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=0
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first},{second}] CPUs=16
PartitionName=spot Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=owner Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
  """Its commands, with output in its folder."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.env = os.environ | {'PATH': PATH, 'SLURM_CONF': str(folder / 'slurm.conf')}
    names = {'host': socket.gethostname().split('.')[0], 'user': getpass.getuser(), 'folder': folder}
    numbers = {name: ports.free_port() for name in ('port', 'first', 'second')}
    (folder / 'slurm.conf').write_text(CONFIG.format(**names, **numbers))
    (folder / 'key').touch(0o600)
    (folder / 'key').write_bytes(os.urandom(1024))
    for name in ('state', 'n0', 'n1'):
      (folder / name).mkdir()

  def daemons(self) -> list[list[str]]:
    files = {'key-file': 'key', 'socket': 'munge.socket', 'pid-file': 'munge.pid', 'log-file': 'munge.log'}
    munged = ['munged', '--foreground', '--force', f'--seed-file={self.folder}/seed']
    munged += [f'--{option}={self.folder}/{name}' for option, name in files.items()]
    return [munged, ['slurmctld', '-D'], *(['slurmd', '-D', '-N', node] for node in ('n0', 'n1'))]

  def __call__(self, *words: object, **env: str) -> str:
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, env=self.env | env, timeout=60)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return (done.stdout + done.stderr).strip()

  def submit(self, *words: object, **env: str) -> str:
    """The job's number; its output is job-NUMBER.log in the folder."""
    return self('sbatch', '--parsable', f'--output={self.folder}/job-%A.log', *words, **env).splitlines()[0]

  def log(self, job: str) -> str:
    file = self.folder / f'job-{job}.log'
    return file.read_text() if file.exists() else ''

  def field(self, job: str, name: str) -> str:
    return dict(w.split('=', 1) for w in self('scontrol', 'show', 'job', job).split() if '=' in w)[name]

  def wait_for(self, state: str, job: str):
    self.until(lambda: self.field(job, 'JobState') == state, job)

  def until(self, moment: Callable[[], bool], job: str):
    deadline = time.monotonic() + PATIENCE_S
    while not moment():
      assert time.monotonic() < deadline, (self('scontrol', 'show', 'job', job), self.log(job)[-4000:])
      time.sleep(0.2)

  def start_now(self, job: str):
    """Ends the two minutes that Slurm lets pass after it has queued a job again."""
    self('scontrol', 'update', f'JobId={job}', 'StartTime=now')


@contextlib.contextmanager
def running():
  if missing := [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]:
    pytest.skip(f'Slurm is not installed: no {missing[0]}')
  with tempfile.TemporaryDirectory(prefix='slurm') as folder, contextlib.ExitStack() as after:
    cluster = Cluster(pathlib.Path(folder))
    for command in cluster.daemons():
      daemon = subprocess.Popen(command, env=cluster.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
      after.callback(daemon.wait, 60)
      after.callback(daemon.terminate)
      time.sleep(0.5)  # each needs those before it
    deadline = time.monotonic() + 30
    while cluster('sinfo', '--noheader', '--format=%t %D', '--partition=spot') != 'idle 2':
      assert time.monotonic() < deadline, (pathlib.Path(folder) / 'slurmctld.log').read_text()
      time.sleep(0.5)
    yield cluster
    cluster('scancel', '--user', getpass.getuser())
    time.sleep(2)
