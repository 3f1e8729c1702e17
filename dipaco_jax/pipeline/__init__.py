"""The stages of a run, in their order: tokenize, pretrain, route, train, evaluate.

Read `stage` (inputs and files of a stage) and `stages` (their order) first, then `run` (a run in its workdir) and the
stages' own files: `tokenize_stage`, `jobs` (the models to train), `route_stage` with `features`, `own_text_stage` (of
one owner's text), `resharding_round`, `router_refit`, and `validate_stage` with `token_losses`, `document_losses`,
`answer_losses`, `group_ratios`, `rerouted_perplexity`, `excerpt_choice` and `samples`. Before the first stage
`preflight` checks everything: `inputs` with `input_records`, `rate_check`, and `reuse`, which takes stages from another
run. `plan` and `epochs` count training in advance. `own_comparison` measures what a federation is worth to an owner,
and `published_paths` make a workdir of models of several owners. Other rooms read `stage_records`.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `storage`, `routing`, `data`, `buckets`, `telemetry`,
`huggingface`, `training` and `planning`.
"""
