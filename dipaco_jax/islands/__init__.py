"""A run as leased tasks, for islands of accelerators that come and go [3].

Read `schedule` first: it describes the work of a run as facts and tasks in a `registry`. An `island` is one process of
the run. `role_loop` is the loop of every role: it performs tasks that `claims` finds, each held by a `lease`. The roles
are `worker`, `outer_executor`, `evaluator` and `monitor`; `roles` starts them, after the `registration` of the run and
with their `local_config`, or `all_roles` in one process, and `behind_gateway` a worker that has only the address of a
gateway.

A worker trains `pieces` of a phase by `inner_phase`, on all of its `worker_hosts`, with `reading_ahead` and
`phase_metrics`, or does one of the `shared_stages`. `path_steps` are the inner steps of a phase, which may end by time.
`path_exchange` takes modules over and sends `messages`, which `path_messages` write; `outer_weights` weigh them, and
`own_levels` has the levels of a single path. A path's `path_state` stays in the worker's `held_states`; `lineage` says
where it comes from, `state_facts` publish it, and `hand_over` asks its holder for it.

If text stays with its owners, an owner's worker keeps it in its `owner_store`, where it reads it by `own_text`, without
what is in the keeper's `validation_text`; `owner_facts` have all that others know of it. `owner_report` ends such a run
for the keeper, `owner_workdir` for an owner, whom `owner_comparison` tells what it was worth; `final_files` are those
that the end of any run leaves. `members` decide which owners have joined or left while the run trains.

All roles read modules through `module_weights` and `kept_arrays`, and parse what others wrote inside `guard`.
`screening_facts` excludes paths, and ends a run that diverges; with a `quorum`, phases end without paths that are late.
`withdrawals` withdraw what cannot be read.
`decisions` are what the facts of a run decide, which a replay follows.
`floor_facts` say which contributions a `judge` found to make a path worse.
`audit_facts` says which phases another worker trains again as an `auditor`, under `audit_oversight`, and
`suspensions` exclude workers that were found wrong; `audit_history` is for reports.
`run_history`, `live_metrics` and `status_table` show the progress of roles, `run_costs` and `wire_status` their costs,
which `role_costs` notes.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `storage`, `data`, `buckets`, `telemetry`,
`registry`, `training`, `planning`, `pipeline` and `reports`.
"""
