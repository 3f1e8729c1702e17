"""Import and export of models in the folder layout of the Hugging Face libraries.

Read `families` (names and shapes of arrays), then `model_folder` (the files of a folder) and `tokenizer_json`.

Imports from `core`, `config`, `models`, `storage` and `data`.
"""
