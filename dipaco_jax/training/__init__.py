"""One training job on one mesh of devices.

Read `training_loop` first: the loop of Algorithm 1, on a `job` (what to train). It runs the compiled `programs`, whose
arrays `specs` lays out on a `mesh`, on a `train_state`, which `run_checkpoints` saves and restores, and `resharding`
takes to other meshes; `module_publishing` writes the modules, `evaluation` scores paths. `train_log` writes
`metrics_log` (`curves` to `tensorboard` too) and the lines of `display`; `sinks` takes rows elsewhere (`sink_wandb`,
`sink_mlflow`), `metrics_server` tells Prometheus; `performance` counts, `profiling` traces steps and `profile_table`
sums the trace up. `processes` and `stopping`: how a job of several processes starts and ends; `disks`: what they share.

Imports from `core`, `models`, `storage` and `data`.
"""
