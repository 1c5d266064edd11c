"""Comparisons and other objects as notebooks show them."""

import pytest

import halfbyte
from halfbyte import RunConfig
from halfbyte.utils.errors import ConfigError
from tests.helpers.board_runs import write_run


def test_runs_are_compared_by_figures_and_differing_keys(tmp_path):
    runs = [write_run(tmp_path / name, steps, r=rank) for name, steps, rank in (("<a>", 60, 8), ("b", 90, 16))]
    comparison = halfbyte.compare(*runs)
    assert comparison.keys == {"r": [8, 16]}
    assert len(comparison.figures["Final training loss"]) == 2
    html = comparison._repr_html_()
    assert "<td" in html
    assert "<a>" not in html


@pytest.mark.parametrize("names", [[], ["a"], ["a", "nothing"]])
def test_what_cannot_be_compared_is_named(tmp_path, names):
    write_run(tmp_path / "a")
    with pytest.raises(ConfigError):
        halfbyte.compare(*(tmp_path / name for name in names))


def test_a_configuration_shows_its_given_keys_without_secrets():
    config = RunConfig(model_name_or_path="<m>", dataset="d", r=4, push_to_hub=True, hub_token="hf_secret")
    html = config._repr_html_()
    assert "<th>r</th><td>4</td>" in html
    assert "&lt;m&gt;" in html
    assert "secret" not in html
    assert "learning_rate" not in html
