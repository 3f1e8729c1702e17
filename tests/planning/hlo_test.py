"""What is read from compiled programs' texts, against hand counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dipaco_jax.planning import hlo

TPU = """
%sliced (p0: f32[12,896,64], p1: s32[]) -> bf16[896,64] {
  %p0 = f32[12,896,64]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %whole = f32[12,896,64]{2,1,0:T(8,128)} bitcast(%p0)
  %slice = f32[1,896,64]{2,1,0:T(8,128)S(1)} dynamic-slice(%whole, %p1, %p1, %p1), dynamic_slice_sizes={1,896,64}
  ROOT %out = bf16[896,64]{1,0:T(8,128)(2,1)} convert(%slice)
}

%body (state: (s32[], f32[12,896,64])) -> (s32[], f32[12,896,64]) {
  %state = (s32[]{:T(128)}, f32[12,896,64]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[12,896,64]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %fusion.1 = bf16[896,64]{1,0:T(8,128)(2,1)} fusion(%x, %i), kind=kLoop, calls=%sliced
  %update = f32[1,896,64]{2,1,0:T(8,128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %y = f32[12,896,64]{2,1,0:T(8,128)} dynamic-update-slice(%x, %update, %i, %i, %i)
  ROOT %out = (s32[]{:T(128)}, f32[12,896,64]{2,1,0:T(8,128)}) tuple(%i, %y)
}

%condition (state: (s32[], f32[12,896,64])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[12,896,64]{2,1,0:T(8,128)}) parameter(0)
  %end = s32[]{:T(128)} constant(12)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %end), direction=LT
}

ENTRY %main (p0: f32[12,896,64]) -> f32[12,896,64] {
  %p0 = f32[12,896,64]{2,1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[12,896,64]{2,1,0:T(8,128)}) tuple(%zero, %p0)
  %loop = (s32[]{:T(128)}, f32[12,896,64]{2,1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  %copy-start = (f32[12,896,64]{2,1,0:T(8,128)S(1)}, f32[12,896,64]{2,1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p0)
  %copy-done = f32[12,896,64]{2,1,0:T(8,128)S(1)} copy-done(%copy-start)
  ROOT %out = f32[12,896,64]{2,1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize('line, kind, size, sent', [
  ('%x = f32[16,8]{1,0} all-gather(%a), replica_groups=[2,8]<=[16], dimensions={0}', 'all-gather', 512, 448),
  ('%x = (f32[2,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%a), replica_groups=[2,8]<=[16]', 'all-gather', 512, 448),
  ('%x = f32[2,8]{1,0} reduce-scatter(%a), replica_groups=[2,8]<=[16], dimensions={0}', 'reduce-scatter', 64, 448),
  ('%x = f32[16,8]{1,0} all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}', 'all-reduce', 512, 768),
  ('%x = f32[16,8]{1,0} all-reduce-start(%a), replica_groups={}, to_apply=%sum', 'all-reduce', 512, 960),
  ('%x = (f32[16,8]{1,0}, f32[16,8]{1,0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}',
   'collective-permute', 512, 512),
])  # fmt: skip
def test_collectives_tell_what_a_device_sends(line, kind, size, sent):
  (found,) = hlo.collectives(line)
  assert (found.kind, found.size, found.sent(16)) == (kind, size, sent)


def test_traffic_is_counted_by_slices_tiles_and_turns_of_loops():
  padded = 896 * 128  # 64 lanes of 128 are filled
  in_loop = 4 * padded + 512 + 2 * padded  # a float32 slice and its place are read, a bfloat16 one is written
  in_loop += 3 * 512  # of the update, which is in vector memory, only the place
  copy = 12 * 4 * padded  # read from HBM, and written to vector memory
  found = hlo.Traffic(TPU)
  assert found.computation_bytes('body') == pytest.approx(in_loop, abs=8 * 512)
  assert found.computation_bytes() == pytest.approx(12 * in_loop + copy, rel=0.01)


RENAMED = """
%renaming (p0: bf16[64,8,128]) -> bf16[512,128] {
  %p0 = bf16[64,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %out = bf16[512,128]{1,0:T(8,128)(2,1)} bitcast(%p0)
}

%product (p0: bf16[64,8,128], p1: bf16[256,512]) -> f32[256,128] {
  %p0 = bf16[64,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  %other = bf16[512,128]{1,0:T(8,128)(2,1)} fusion(%p0), kind=kLoop, calls=%renaming
  ROOT %out = f32[256,128]{1,0:T(8,128)} convolution(%p1, %other), dim_labels=bf_io->bf
}

ENTRY %main (p0: bf16[64,8,128], p1: bf16[256,512]) -> f32[256,128] {
  %p0 = bf16[64,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %out = f32[256,128]{1,0:T(8,128)} fusion(%p0, %p1), kind=kOutput, calls=%product
}
"""


def test_traffic_of_an_operand_that_a_fusion_renames():
  assert hlo.Traffic(RENAMED).computation_bytes() == 2 * 64 * 8 * 128 + 2 * 256 * 512 + 4 * 256 * 128


def test_traffic_of_what_this_machine_compiles():
  x = np.ones((256, 512), np.float32)

  def repeated(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

  w = np.ones((512, 512), np.float32)
  once, often = (
    hlo.Traffic(jax.jit(f).lower(x, w).compile().as_text()).computation_bytes()
    for f in (lambda x, w: jnp.tanh(x @ w), repeated)
  )
  least = x.nbytes + w.nbytes + x.nbytes
  assert least <= once <= 3 * least and 6 * once <= often <= 8 * once + 3 * least


BETWEEN_SLICES = """
%recv.12 = (f32[128,8,128]{2,1,0:T(8,128)}, u32[], token[]) recv(%after-all.12), channel_id=25, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
%recv-done.12 = (f32[128,8,128]{2,1,0:T(8,128)}, token[]) recv-done(%recv.12), channel_id=25, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
%all-gather.10 = f32[2048,128]{1,0:T(8,128)S(1)} all-gather(%bitcast.26), channel_id=39, replica_groups={{0,2},{1,3}}
"""


def test_what_slices_of_tpus_send_each_other_is_counted():
  found = hlo.collectives(BETWEEN_SLICES)
  assert found == [('recv', 4 * 128 * 8 * 128, []), ('all-gather', 4 * 2048 * 128, [[0, 2], [1, 3]])]
