"""Routing: which path a text takes, and when it may change paths [2.4].

Read `router` first: r(x), from a feature z of the text's beginning. `kmeans` makes the generative router; `classifier`
makes the discriminative one, from `path_labels`; `own_router` calls one of the user's. `balanced_assignment` limits the
size of shards. With routing every W tokens, `chunk_router` learns to choose, `chunk_policies` compares ways to choose,
and `chunk_losses` shows texts chunk by chunk. Pure.

Imports from `algorithm`, `core`, `config` and `models`.
"""
