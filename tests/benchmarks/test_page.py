"""docs/benchmarks.md and its plots are those of the results, and results may be missing."""

import json
import re

import matplotlib
import pytest

from benchmarks import page

pytestmark = pytest.mark.xdist_group("page")  # drawn once
PLOTS = sorted(f"plots/{path.name}" for path in (page.DOCS / "plots").iterdir())


@pytest.fixture(scope="module")
def made():
    return page.rendered(page.RESULTS)


def without_ids(svg):
    """Number matplotlib's ids of clip paths and markers: they are hashes that depend on Python and numpy."""
    numbers = {}
    return re.sub(r"\b[mp][0-9a-f]{10}\b", lambda name: numbers.setdefault(name[0], f"id{len(numbers)}"), svg)


def test_the_page_is_up_to_date(made):
    committed = (page.DOCS / page.PAGE).read_text(encoding="utf-8")
    assert committed == made[page.PAGE], "run python -m benchmarks.page"
    assert set(PLOTS) == made.keys() - {page.PAGE} == set(re.findall(r"\((plots/\w+\.svg)\)", committed))


@pytest.mark.parametrize("path", PLOTS)
def test_plots_are_up_to_date(path, made):
    committed = (page.DOCS / path).read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip("drawn by another version of matplotlib")
    assert without_ids(committed) == without_ids(made[path]), "run python -m benchmarks.page"
    assert len(committed) < 100_000


def test_every_plot_says_what_made_it(made):
    text = made[page.PAGE]
    for path in page.RESULTS.glob("step_*.json"):
        result = json.loads(path.read_text())
        assert (
            f"{path.name}`](../benchmarks/results/{path.name}): commit {result['commit']}, {result['device']}" in text
        )
    assert "python -m benchmarks step_llama8b_2x512_h200\n" in text
