"""engines.json: valid entries become engines; errors name the place of an invalid one and the fix."""

import json

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.serving import engines_file
from dipaco_jax.serving.engines_file import Engine

URL = 'http://10.0.0.1:8000/v1'


def parse(content, **environ: str) -> engines_file.Engines:
  data = content if isinstance(content, bytes) else json.dumps(content).encode()
  return engines_file.parse(data, '--engines=e.json', environ)


def test_engines_are_urls_or_objects():
  second = {'url': 'https://[::1]/api/v1', 'model': 'm', 'api_key_env': 'KEY'}
  found = parse({'paths': {'0': [URL + '/', second], '2': [URL]}}, KEY='k')
  assert found.all == (
    Engine(0, URL, '', ''), Engine(0, 'https://[::1]/api/v1', 'm', 'k'), Engine(2, URL, '', '')
  )  # fmt: skip
  assert not found.nearest and parse({'paths': {'0': [URL]}, 'fallback': 'nearest'}).nearest
  assert not parse({'paths': {'0': [URL]}, 'fallback': None}).nearest


def one(engine) -> dict:
  return {'paths': {'0': [engine]}}


@pytest.mark.parametrize(
  'content, words',
  [
    (b'{"paths"', 'e.json is not JSON'),
    (b'\xff', 'e.json is not JSON'),
    (b'{"paths": {"0": ["http://a/v1"], "0": []}}', "'0' occurs twice"),
    ([], 'should be {"paths"'),
    ({}, 'should be {"paths"'),
    ({'paths': {}}, 'should be {"paths"'),
    ({'paths': {'0': [URL]}, 'fallbakc': 1}, "unknown key 'fallbakc'; the keys are"),
    ({'paths': {'0': [URL]}, 'fallback': 'any'}, 'fallback=\'any\' should be "nearest"'),
    ({'paths': {'zero': [URL]}}, 'paths.zero should be the number of a path'),
    ({'paths': {'00': [URL]}}, 'paths.00 should be the number'),
    ({'paths': {'0': URL}}, 'paths.0 should be a list of engines'),
    ({'paths': {'0': []}}, 'paths.0 should be a list of engines'),
    ({'paths': {'0': [URL, URL + '/']}}, 'paths.0[1] is listed twice'),
    (one(3), 'paths.0[0] should be a URL, or an object of url, model, api_key_env'),
    (one({'model': 'm'}), 'paths.0[0]: url is missing'),
    (one({'url': URL, 'model': ''}), 'which are strings'),
    (one({'url': URL, 'key': 'x'}), "unknown key 'key'; the keys are url, model, api_key_env"),
    (one({'url': URL, 'api_key_env': 'NONE'}), 'there is no NONE in the environment: set it'),
    (one({'url': URL, 'api_key_env': 'BAD'}), 'or has a character that is not allowed in a header'),
    (one('ftp://a/v1'), "'ftp://a/v1' should be a URL"),
    (one('http:///v1'), 'should be a URL'),
    (one('http://a:99999/v1'), 'should be a URL'),
    (one('http://[::1/v1'), 'should be a URL'),
    (one('http://a/v1?x=1'), 'should be a URL'),
    (one('http://a b/v1'), 'should be a URL'),
    (one('http://me:secret@a/v1'), 'must not contain a password: name the key with api_key_env'),
    (one('http://a:8000'), "'http://a:8000' should be the base of its API, mostly http://a:8000/v1"),
  ],
)
def test_what_is_wrong_is_named_with_the_fix(content, words):
  with pytest.raises(InputError) as found:
    parse(content, BAD='a\nkey')
  assert words in str(found.value) and str(found.value).startswith('--engines=e.json')


def test_the_newline_of_a_file_is_no_part_of_a_key():
  assert parse(one({'url': URL, 'api_key_env': 'KEY'}), KEY='a key\r\n').all[0].api_key == 'a key'


def test_every_path_has_an_engine_or_a_fallback():
  found = parse({'paths': {'0': [URL], '2': [URL]}})
  with pytest.raises(InputError, match='path 1 has no engine: name one, or set "fallback": "nearest"'):
    engines_file.check_paths(found, 3, '--engines=e.json')
  engines_file.check_paths(found._replace(nearest=True), 3, '--engines=e.json')
  with pytest.raises(InputError, match=r'paths\.2: the paths of this run are 0 to 1'):
    engines_file.check_paths(found._replace(nearest=True), 2, '--engines=e.json')
