"""Paths to and from the layout that the Hugging Face libraries read: Llama's.

Read `llama_weights` (names and shapes of arrays), then `llama_folder` (what is in a directory) and `tokenizer_json`.

Imports from `core`, `models`, `storage` and `data`.
"""
