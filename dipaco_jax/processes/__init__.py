"""How a process starts, waits, shows its progress and ends.

`stopping` ends it within seconds in any case; `processes` is a job of several of them, and `job_watch` notices
when another one has died. `display` shows progress on a terminal, and `time_use` counts seconds by their cause.

Imports from `core`.
"""
