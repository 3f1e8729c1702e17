"""A trained run at work: it is loaded a path at a time, continues texts, and answers over HTTP.

In the order that a request takes: `http_server`, `openai_api`, `engine_thread`, `generation`, `batch`; `trained_run`
loads what they use. `lm_eval_model` is a run as the LM Evaluation Harness sees it.

Imports from `core`, `models`, `routing`, `storage` and `data`.
"""
