"""A run as leased tasks, for islands of accelerators that come and go [3].

Read `schedule` first: what is to be done, as facts in a `registry`. `role_loop` is how every role takes and publishes
a task; the roles are `worker`, `outer_executor`, `evaluator` and `monitor`, which `roles` starts.

Imports from every room before it but `planning`.
"""
