"""What all commands share: how they start and end, how a config is read, the text of --help; and `dipaco_jax.train`.

Read `command` first (start and end of a command), then `config_file` (a config and its overrides) and `usage` (the text
of --help); then `whole_run` (from settings to report) and `from_python` (the same as a function). The commands
themselves are the files above this room: `main`, `size`, `recipe`, `local`, `status`, `generate`, `serve`, `route`,
`export`, `harness`, `inspect` and `report`; `__main__` is `dipaco`, which runs one by its name.

Flags and ConfigDict are known here and in the commands, and nowhere else.

Imports from `core`, `config`, `models`, `processes`, `storage`, `buckets`, `telemetry`, `huggingface`, `training`,
`pipeline`, `serving` and `reports`.
"""
