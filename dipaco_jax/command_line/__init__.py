"""Code that all commands share: start and end, reading of configs, the text of --help; and `dipaco_jax.train`.

Read `command` first (start and end of a command), then `config_file` (a config and its overrides) and `usage` (the text
of --help); then `whole_run` (from settings to report) and `from_python` (the same as a function). `bucket_run` and
`bucket_copy` are for runs in a bucket, `listener` for commands that serve HTTP, `worker_devices` and `supervision` for
`local`, `hub` and `join`, `role_process` for roles of islands, `gateway_worker` for a worker behind a gateway. The
commands themselves are the files above this room: `main`, `size`, `recipe`, `local`, `hub`, `join`, `gateway`,
`status`, `generate`, `serve`, `route`, `export`, `harness`, `inspect` and `report`; `__main__` is `dipaco`, which runs
one by its name.

Only this room and the commands use flags and ConfigDict.

Imports from `core`, `config`, `models`, `processes`, `storage`, `buckets`, `telemetry`, `registry`, `huggingface`,
`training`, `pipeline`, `serving`, `reports` and `islands`.
"""
