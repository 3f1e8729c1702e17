"""From documents to batches.

In the order that text takes: `source` (the interface of sources), the `source_*` files, `file_kinds` (kinds of files by
name), `compressed_files`, `text_files`, `json_files`, `table_files`, `tar_files`, `token_files` and `megatron_index`
(tokens of other programs), `one_source`, `mixture`, `corpus` (documents of any source), `tokenizer` (the interface),
its kinds in `*_tokenizer`, `special_tokens`, `tokenizer_files`, `cutting` and `sequences` (tokens, cut), `holdouts`,
`packing` and `shards` (the rows of each path), `loader` (batches of a shard). `prefetching` reads ahead in threads. A
`conversation` becomes tokens by `chat_template`, which runs in a `template_sandbox` with `template_limits`, and
`answers` cuts those into sequences. `content` digests the text of a config; `equality` and `passages` find equal
documents and parts of them; `left_out` counts what tokenizing leaves out, and `foreign_files` advises on files that
cannot be read.

Imports from `core`, `config` and `storage`.
"""
