"""From documents to batches.

In the order that text takes: `source` (what a source of documents is) and the `source_*` files, `corpus`,
`tokenizer`, `sequences`, `shards`. `detokenizer` goes back, for text that is written token by token.

Imports from `core` and `storage`.
"""
