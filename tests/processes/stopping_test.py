"""A signal is heard wherever the main thread is; one that is answered, when its answer is done."""

import os
import signal
import subprocess
import sys
import time

import pytest
import repository

HEARD = """
import os, signal, sys, threading, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from dipaco_jax.processes import processes, stopping

def send(number=signal.SIGTERM):
  os.kill(os.getpid(), number)

class Swallows:
  def __del__(self):
    send(int(sys.argv[1]))
    time.sleep(30)  # where an exception would be ignored

with processes.ending(), stopping.listening('stopped') as signals:
"""
STATUS = {number: 128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def ended(body: str, *arguments, status: int) -> tuple[str, str]:
  """What such a program says; it ends within seconds."""
  began = time.monotonic()
  command = [sys.executable, '-c', HEARD + body, *map(str, arguments)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=25)
  assert done.returncode == status, done.stderr
  assert time.monotonic() - began < 10
  return done.stdout, done.stderr


def test_under_nohup_the_terminal_may_go():
  body = """
  send(signal.SIGHUP)
  time.sleep(0.2)
  print(signals.requested())
"""
  command = ['nohup', sys.executable, '-c', HEARD.replace('signal.signal(signal.SIGHUP', '#') + body]
  done = subprocess.run(command, capture_output=True, text=True, timeout=25)
  assert (done.returncode, done.stdout) == (0, 'False\n'), done.stderr


@pytest.mark.parametrize('number, status', STATUS.items(), ids=str)
def test_a_signal_in_a_callback_that_swallows_exceptions(number, status):
  assert ended('  made = Swallows()\n  del made', number, status=status) == ('', 'dipaco_jax: stopped\n')


def test_last_words_are_written_where_the_process_ends_within_the_block_and_they_cannot_hold_it_up():
  body = """
  with stopping.last_words(lambda status: print('last', status)):
    if len(sys.argv) > 1:
      stopping._last_words.append(lambda status: time.sleep(60))
    stopping.leave(7)
"""
  assert ended(body, status=7)[0] == 'last 7\n'
  ended(body, 'hangs', status=7)
  assert ended(body.replace('    stopping.leave', '  stopping.leave'), status=7) == ('', '')


GRACEFUL = """
  with signals.graceful(lambda: {news}):
    if {sent}:
      send()
      time.sleep(0.5)
    print('to the end', signals.requested())
  print('on')
"""


@pytest.mark.parametrize(
  'sent, news, status, said',
  [
    (False, True, 0, 'to the end False\non\n'),
    (True, True, 1, 'to the end True\n'),  # KeyboardInterrupt, which `main` takes for what it is
    (True, False, 143, ''),
  ],
)
def test_a_signal_behind_the_last_dispatch(sent, news, status, said):
  out, err = ended(GRACEFUL.format(sent=sent, news=news), status=status)
  assert out == said and ('KeyboardInterrupt' in err) == (status == 1)
  assert ('a second signal ends at once' in err) == (sent and news)


def test_a_second_signal_ends_what_saves():
  body = '  with signals.graceful(lambda: True):\n    send(signal.SIGINT)\n    time.sleep(0.3)\n'
  body += '    send()\n    time.sleep(30)'
  assert ended(body, status=143)[1].endswith('dipaco_jax: stopped\n')


def test_what_was_set_before_is_set_again():
  body = '  pass\nprint(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)'
  command = [sys.executable, '-c', HEARD.replace('processes.ending(), ', '') + body]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout == 'True\n'


THREAD = '  threading.Thread(target=time.sleep, args=(30,)).start()\n'


@pytest.mark.parametrize(
  'last, status, words',
  [
    ('', 0, ''),
    ('  sys.exit(3)', 3, ''),
    ("  sys.exit('so')", 1, 'so\n'),
    ('  raise ValueError(5)', 1, 'ValueError: 5'),
    ('  raise BrokenPipeError', 141, ''),
    ('  send(signal.SIGINT); time.sleep(9)', 130, 'stopped'),
  ],
)
def test_no_thread_holds_the_process_up(last, status, words):
  assert words in ended(THREAD + last, status=status)[1]


def test_a_pipe_that_nobody_reads_holds_up_nothing():
  reading, writing = os.pipe()  # full at 64 KiB
  body = "  threading.Thread(target=print, args=('x' * 10**6,), kwargs={'file': sys.stderr}).start()\n  time.sleep(1)\n"
  with subprocess.Popen([sys.executable, '-c', HEARD + body + '  send()\n  time.sleep(30)'], stderr=writing) as process:
    assert process.wait(10) == 143
  os.close(reading)
  os.close(writing)


CLOSING = """
  with stopping.closing(0.5) as opened:
    opened.callback(print, 'closed', flush=True)
    opened.callback(time.sleep, {pause})
    opened.callback({broken})
    {last}
"""


@pytest.mark.parametrize(
  'pause, broken, last, status, words',
  [
    (0, 'int', 'pass', 0, ''),
    (1, 'int', 'pass', 0, ''),
    (0, 'int, "x"', 'pass', 1, 'ValueError'),
    (0, 'int, "x"', 'raise OSError(7)', 1, 'OSError: 7'),
  ],
)
def test_all_is_closed(pause, broken, last, status, words):
  out, err = ended(CLOSING.format(pause=pause, broken=broken, last=last), status=status)
  assert out == 'closed\n' and words in err


@pytest.mark.parametrize(
  'error, status, words', [('OSError(7)', 1, 'OSError: 7'), ('errors.Unavailable("away")', 75, 'dipaco_jax: away')]
)
def test_what_cannot_be_closed_after_an_error_holds_the_process_up_for_seconds(error, status, words):
  imports = '  from dipaco_jax.core import errors'
  out, err = ended(imports + CLOSING.format(pause=30, broken='int', last=f'raise {error}'), status=status)
  assert not out and words in err and 'could not be closed in 0.5 s' in err


def test_ctrl_c_before_a_command_listens():
  """Its package has seen to it by then that nothing swallows it."""
  code = "import sys, signal; sys.argv[0] = '-m'; sys.orig_argv[1:2] = ['-m', {name!r}]; import dipaco_jax; "
  code += 'print(signal.getsignal(signal.SIGINT) == signal.SIG_DFL)'
  for name in ('dipaco_jax.main', 'another'):
    done = subprocess.run([sys.executable, '-c', code.format(name=name)], capture_output=True, text=True, check=True)
    assert done.stdout == f'{name.startswith("dipaco")}\n'


def test_a_command_whose_output_is_cut_off():
  root = repository.ROOT
  command = f'{sys.executable} -m dipaco_jax.report --help; echo $? >&2'
  done = subprocess.run(['bash', '-c', f'({command}) | true'], cwd=root, capture_output=True, text=True, timeout=30)
  assert done.stderr in ('141\n', '0\n')  # it may have been faster


WITHIN = """
import contextlib, os, signal, sys, threading, time
from dipaco_jax.processes import stopping

def send(number):
  os.kill(os.getpid(), number)
  time.sleep(0.2)

def mine(number, frame):
  print('mine')

signal.signal(signal.SIGTERM, mine)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have us ignore
number = int(sys.argv[1])
try:
  with stopping.interrupting('so') as signals:
    {body}
except (KeyboardInterrupt, SystemExit) as e:
  print(repr(e), signals.requested())
send(signal.SIGTERM)
"""
SAVES = """
    with signals.graceful(lambda: True):
      send(number)
      {more}
      print('saved')
"""


@pytest.mark.parametrize(
  'body, number, said',
  [
    ('pass', 0, ''),
    ('send(number)', signal.SIGINT, "KeyboardInterrupt('so') True\n"),
    ('send(number)', signal.SIGTERM, 'SystemExit(143) True\n'),
    (SAVES.format(more=''), signal.SIGINT, "saved\nKeyboardInterrupt('so') True\n"),
    (SAVES.format(more=''), signal.SIGHUP, 'saved\nSystemExit(129) True\n'),
    (SAVES.format(more='send(signal.SIGINT)'), signal.SIGTERM, "KeyboardInterrupt('so') True\n"),
    ('raise KeyboardInterrupt', 0, 'KeyboardInterrupt() False\n'),
  ],
)
def test_a_program_that_is_not_ours_is_interrupted(body, number, said):
  command = [sys.executable, '-c', WITHIN.format(body=body), str(int(number))]
  done = subprocess.run(command, capture_output=True, text=True, timeout=25)
  assert done.stdout == f'{said}mine\n', done.stderr


def test_in_another_thread_signals_stay_the_programs():
  body = (
    'before = signal.getsignal(signal.SIGINT)\n  with stopping.interrupting(): same = signal.getsignal(2) is before'
  )
  program = (
    f'import signal, threading\nfrom dipaco_jax.processes import stopping\ndef run():\n  global same\n  {body}\n'
  )
  program += 'thread = threading.Thread(target=run)\nthread.start()\nthread.join()\nassert same'
  subprocess.run([sys.executable, '-c', program], check=True)


PASSES = """
  child = 'import os, signal, sys, time\\n' + sys.argv[1] + '\\nprint(os.getpid(), flush=True)\\ntime.sleep(20)'
  print('ended with', stopping.run_process([sys.executable, '-c', child]), flush=True)
"""
SAVES_FIRST = """
def save(number, frame):
  print('saving', flush=True)
  time.sleep(1)
  print('saved', flush=True)
  sys.exit(3)
signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_ends_the_other_process_first_and_is_reported_by_the_status(number):
  command = [sys.executable, '-c', HEARD + PASSES, SAVES_FIRST]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    process.stdout.readline()
    process.send_signal(number)  # to this one alone, as a scheduler does
    assert process.stdout.read() == 'saving\nsaved\n'
    assert process.wait(10) == 128 + number


def test_ctrl_c_reaches_the_other_process_once():
  command = [sys.executable, '-c', HEARD + PASSES, SAVES_FIRST]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # all of the terminal's foreground
    assert process.stdout.read() == 'saving\nsaved\n'
    assert process.wait(10) == 130


def test_a_second_signal_leaves_no_process_behind():
  ignores = 'signal.signal(signal.SIGINT, signal.SIG_IGN)'
  with subprocess.Popen([sys.executable, '-c', HEARD + PASSES, ignores], stdout=subprocess.PIPE, text=True) as process:
    process.stdout.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    process.stdout.read()  # to its end, which the other holds open
    assert time.monotonic() - began < 10


@pytest.mark.skipif(sys.platform != 'linux', reason='only there')
def test_the_other_process_does_not_outlive_this_one():
  with subprocess.Popen([sys.executable, '-c', HEARD + PASSES, ''], stdout=subprocess.PIPE, text=True) as process:
    process.stdout.readline()
    began = time.monotonic()
    process.kill()
    process.stdout.read()
    assert time.monotonic() - began < 10


def test_the_status_of_a_process_that_ends_by_itself():
  assert ended("  sys.exit(stopping.run_process([sys.executable, '-c', 'raise SystemExit(5)']))", status=5) == ('', '')
