"""Facts, tasks and leases: the database by which islands agree on what has happened and what is to be done.

Read `registry` first, with the `tasks` that it leases, then `registry_schema` (its tables) and `fact_rows` (the text of
their rows); `fact_names` rejects malformed ones. `database` runs transactions on SQLite and PostgreSQL, with
`writer_turns` for SQLite's one writer, `conversations`, which closes connections, and `database_errors`, which says
what went wrong in one line. `known_facts` keeps what was read, `registry_url` finds the database of a run, and
`registry_backup` copies, checks and rebuilds it. `__main__` is the command.

Imports from `core`, `processes` and `storage`.
"""
