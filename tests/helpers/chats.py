"""A tokenizer with a chat template, and conversations."""

import json

from dipaco_jax.data import json_tokenizer

TEXT = ['def f(x):\n    return {x: [1, 2, 3]}\n']
START, END = '<|im_start|>', '<|im_end|>'
CHATML = (
  "{%- for message in messages %}\n  {{- '<|im_start|>' + message.role + '\\n' }}"
  "{%- generation %}{{ message['content'] | trim }}{%- endgeneration %}{{ '<|im_end|>\\n' }}\n{%- endfor %}"
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer(**files) -> json_tokenizer.JsonTokenizer:
  given = dict(json_tokenizer.train(TEXT * 20, 270))
  made = json_tokenizer.tokenizers.Tokenizer.from_str(given['tokenizer.json'].decode())
  made.add_special_tokens([START, END])
  made.add_tokens(['<think>'])
  given['tokenizer.json'] = made.to_str().encode()
  given['tokenizer_config.json'] = json.dumps({'eos_token': END} | files.pop('config', {})).encode()
  return json_tokenizer.JsonTokenizer(given | {f'{name}.jinja': source.encode() for name, source in files.items()})


def chat(*contents) -> list[dict[str, str]]:
  roles = ['user', 'assistant'] * len(contents)
  return [{'role': role, 'content': content} for role, content in zip(roles, contents, strict=False)]
