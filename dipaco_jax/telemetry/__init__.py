"""What a run measures of itself, and where the measurements go.

`metrics_log` writes rows of metrics, from which `curves` and `tensorboard` make event files; `sinks` takes the rows
elsewhere (`sink_wandb`, `sink_mlflow`), and `metrics_server` answers Prometheus. `performance` counts FLOPs and tokens,
`profiling` traces steps, `profile_table` sums a trace up, and `time_account` says what the run's time was spent on.

Imports from `core`, `config`, `models`, `processes` and `storage`.
"""
