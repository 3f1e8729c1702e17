"""The stages of a run, in their order: tokenize, pretrain, route, train, evaluate.

Read `stage` (inputs and files of a stage) and `stages` (their order) first, then `run` (a run in
its workdir) and the stages' own files: `tokenize_stage`, `jobs` (the models to train), `route_stage` with `features`,
`resharding_round`, and `validate_stage` with `token_losses`, `rerouted_perplexity` and `excerpt_choice`. Before the
first stage `preflight` checks everything, and takes stages from another run. Other rooms read `stage_records`.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `storage`, `routing`, `data`, `buckets`, `telemetry`,
`huggingface`, `training` and `planning`.
"""
