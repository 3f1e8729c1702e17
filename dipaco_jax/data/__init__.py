"""From documents to batches.

In the order that text takes: `source` (the interface of sources), the `source_*` files, `file_kinds` (kinds of files
by name), `compressed_files`, `text_files`, `json_files`, `table_files`, `tar_files`, `token_files` and
`megatron_index` (tokens of other programs), `mixture`, `corpus` (documents of any source), `tokenizer` (the
interface), its kinds in `*_tokenizer`, `tokenizer_files`, `cutting` and `sequences` (tokens, cut), `holdouts`,
`packing` and `shards` (the rows of each path), `loader` (batches of a shard). `prefetching` reads ahead in threads.

Imports from `core`, `config` and `storage`.
"""
