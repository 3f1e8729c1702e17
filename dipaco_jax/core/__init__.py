"""What every room needs: settings, errors, text from outside, and what the settings choose of the algorithm.

`settings` holds every field and default (`fields` describes and parses them, `settings_checks` rejects bad ones);
`choices` and `wires` turn them into optimizers, sampled paths and timetables of `algorithm`; `extension` loads parts
that users write; `errors` ends commands. `bootstrap`, `paired` (which needs it), `seeded_hash` and `printable` stand
alone.

Imports from `algorithm` only.
"""
