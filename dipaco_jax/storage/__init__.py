"""Bytes that are published whole or not at all, on disks and in buckets.

Read `checkpoint` first. `seals` says that a file is as it was written, `records` holds sequences, `object_store` is
where islands exchange objects, over the `backends` that there are.

Imports from `core`.
"""
