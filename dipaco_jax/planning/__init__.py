"""What a run will cost, found out without the machine that it will run on.

Read `dry_run` first: it compiles a run's programs for a TPU that is not there. `hlo` reads what they send, `roofline`
how long they take.

Imports from `core`, `models` and `training`.
"""
