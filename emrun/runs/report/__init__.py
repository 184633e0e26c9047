"""Makes the page of runs: one HTML file that needs no network, as `emrun report` writes it.

Read `page.py` first: the parts of the page and their order. `curves.py` reads what runs have recorded, and keeps few
enough points; `facts.py` reads the rest of a run directory; `one_run.py` and `several_runs.py` say what is shown, and
`run.html` and `runs.html` are their templates; `drawings.py` and `drawings.html` draw what needs no script.
`templates.py` reads the templates, in which all text is escaped. `page.js` draws the curves with uPlot
(`uplot.min.js`, version 1.6.32, MIT, see `uplot.license.txt`), `page.css` is the style.

May import: what `runs` may.
"""
