"""The model of a path: a decoder-only transformer, its loss, and decoding token by token.

Read `transformer`, then `block` and `loss`. `attention` chooses a kernel, `decoding` is for serving. Pure.

Imports from `algorithm`, `core` and `config`.
"""
