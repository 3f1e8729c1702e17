"""Flags for XLA with which it compiles quickly for processors: tests compile much, and compute little."""

import importlib.util
import mmap
import pathlib
import threading

QUICK = (  # the first two halve the time each, or so; the last, one module of LLVM for a program, takes a third of it
  '--xla_backend_optimization_level=0',
  '--xla_cpu_use_fusion_emitters=false',
  '--xla_cpu_parallel_codegen_split_count=1',
)


def is_known(flag: str) -> bool:
  """Whether the XLA that is installed has such a flag: it ends the process at one that it doesn't know."""
  name = b'\0%s\0' % flag.strip('-').partition('=')[0].encode()  # alone: a flag that is gone is still a field
  found = importlib.util.find_spec('jaxlib')
  assert found and found.origin
  for library in pathlib.Path(found.origin).parent.glob('*.so*'):
    with open(library, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
      if code.find(name) >= 0:
        return True
  return False


FLAGS = ' '.join(flag for flag in QUICK if is_known(flag))


def on(devices: int) -> str:
  """These flags, and so many fake devices."""
  return f'--xla_force_host_platform_device_count={devices} {FLAGS}'


def share_contexts():
  """Has each thread lower all of its programs in one context of MLIR; one for each takes a fifth of the time."""
  from jax._src.interpreters import mlir

  make, made = mlir.make_ir_context, threading.local()

  def context():
    if not hasattr(made, 'context'):
      made.context = make()
    return made.context

  mlir.make_ir_context = context
