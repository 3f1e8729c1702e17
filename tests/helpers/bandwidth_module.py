"""benchmarks/bandwidth.py as a module that is loaded once, because its flags cannot be defined twice."""

import importlib.util
import sys

import repository

FILE = repository.ROOT / 'benchmarks' / 'bandwidth.py'
sys.path.append(str(FILE.parent))  # for what it shares with others
SPEC = importlib.util.spec_from_file_location('bandwidth', FILE)
assert SPEC and SPEC.loader
bandwidth = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bandwidth)
