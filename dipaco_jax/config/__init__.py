"""What a user chooses: fields with their defaults and checks, and what the settings choose of the algorithm.

Read `settings` first: it holds every field and default, section by section (`model_sections`, `training_sections`,
`run_sections`). `fields` describes and parses them, `text_settings` says where text comes from, and `settings_checks`
rejects bad ones. `choices` and `wires` turn settings into optimizers, sampled paths and timetables of `algorithm`;
`dense_control` makes the settings of the dense model that a run is compared with; `owners` says which paths an owner of
text has; `extension` loads parts that users write.

Imports from `algorithm` and `core`.
"""
