"""When connections are closed: at a conversation's end, a moment after a lone call, never while somebody speaks."""

import contextlib
import threading
import time

import pytest

from dipaco_jax.registry import conversations
from dipaco_jax.registry.conversations import Conversations
from dipaco_jax.storage import retry

SOON_S = 0.1


@pytest.fixture
def made(monkeypatch):
  monkeypatch.setattr(conversations, 'LINGER_S', SOON_S)
  made = Conversations(lambda: made.hung_up.append(time.monotonic()))
  made.hung_up = []
  yield made
  made.close()


def speak(made):
  with made.speaking():
    pass


def test_a_lone_call_lingers_for_the_next(made):
  for _ in range(3):
    speak(made)
    time.sleep(SOON_S / 2)
  assert not made.hung_up
  time.sleep(2 * SOON_S)
  assert len(made.hung_up) == 1


def test_a_conversation_hangs_up_at_its_end_and_not_before(made):
  with made.conversation(1.0):
    for _ in range(2):
      speak(made)
      time.sleep(1.5 * SOON_S)
    with made.conversation(2.0):
      assert made.longest_wait_s() == 1.0
    assert not made.hung_up
  assert len(made.hung_up) == 1 and made.longest_wait_s() == retry.LONGEST_WAIT_S


def test_what_is_likely_to_continue_lingers_after_a_conversation(made):
  with made.conversation(1.0):
    made.linger()
  assert not made.hung_up
  time.sleep(2 * SOON_S)
  assert len(made.hung_up) == 1


def test_nobody_is_cut_off(made):
  """A conversation ends while another thread speaks, and has just spoken."""
  began, ends = threading.Event(), threading.Event()

  def other():
    with made.speaking():
      began.set()
      ends.wait()

  thread = threading.Thread(target=other)
  thread.start()
  began.wait()
  with made.conversation(1.0):
    speak(made)
  time.sleep(2 * SOON_S)
  assert not made.hung_up
  ends.set()
  thread.join()
  with made.conversation(1.0):
    speak(made)
  assert not made.hung_up
  time.sleep(2 * SOON_S)
  assert len(made.hung_up) == 1


def test_a_call_that_fails_has_spoken(made):
  with contextlib.suppress(OSError), made.conversation(1.0), made.speaking():
    raise OSError
  assert len(made.hung_up) == 1 and made.longest_wait_s() == retry.LONGEST_WAIT_S
