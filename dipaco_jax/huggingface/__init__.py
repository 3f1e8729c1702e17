"""Import and export of models in the folder layout of the Hugging Face libraries.

Read `families` (names and shapes of arrays), then `model_folder` (the files of a folder), `weight_files` and
`tokenizer_json`. `config_json` reads config.json, with `json_fields` (types of values), `block_kinds` and `rope_json`
(what differs between blocks, and positions) and `silent_keys` (what may be ignored). `pretrained` completes a config
from the folder of its base model, and `origin` notes the name and license of that model.

Imports from `core`, `config`, `models`, `storage` and `data`.
"""
