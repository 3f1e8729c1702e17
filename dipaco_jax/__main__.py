"""Lists the commands: `python -m dipaco_jax`."""

import sys

import dipaco_jax
from dipaco_jax.command_line import command, usage
from dipaco_jax.training import processes

if __name__ == '__main__':
  given = sys.argv[1:]
  with processes.ending():
    if given[:1] == ['--version']:
      print(f'dipaco_jax {dipaco_jax.__version__}')
    elif not given or given[0] in ('-h', '--help', 'help'):
      print(usage.commands())
    else:
      name = given[0] if given[0] in usage.COMMANDS else 'main'
      command.fail(f'{given[0]}: write python -m dipaco_jax.{name}; python -m dipaco_jax lists all commands')
