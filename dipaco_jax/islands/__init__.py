"""A run as leased tasks, for islands of accelerators that come and go [3].

Read `schedule` first: what is to be done, as facts and tasks in a `registry`. An `island` is one process of the run.
`role_loop` is how every role does tasks, which `claims` finds, each held by a `lease`; the roles are `worker`, which
writes the paths' checkpoints (with `path_state`, `shared_stages` and `worker_hosts`), `outer_executor`, `evaluator` and
`monitor`, which read modules by `module_weights` and `kept_arrays`, and `roles` starts them. By `screening_facts` they
exclude paths, and end a run that diverges; `run_history` and `status_table` show what they do, and `run_costs` and
`wire_status` what it costs, as `role_costs` has noted. A path's own levels are `own_levels`, what it exchanges
`path_exchange`, and the states that are published `state_facts`.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `storage`, `data`, `buckets`, `telemetry`,
`registry`, `training`, `planning`, `pipeline` and `reports`.
"""
