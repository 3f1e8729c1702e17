"""`python -m dipaco_jax.inspect`; see inspection.py. Without an __init__.py, this folder hides nobody's `inspect`."""

import runpy

runpy.run_module('dipaco_jax.inspection', run_name='__main__', alter_sys=True)
