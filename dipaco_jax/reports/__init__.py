"""What a run shows: report.json, its page with pictures and captions, and the same in a terminal.

Read `run_report` first. `run_data` and `history` read what a page is made from; `figures` lists the pictures, which
`quality_figures`, `training_figures`, `path_figures` and `cost_figures` choose and caption, and `curve_plots`,
`category_plots`, `heatmap`, `grid_plot` and `timeline_plot` draw. `report_page`, `comparison`, `excerpts_html` and
`model_card` fill the templates beside them, by `pages`.

Imports from `core`, `routing`, `storage`, `training` and `pipeline`.
"""
