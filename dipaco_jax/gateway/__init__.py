"""A server in front of registry and objects, so that a worker needs one https address and one token.

Read `authority` first: what a token allows, as a table. `tokens` are in the registry's database, `first_tokens` are
those that a hub makes by itself, `requests` name their callers, and `refusals` are the errors. The desks answer:
`fact_desk` questions, `task_desk` claims and completions, `object_desk` objects. What arrives is checked by
`fact_checks`, of owners by `owner_checks`, and by `object_checks`; `held_tasks` finds who holds a task. `desks` are all
of them; `http_app` is HTTP in front, with `limits` and `together` (one call for many requests), and `certificates` are
for TLS. `gateway_server` puts the parts together, and `__main__` is the command. The worker's end is
`storage.gateway_link`, with `gateway_objects`, and `registry.gateway_registry`.

Imports from `algorithm`, `core`, `config`, `processes`, `storage`, `data`, `registry`, `pipeline`, `serving` and
`islands`.
"""
