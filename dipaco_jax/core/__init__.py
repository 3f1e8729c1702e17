"""What every room needs and what needs no settings.

`errors` end a command with one line, `printable` makes text from outside fit for a terminal, and `json_text` parses
JSON that others wrote. `seeded_hash` draws by content; `bootstrap` makes intervals, and `paired` compares runs with it.

Imports from `algorithm`.
"""
