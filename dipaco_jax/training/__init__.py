"""One training job on one mesh of devices.

Read `training_loop` first: the loop of Algorithm 1, on a `job` (what to train). It runs the compiled `programs`, whose
arrays `specs` lays out on a `mesh` of `devices`, on a `train_state`, which `run_checkpoints` saves and restores, and
`resharding` takes to other meshes; `turns` begins and ends the turn of a path, and `outer_gradients` adds up what the
paths send. `module_publishing` writes the modules, `evaluation` scores paths, and `train_log` writes metrics and the
lines of progress. `compilation_cache` keeps compiled programs for the user and the machine.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `storage`, `data`, `buckets` and `telemetry`.
"""
