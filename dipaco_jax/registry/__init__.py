"""Facts, tasks and leases: the database with the results and the remaining work of islands.

Read `registry` first, with the `tasks` that it leases and its `questions`, then `registry_schema` (its tables) and
`fact_rows` (the text of their rows); `fact_names` rejects malformed ones, `decisions` insert what follows from the
others, once, and `renewals` write heartbeats together. `database` runs transactions on SQLite and PostgreSQL, with
`writer_turns` for SQLite's one writer, `conversations`, which closes connections, and `database_errors`, which explains
errors in one line. `known_facts` keeps facts that were read, `registry_url` finds the database of a run, and
`registry_backup` copies, checks and rebuilds it. `__main__` is the command. `worker_registry` are the calls of a
worker, which `gateway_registry` makes without a database.

Imports from `core`, `processes` and `storage`.
"""
