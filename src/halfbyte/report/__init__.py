"""Report of a run: report.html and the model card.

run.py       reads the files of a run folder, missing or damaged ones too, and derives figures from them
plots.py     curves and histograms as inline SVG in the page's colours
sections.py  one function per section of the report
page.py      the page: style, headline figures, navigation
card.py      README.md for users of the adapter
"""

from .card import write_card
from .page import write_report

__all__ = ["write_card", "write_report"]
