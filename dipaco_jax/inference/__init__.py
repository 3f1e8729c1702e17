"""A trained run in use: its paths are loaded and continue texts.

`trained_run` loads a run's paths (with `run_files`, `path_arrays` and `text_router`), and an `engine` turns a `request`
into a text, which grows in a `batch` with others on its path, through `models.decoding`. `batched_router` routes many
prompts at once. `merging` makes one model of several paths. `lm_eval_model` and `lm_eval_tasks` are a run as the LM
Evaluation Harness sees it; `excerpts` tells which path reads what in any text.

Imports from `algorithm`, `core`, `config`, `models`, `storage`, `routing`, `data` and `pipeline`.
"""
