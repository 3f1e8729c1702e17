"""The papers' mathematics that is no network, and what every room needs: settings and their errors.

Read `grid` (axes, levels, paths) and `modules` (what paths share) first, then `inner` and `outer`, the two
optimizations of Algorithm 1; `exact_sum` and `screening` serve the outer one. Everything here is pure: arguments in,
results out.

Imports nothing from other rooms.
"""
