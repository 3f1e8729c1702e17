"""The router in front of `transformers serve`: exported paths write what our engine writes, whole and streamed."""

import contextlib
import json
import os
import subprocess
import sys
import time

import made_run
import ports
import pytest
import serving
import tokenizers

from dipaco_jax import export
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.inference.trained_run import TrainedRun

pytestmark = pytest.mark.slow
PATHS = 1, 3
PROMPTS = 'The quick', 'lazy dog. The', 'def f(x)'


@contextlib.contextmanager
def serve_with_transformers(folder, log):
  port = ports.free_port()
  line = [sys.executable, '-c', 'from transformers.cli.transformers import main; main()', 'serve', str(folder)]
  line += [f'--port={port}', '--host=127.0.0.1', '--device=cpu']
  with open(log, 'w') as err, subprocess.Popen(line, env=os.environ | {'HF_HUB_OFFLINE': '1'}, stderr=err) as process:
    try:
      yield f'http://127.0.0.1:{port}/v1'
    finally:
      process.terminate()


def test_paths_served_by_transformers_write_what_we_write(tmp_path):
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  pytest.importorskip('fastapi')
  workdir = tmp_path / 'run'
  made_run.write(workdir, made_run.settings(model={'dtype': 'float32'}))
  run = TrainedRun(str(workdir))
  with contextlib.ExitStack() as stack:
    engines = {}
    for path in PATHS:
      export.export(run, path, run.best_versions[path], tmp_path / str(path), 'float32')
      url = stack.enter_context(serve_with_transformers(tmp_path / str(path), tmp_path / f'log-{path}'))
      engines[str(path)] = [{'url': url, 'model': str(tmp_path / str(path))}]
    (tmp_path / 'engines.json').write_text(json.dumps({'paths': engines, 'fallback': 'nearest'}))
    options = f'--engines={tmp_path / "engines.json"}'
    router = serving.Serving(workdir, tmp_path / 'log', options, command='route')
    stack.callback(router.process.communicate)
    stack.callback(router.process.kill)
    router.wait()
    serving.wait_for(lambda: '"paths_without_engine":[0,2]' in router.get('/health')[1])
    ours = Engine(run)
    for prompt in PROMPTS:
      scores = run.router.scores(prompt)
      path = max(PATHS, key=lambda path: scores[path])
      tokens = tuple(run.tokenizer.encode(prompt, eos=False).tolist())
      [right] = ours.generate([Request(tokens, 8, path, temperature=0)])
      body = {'model': 'run', 'prompt': prompt, 'max_tokens': 8, 'temperature': 0}
      status, answer = router.ask(body)
      theirs = tokenizers.Tokenizer.from_file(str(tmp_path / str(path) / 'tokenizer.json'))
      text = theirs.decode(right.tokens[len(tokens) :])  # where bytes are no characters, it is not what we show
      assert status == 200 and answer['choices'][0]['text'] == text
      status, events = router.ask(body | {'stream': True})
      assert status == 200 and events[-1]['choices'][0]['finish_reason'] == 'length'
      assert events[-1]['usage']['completion_tokens'] == 8
    began = time.monotonic()
    assert router.ask({'model': 'run/path-0', 'prompt': 'fox'})[0] == 503 and time.monotonic() - began < 5
