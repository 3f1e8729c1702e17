"""A trained run in use: paths are loaded, continue texts, and answer over HTTP.

`trained_run` loads a run's paths (with `run_files` and `text_router`), an `engine` turns a `request` into a text, which
grows in a `batch` with others on its path. A request to the server goes through `http_server`, `openai_api`, `request`,
`completions`, `engine_thread`, `engine`, `text_router`, `trained_run` and `batch`, and then through `models.decoding`;
one of a chat goes through `chat_api`, `conversation`, `chat_template` and `template_sandbox` before `request`.
`connections` are the server's limits on clients. `route_server` goes in front of other engines, by `engines_file`,
`route_api`, `conversation`, `batched_router`, `engine_pool` and `relay`. Both share `http_app`, `http_messages`,
`http_hosts` and `http_lifecycle`. `lm_eval_model` is a run as the LM Evaluation Harness sees it; `excerpts` tells which
path reads what in any text.

Imports from `core`, `models`, `routing`, `storage` and `data`; `excerpts` from `pipeline` and the server from
`training.stopping` too.
"""
