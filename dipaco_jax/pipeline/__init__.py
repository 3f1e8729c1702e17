"""The stages of a run, in their order: tokenize, pretrain, route, train, evaluate, report.

Read `stages` first, then `run` (a run in its workdir) and the stages' own files: `tokenize_stage`, `jobs` (what is
trained), `route_stage`, `resharding_round`, `validate_stage`.

Imports from every room before it but `planning`.
"""
