"""A run as leased tasks, for islands of accelerators that come and go [3].

Read `schedule` first: it describes the work of a run as facts and tasks in a `registry`. An `island` is one process of
the run. `role_loop` is the loop of every role: it performs tasks that `claims` finds, each held by a `lease`. The roles
are `worker`, which writes the paths' checkpoints (with `path_state`, `shared_stages` and `worker_hosts`),
`outer_executor`, `evaluator` and `monitor`, which read modules through `module_weights` and `kept_arrays`; `roles`
starts them. `screening_facts` excludes paths, and ends a run that diverges. `run_history` and `status_table` show the
progress of roles, `run_costs` and `wire_status` their costs, which `role_costs` notes. `own_levels` has the levels of a
single path, `path_exchange` the messages of a path, and `state_facts` the published states.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `storage`, `data`, `buckets`, `telemetry`,
`registry`, `training`, `planning`, `pipeline` and `reports`.
"""
