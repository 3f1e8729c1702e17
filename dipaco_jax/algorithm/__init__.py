"""The papers' mathematics: DiPaCo [arXiv 2403.10616], DiLoCo [2311.08105], Streaming DiLoCo [2501.18512].

Read `reference` first, Algorithm 1 as a plain loop; then `grid` (axes, levels, paths) and `modules` (what paths share),
and `inner` and `outer`, the two optimizations. `streaming` and `compression` thin out what is exchanged; `screening`
leaves out paths that have gone wrong; `exact_sum` and `row_sum` add up contributions in any order to the same bits.

Everything here but `ExactSum` and `RowSum`, which are accumulators, is pure: arrays in, arrays out. It imports JAX,
NumPy, Optax and the standard library, and nothing from other rooms.
"""
