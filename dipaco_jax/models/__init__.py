"""What a path is: a decoder-only transformer, its loss, and how it writes a text token by token.

Read `transformer`, then `loss`; `attention` chooses a kernel, `decoding` is for serving. Pure.

Imports from `core`.
"""
