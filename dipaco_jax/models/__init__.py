"""The model of a path: a decoder-only transformer, its loss, and decoding token by token.

Read `transformer`, then `block` with its `layers` and `rotary`, and `loss`. `attention` chooses a kernel, `flash` or
`blocked`, for `scores`; `products` multiplies matrices on CPUs. `experts` takes the place of an MLP, with the products
of `expert_groups`. `decoding` is for serving. `block_check` and
`product_flops` are for blocks that users write. Pure.

Imports from `algorithm`, `core` and `config`.
"""
