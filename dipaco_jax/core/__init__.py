"""The papers' mathematics apart from the network, and what every room needs: settings, errors, text from outside.

Read `grid` (axes, levels, paths) and `modules` (what paths share) first, then `inner` and `outer`, the two
optimizations of Algorithm 1. `exact_sum`, `screening` and `averaging_gap` belong to the outer one. `bootstrap`,
`seeded_hash` and `printable` stand alone. Everything here is pure: arguments in, results out.

Imports nothing from other rooms.
"""
