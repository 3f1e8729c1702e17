"""The command `dipaco`, and `python -m dipaco_jax`: runs the command that its first word names, or lists them all."""

import difflib
import os
import runpy
import sys

import dipaco_jax
from dipaco_jax.command_line import command, usage
from dipaco_jax.processes import processes


def main():
  """Runs `dipaco COMMAND [OPTION ...]`, which is `python -m dipaco_jax.COMMAND` by a shorter name."""
  name = sys.argv[1] if len(sys.argv) > 1 else '--help'
  if name in usage.MODULES:
    sys.argv[1:2] = []
    if not {'', os.getcwd()} & set(sys.path):
      sys.path.append(os.getcwd())  # where modules of the user's are, as for `python -m`
    runpy.run_module(f'dipaco_jax.{usage.MODULES[name]}', run_name='__main__', alter_sys=True)
    return
  with processes.ending():
    if name == '--version':
      print(f'dipaco_jax {dipaco_jax.__version__}')
    elif name in ('-h', '--help', 'help'):
      print(usage.commands())
    else:
      near = difflib.get_close_matches({'main': 'train'}.get(name, name), usage.MODULES, 1)
      hint = f'did you mean dipaco {near[0]}?' if near else 'dipaco --help lists all commands'
      command.fail(f'{name}: there is no such command; {hint}')


if __name__ == '__main__':
  main()
