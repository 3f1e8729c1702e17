"""From documents to batches.

In the order that text takes: `source` (what a source of documents is), the `source_*` files, `file_kinds` (what a file
holds, by its name), `compressed_files`, `text_files`, `json_files`, `table_files`, `tar_files`, `token_files` and
`megatron_index` (tokens that others made), `mixture`, `corpus` (documents of whatever source), `tokenizer` (what one
is), its kinds in `*_tokenizer`, `tokenizer_files`, `cutting` and `sequences` (tokens, cut), `holdouts`, `packing` and
`shards` (the rows of each path), `loader` (batches of a shard). `prefetching` works ahead in threads.

Imports from `core`, `config` and `storage`.
"""
