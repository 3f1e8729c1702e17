"""Files and objects that are published atomically, on disks and in buckets.

Read in this order: `files` (write aside, sync, rename), `publishing` (the same with checksums), `seals` (checks them)
and `remedies` (what to do about a damaged file); `tensors`, `records` and `module_store` (the contents of files);
`lock` and `retry`; `object_store` (where islands exchange objects) on its two `backends`; `remote_files` (text in
buckets); `gateway_link` and `gateway_objects` (a worker's end of a gateway); and `user_modules` (modules of Python that
a config names, and which of them are imported).

Imports from `algorithm`, `core`, `config` and `processes`.
"""
