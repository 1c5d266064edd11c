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


def test_results_may_be_missing(tmp_path):
    assert page.rendered(tmp_path) == {page.PAGE: page.HEAD}
    (tmp_path / "other.json").write_text("{}")
    assert page.rendered(tmp_path) == {page.PAGE: page.HEAD}


def test_packed_steps_and_small_batch_products_have_their_places(tmp_path):
    made_on = {"commit": "abc", "device": "GPU", "versions": {"torch": "1.2"}}
    run = {"ms": 900.0, "tokens_per_second": 18204.4, "first_step_seconds": 2.0, "peak_gib": 60.0}
    runs = {"halfbyte": run, "unsloth": {"error": "out of memory"}}
    packed = {"model": "llama-3.1-8b", "tokens": 1000, "documents": [400, 600], "floor": {"ms": 720.0}, "runs": runs}
    row = {"shape": "8x16", "batch": 1, "us": 2.0, "cublas_us": 4.0, "of_copy": 0.5}
    formats = {"rows": [row | {"spec": "int8"}]}
    for name, result in (
        ("packed_x", packed),
        ("packed_attention_x", {}),
        ("gemv_x", {"rows": [row]}),
        ("gemv_formats_x", formats),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({**made_on, **result}))
    made = page.rendered(tmp_path)
    assert made.keys() == {page.PAGE, "plots/step.svg", "plots/memory.svg", "plots/gemv_formats.svg"}
    text = made[page.PAGE]
    assert "| **8B packed, 2 in 1000**, floor | 720.0 |" in text
    assert "| halfbyte | 900.0 | 0.800 | 18,204 | 60.00 | 2.0 |" in text
    assert "| 8×16 | nf4 | 1 | 2.0 | 4.0 | 2.00 | 50% |" in text
    assert "| 8×16 | int8 | 1 | 2.0 | 4.0 | 2.00 | 50% |" in text
    assert "commit abc, GPU, torch 1.2" in text
    assert "python -m benchmarks" not in text.partition("## ")[2]  # no such case
    assert "900 ms" in made["plots/step.svg"]
