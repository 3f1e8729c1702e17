"""The command `size`: its measurements, suggestions and errors, and that the suggested command works."""

import os
import shlex
import subprocess
import sys

import pytest
from repository import ROOT

from dipaco_jax import size
from dipaco_jax.command_line import config_file
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.planning import sizing


def test_text_is_measured_in_files(tmp_path):
  (tmp_path / 'a.txt').write_bytes(b'x' * 1000)
  (tmp_path / 'b.txt.gz').write_bytes(b'x' * 100)
  assert size.measure_text((f'{tmp_path}/*',)) == (2, 1300.0)


@pytest.mark.parametrize('device, words', [
  ('h99', 'write one of cpu, a100'), ('v5e-0', '--device=v5e-0'), ('v5e-x', '--device=v5e-x'), ('cpu-4', 'all of its'),
])  # fmt: skip
def test_an_unknown_device_is_rejected(device, words):
  with pytest.raises(InputError, match=words):
    size.find_hardware(device, 10**6)


def test_several_devices_are_as_many_times_as_fast():
  one, eight = (size.find_hardware(name, 10**8) for name in ('v5e', 'V5E-8'))
  assert eight.flops_per_s == 8 * one.flops_per_s and eight.memory_bytes == one.memory_bytes


def test_the_speed_is_that_of_the_size_that_is_chosen():
  plan, hardware = size.choose(1e7, 'h100', 24.0)
  assert plan.size.parameters < 5e6 and hardware.flops_per_s == sizing.efficiency(plan.size.parameters) * 989e12


@pytest.mark.parametrize('plan_size', sizing.SIZES, ids=lambda z: f'width {z.width}')
@pytest.mark.parametrize('num_paths', [4, 16])
def test_the_command_makes_the_plan(plan_size, num_paths):
  plan = sizing.Plan(plan_size, num_paths, 123, 45)
  words = shlex.split(size.command_line(plan, "it's/*.txt"))
  assert words[:2] == ['dipaco', 'train']
  rest, overrides = config_file.split(words[2:])
  made = settings.from_dict(config_file.read(rest[0].removeprefix('--config='), overrides))
  assert made.data.train == ("it's/*.txt",) and made.num_paths == num_paths
  assert (made.pretrain.steps, made.train.phases, made.model.width) == (123, 45, plan_size.width)
  assert (made.outer.optimizer == 'sgd') == (plan_size is not sizing.PAPER)
  assert tuple(made.levels) == plan.levels


def test_memory_grows_with_paths_on_a_device():
  plan = sizing.Plan(sizing.PAPER, 16, 100, 10)
  assert size.estimate_bytes(plan, 1) > size.estimate_bytes(plan, 8) > size.estimate_bytes(plan, 16)
  warned = size.warnings(plan, size.Hardware('v5e', 1, 1e12, 16e9, ''))
  assert any(line.startswith('memory is short') for line in warned)


def run(*options: str) -> subprocess.CompletedProcess:
  command = [sys.executable, '-m', 'dipaco_jax', 'size', *options]
  return subprocess.run(command, env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, timeout=60)


def test_a_table_and_a_command_are_printed():
  done = run('--text_bytes=4e9', '--hours=8', '--device=h100')
  assert done.returncode == 0 and not done.stderr
  rows = dict(line.split(maxsplit=1) for line in done.stdout.split('\n\n')[0].splitlines())
  assert list(rows) == ['text', 'device', 'path', 'grid', 'steps', 'tokens', 'hours', 'memory']
  assert done.stdout.splitlines()[-1].startswith('dipaco train --config=text --workdir=runs/mine ')


@pytest.mark.parametrize('options, words', [
  ([], "name the text, as --data='books/*.txt'"),
  (['--text_bytes=1e6', '--hours=0'], '--hours=0.0 should be above 0'),
  (['--data=nowhere/*.txt'], "'nowhere/*.txt' matches no file"),
])  # fmt: skip
def test_wrong_options_are_rejected(options, words):
  done = run(*options)
  assert done.returncode == 2 and words in done.stderr
