"""The cost of a run, estimated without the machine that it will run on.

Read `dry_run` first: it compiles a run's programs for a `topology`, a TPU that is not there. `hlo` parses what they
send and read, `roofline` bounds the time they take. Of islands, `wire_traffic` counts the bytes that they exchange, and
`wire_needs` which line they need. `sizing` goes the other way: from a text and a machine to the size of a model.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `telemetry` and `training`.
"""
