"""Runs `python -m dipaco_jax.local` from a clone."""

import sys

from dipaco_jax import local

if __name__ == '__main__':
  sys.exit(local.main())
