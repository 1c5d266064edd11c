"""Reports of a run: report.html, the model card, and lines on the terminal.

run.py       reads the files of a run folder, missing or damaged ones too, and derives figures from them
plots.py     curves and histograms as inline SVG in the page's colours
sections.py  one function per section of the report
page.py      the page: style, headline figures, navigation
card.py      README.md for users of the adapter
terminal.py  the header, memory, data and live metrics of a run on the terminal
"""
