"""The stages of a run, in their order: tokenize, pretrain, route, train, evaluate.

Read `stage` (what a stage depends on and leaves) and `stages` (how they follow one another) first, then `run` (a run in
its workdir) and the stages' own files: `tokenize_stage`, `jobs` (what is trained), `route_stage` with `features`,
`resharding_round`, and `validate_stage` with `token_losses`, `rerouted_perplexity` and `excerpt_choice`. Before the
first stage `preflight` checks everything, and takes stages from another run. `stage_records` is what other rooms read.

Imports from `algorithm`, `core`, `config`, `models`, `processes`, `storage`, `routing`, `data`, `buckets`, `telemetry`,
`huggingface`, `training` and `planning`.
"""
