"""Processes of a job notice at once when another one dies, and tell this from a normal end."""

import contextlib
import queue
import socket
import time

import pytest

from dipaco_jax.processes import job_watch


class Job:
  """Three processes' connections, all in this one; `said` has (who noticed, who is gone)."""

  def __init__(self):
    self.said = queue.Queue[tuple[int, int]]()
    first, self.port, self.token = job_watch.listen(lambda gone: self.said.put((0, gone)))
    self.processes = [first, *(self.connect(index) for index in (1, 2))]
    until = time.monotonic() + 10
    while len(first.connections) < 2:
      assert time.monotonic() < until
      time.sleep(0.005)

  def connect(self, index: int) -> job_watch.JobWatch:
    return job_watch.connect('localhost', self.port, self.token, index, lambda gone: self.said.put((index, gone)))

  def end(self, index: int):
    """As the kernel does when a process ends."""
    for connection in [*self.processes[index].connections.values()]:
      with contextlib.suppress(OSError):  # the other side has ended before
        connection.shutdown(socket.SHUT_RDWR)

  def noticed(self, count: int) -> set[tuple[int, int]]:
    return {self.said.get(timeout=10) for _ in range(count)}


@pytest.fixture
def job():
  made = Job()
  yield made
  for index, process in enumerate(made.processes):
    process.stop()
    made.end(index)


def test_one_that_is_killed_is_named_to_all(job):
  job.processes[2].stop()  # what it would say itself does not count
  job.end(2)
  assert job.noticed(2) == {(0, 2), (1, 2)}


def test_an_end_that_another_end_caused_is_not_reported(job, monkeypatch):
  send, delays = job_watch.JobWatch._send, [0.3]

  def send_slowly(watch, message):
    send(watch, message)
    if watch is job.processes[0] and delays:
      time.sleep(delays.pop())  # meanwhile the second process hears of the third one's end, and closes its connection

  monkeypatch.setattr(job_watch.JobWatch, '_send', send_slowly)
  job.processes[2].stop()
  job.end(2)
  assert job.noticed(2) == {(0, 2), (1, 2)}


def test_the_first_one(job):
  job.processes[0].stop()
  job.end(0)
  assert job.noticed(2) == {(1, 0), (2, 0)}


def test_those_that_end_as_agreed_are_not_gone(job):
  for process in job.processes:
    process.stop()
  for index in (0, 1, 2):
    job.end(index)
  with pytest.raises(queue.Empty):
    job.said.get(timeout=0.1)


def test_who_says_bye_is_gone_only_for_those_that_do_not_end_too(job, monkeypatch):
  monkeypatch.setattr(job_watch, 'BYE_S', 0.3)
  job.processes[2].stop()
  began = time.monotonic()
  job.processes[2].say_bye()
  job.end(2)
  assert job.noticed(2) == {(0, 2), (1, 2)} and time.monotonic() - began > 0.25


def test_the_first_one_waits_until_the_others_have_ended(job, monkeypatch):
  monkeypatch.setattr(job_watch, 'BYE_OF_FIRST_S', 0.2)
  began = time.monotonic()
  job.processes[0].say_bye()
  assert 0.15 < time.monotonic() - began < job_watch.FIRST_WAITS_S
  assert job.noticed(2) == {(1, 0), (2, 0)}


def test_strangers_are_not_heard(job):
  with socket.create_connection(('localhost', job.port)) as stranger:
    stranger.settimeout(10)
    stranger.sendall(b'0' * 32 + b'00000001')
    assert stranger.recv(1) == b''
  with pytest.raises(queue.Empty):
    job.said.get(timeout=0.1)
