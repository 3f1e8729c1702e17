"""Chat templates as models come with them: what a conversation is as one text."""

import json

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import json_tokenizer
from dipaco_jax.inference import chat_template

TEXT = ['def f(x):\n    return {x: [1, 2, 3]}\n']
CHATML = (
  "{%- for message in messages %}\n  {{- '<|im_start|>' + message.role + '\\n' }}"
  "{%- generation %}{{ message['content'] | trim }}{%- endgeneration %}{{ '<|im_end|>\\n' }}\n{%- endfor %}"
  '{%- if tools %}{{ tools | tojson }}{% endif %}'
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def load(template, **config):
  files = dict(json_tokenizer.train(TEXT * 20, 270))
  named = {} if template is None else {'chat_template': template}
  files['tokenizer_config.json'] = json.dumps(json.loads(files['tokenizer_config.json']) | named | config).encode()
  return chat_template.load(json_tokenizer.JsonTokenizer(files))


def chat(*contents, **fields):
  return {'messages': [{'role': 'user', 'content': content} for content in contents]} | fields


def test_a_conversation_is_one_text():
  write = load(CHATML)
  assert write(chat(' hi ')) == '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
  assert write(chat('a', 'b', add_generation_prompt=False)).count('<|im_start|>') == 2
  parts = [{'type': 'text', 'text': 'h'}, {'type': 'image_url', 'image_url': {}}, {'type': 'text', 'text': 'i'}]
  assert write(chat(parts)) == write(chat('hi'))
  assert '[{"name": "é"}]' in write(chat('hi', tools=[{'name': 'é'}]))
  assert load('{{ kind }}')(chat('hi', chat_template_kwargs={'kind': 'x'})) == 'x'


def test_the_default_of_several_templates_counts_and_a_token_that_is_put_in_front_is_not_there_twice():
  several = [{'name': 'tool_use', 'template': 'x'}, {'name': 'default', 'template': '{{ bos_token }}y'}]
  assert load(several, bos_token='<|endoftext|>')(chat('hi')) == '<|endoftext|>y'
  assert load(several, bos_token='<|endoftext|>', add_bos_token=True)(chat('hi')) == 'y'


def test_there_may_be_none():
  assert load(None) is None and load([]) is None


@pytest.mark.parametrize(
  'template, fields, words',
  [
    (CHATML, {}, 'messages should be a list of objects'),
    (CHATML, {'messages': []}, 'messages should be a list of objects'),
    (CHATML, {'messages': ['hi']}, 'messages should be a list of objects'),
    (CHATML, {'messages': [{'content': 'no role'}]}, 'does not take them'),
    ("{{ raise_exception('roles must alternate') }}", chat('hi'), 'does not take them: roles must alternate'),
    ("{{ ''.__class__.__mro__ }}", chat('hi'), 'does not take them: access to attribute'),
    ('{{ messages.append(1) }}', chat('hi'), 'does not take them'),
  ],
)
def test_messages_that_the_template_does_not_take_are_refused(template, fields, words):
  with pytest.raises(InputError, match=words):
    load(template)(fields)


def test_a_template_that_is_none_is_refused():
  with pytest.raises(InputError, match='the chat_template of '):
    load('{% for %}')
