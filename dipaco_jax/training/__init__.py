"""One training job on one mesh of devices.

Read `training_loop` first: the loop of Algorithm 1. It runs the compiled `programs` of a `mesh`, on a `train_state`,
which `run_checkpoints` saves and restores; `evaluation` scores paths; `train_log` writes down how it goes.

Imports from `core`, `models`, `storage` and `data`.
"""
