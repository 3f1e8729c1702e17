"""Paths to and from the layout that the Hugging Face libraries read: Llama's.

Read `families` (names and shapes of arrays), then `model_folder` (what is in a directory) and `tokenizer_json`.

Imports from `core`, `config`, `models`, `storage` and `data`.
"""
