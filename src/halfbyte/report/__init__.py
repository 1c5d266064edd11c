"""What a run leaves for people: report.html and the model card.

run.py       the files of a run directory, read with tolerance, and the figures derived from them
plots.py     curves and histograms as inline SVG whose colours follow the page
sections.py  one function per section of the report
page.py      the page around them: style, headline, navigation
card.py      README.md for whoever gets the adapter
"""

from .card import write_card
from .page import write_report

__all__ = ["write_card", "write_report"]
