"""Which path a text takes, and when it may change paths [2.4].

Read `router` first: r(x), from a feature z of the text's beginning. `kmeans` makes the generative router,
`classifier` the discriminative one, from `path_labels`; `arrangement` places clusters on the grid; `chunk_router` and
`chunk_policies` choose again every W tokens. Pure.

Imports from `core` and `models`.
"""
