"""The name and license of a base model, as its folder states them."""

import json

import pytest

from dipaco_jax.huggingface import origin


@pytest.mark.parametrize(
  ('files', 'expected'),
  [
    ({}, {'name': 'small'}),
    ({'config.json': json.dumps({'_name_or_path': 'who/small-1b'})}, {'name': 'who/small-1b'}),
    ({'config.json': json.dumps({'_name_or_path': '/home/me/small'})}, {'name': 'small'}),
    ({'config.json': json.dumps({'_model_name_or_path': 'Smollm2 135M 8k'})}, {'name': 'small'}),
    ({'config.json': '[]'}, {'name': 'small'}),
    ({'README.md': '---\ntags: x\nlicense: apache-2.0\n---\n'}, {'name': 'small', 'license': 'apache-2.0'}),
    ({'README.md': "---\nlicense: 'gemma'\n---\n"}, {'name': 'small', 'license': 'gemma'}),
    ({'README.md': 'license: mit\n'}, {'name': 'small'}),
    ({'LICENSE': 'Apache License\n   Version 2.0, January 2004'}, {'name': 'small', 'license': 'apache-2.0'}),
    ({'LICENSE': 'all rights reserved'}, {'name': 'small'}),
  ],
)
def test_a_folder_states_its_name_and_license(tmp_path, files, expected):
  folder = tmp_path / 'small'
  folder.mkdir()
  for name, text in files.items():
    (folder / name).write_text(text)
  assert origin.describe(str(folder)) == expected


def test_a_model_on_the_hub_has_its_name(monkeypatch):
  monkeypatch.setattr(origin, '_read', lambda folder, name: b'')
  assert origin.describe('hf://who/small') == {'name': 'who/small'}
