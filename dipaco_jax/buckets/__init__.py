"""A bucket as the workdir of a run on one machine or on several.

Read `mirror` first: a run's folder on a disk, and its copy in the bucket. `run_objects` says what of the folder lasts,
`upload_queue` sends it in the background, and `bucket_lock` keeps a second run out. With several processes, `disks`
chooses between a shared disk and disks of their own, whose files `disks_apart` and `other_disk` exchange.

Imports from `core`, `processes` and `storage`.
"""
