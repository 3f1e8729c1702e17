"""What a worker tells of the stages before training while it prepares a run."""

import types

import synthetic

from dipaco_jax.islands import shared_stages
from dipaco_jax.telemetry import metrics_log


def test_prepare_tells_its_stage_and_how_far_the_base_model_is(tmp_path):
  def describe(stages: int, **row) -> dict:
    s = synthetic.make(tmp_path / str(stages), stages=stages, pretrain_steps=120)
    metrics = metrics_log.Metrics(tmp_path, writes=False)  # as a process of islands has it
    if row:
      metrics.write('step', 'pretrain', 30, step=30, **row)
    return shared_stages.describe_stages(
      types.SimpleNamespace(workdir=tmp_path / str(stages), settings=s, metrics=metrics)
    )

  assert describe(0) == {'stage': 'reading and tokenizing text'}
  assert describe(1) == {'stage': 'training the base model'}
  assert describe(1, loss=[2.5]) == {'stage': 'training the base model', 'step': 30, 'of': 120, 'loss': 2.5}
  about = describe(1, loss=[2.5], tokens_per_s=1000.0)
  s = synthetic.make(tmp_path / 'same', stages=1, pretrain_steps=120)
  assert about['left_s'] == 90 * s.pretrain.batch_size * s.model.seq_len / 1000
  assert describe(2, loss=[2.5]) == {'stage': 'routing'}
