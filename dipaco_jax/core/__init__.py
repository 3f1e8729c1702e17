"""The papers' mathematics apart from the network, and what every room needs: settings, errors, text from outside.

`settings` holds every field and default (`fields` describes and parses them, `settings_checks` refuses bad ones);
`errors` ends commands. Then read `grid` (axes, levels, paths), `modules` (what paths share), and `inner` and `outer`,
the two optimizations of Algorithm 1. `exact_sum`, `screening` and `averaging_gap` belong to the outer one. `bootstrap`,
`paired` (which needs it), `seeded_hash` and `printable` stand alone. Everything here but `ExactSum`, an accumulator, is
pure: arguments in, results out.

Imports nothing from other rooms.
"""
