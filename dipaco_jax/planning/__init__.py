"""The cost of a run, estimated without the machine that it will run on.

Read `dry_run` first: it compiles a run's programs for a `topology`, a TPU that is not available. `hlo` parses their
traffic, `roofline` bounds their time. `wire_traffic` counts the bytes that islands exchange, and `wire_needs` finds the
speed of the line that they need; `barriers` names small levels for which all paths wait. `cost_text` prints all of it.
`run_estimate` needs no compilation: `cost_check` states it before a run begins on the `machine` at hand. `sizing` goes
the other way: from a text and a machine to the size of a model.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `telemetry` and `training`.
"""
