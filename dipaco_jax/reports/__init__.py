"""Reports of a run: report.json, its page with pictures and captions, and summaries for a terminal.

Read `run_report` first. `run_data`, `history`, `module_drift` and `failures` read what a page is made from, and
`headline`, `audit_lines` and `time_table` word the result and its time. `figures` lists the pictures; `path_figures`,
`training_figures` and `island_figures` choose and caption them, and `curve_plots`, `category_plots`, `grid_plot` and
`timeline_plot` draw them in one style (`plot_style`, `palette`), over `token_axis`. `report_page`, with `result_cards`,
`result_tables`, `sample_views` and `excerpt_views`, `comparison`, `owners_page`, `worth_page` and `model_card` fill the
templates beside them, by `pages`, with `amounts` in words. `run_contents` and `paired_runs` compare runs, and
`recipe_outcomes` those of `recipe`. `live_report` writes the page while a run trains.

Imports from `algorithm`, `core`, `config`, `processes`, `storage`, `routing`, `data`, `telemetry`, `huggingface` and
`pipeline`.
"""
