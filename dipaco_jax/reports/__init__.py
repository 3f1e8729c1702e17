"""What a run shows: report.json, its page, and the pictures.

Read `run_report` first. `history` reads curves, `figures` chooses and captions pictures, `plots` draws them in the
style of `plot_style`; `report_page` and `html_page` make the page.

Imports from `core`, `routing`, `storage`, `training`, `pipeline` and `inference`.
"""
