"""Measurements of a run, and their destinations.

`metrics_log` writes rows of metrics, from which `curves` and `tensorboard` make event files; `sinks` takes the rows
elsewhere (`sink_wandb`, `sink_mlflow`), and `metrics_server` answers Prometheus. `performance` counts FLOPs and tokens,
`profiling` traces steps, `profile_table` sums a trace up, and `time_account` divides the time of the run by cause.

Imports from `core`, `config`, `models`, `processes` and `storage`.
"""
