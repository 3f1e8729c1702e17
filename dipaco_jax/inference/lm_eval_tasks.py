"""Tasks of the LM Evaluation Harness, loaded before any model, with their datasets.

Import nothing of the harness before `go_offline_if_unreachable`: its libraries read their settings at import.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from dipaco_jax.core.errors import InputError

WAIT_S = 5  # for an answer from the Hub


def go_offline_if_unreachable() -> None:
  """Sets the offline mode of Hugging Face's libraries if the Hub does not answer: they would try again for minutes."""
  from huggingface_hub import constants

  if not constants.HF_HUB_OFFLINE and not _hub_answers(constants.ENDPOINT):
    os.environ['HF_HUB_OFFLINE'] = os.environ['HF_DATASETS_OFFLINE'] = '1'
    constants.HF_HUB_OFFLINE = True


def _hub_answers(url: str) -> bool:
  """Returns whether the Hub answers within WAIT_S, by the client, proxies and certificates that the libraries use."""
  from huggingface_hub.utils import get_session

  answered = threading.Event()

  def ask():
    with contextlib.suppress(Exception):
      get_session().head(url, timeout=WAIT_S)
      answered.set()

  thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
  thread.start()
  thread.join(WAIT_S)
  return answered.is_set()


def load_tasks(names: Sequence[str], include_path: str | None = None) -> tuple[list[str], Any]:
  """Loads tasks and their datasets.

  Args:
    names: names of tasks and groups, or patterns of names.
    include_path: a folder with further tasks.

  Returns:
    The names that match, and a TaskManager for `lm_eval.simple_evaluate`, which does not load them again.

  Raises:
    InputError: there is no such task, or it cannot be loaded; the message names the task and its dataset.
  """
  from lm_eval.tasks import TaskManager

  manager = TaskManager(include_path=include_path)
  if unknown := [name for name in names if not manager.match_tasks([name])]:
    raise InputError(f'--tasks={unknown[0]}: there is no such task; name others, or their folder in --include_path')
  matching_names = manager.match_tasks(list(names))
  try:
    loaded = manager.load(matching_names)
  except Exception as e:  # of many libraries
    raise _not_loaded(manager, matching_names, e) from e
  manager.load = lambda task_list: loaded
  return matching_names, manager


def _not_loaded(manager: Any, names: Sequence[str], error: Exception) -> InputError:
  """Returns the error of the first task that cannot be loaded by itself."""
  failed = names[-1]
  for name in names:
    try:
      manager.load([name])
    except Exception as e:
      failed, error = name, e
      break
  why = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
  fix = (
    'run it once on a machine with access to huggingface.co, copy its HF_HOME folder here and set HF_HOME to it, '
    'or name tasks on files of your own in --include_path'
  )
  if isinstance(error, OSError):  # as are errors of connections and missing files
    return InputError(f'--tasks={failed}: its dataset is not on this machine and cannot be downloaded ({why}); {fix}')
  return InputError(f'--tasks={failed}: it cannot be loaded ({why}); correct it or name others')
