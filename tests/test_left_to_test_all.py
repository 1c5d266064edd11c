"""`left_to_test_all.txt` names tests that there are."""

from pathlib import Path

HERE = Path(__file__).parent


def test_every_entry_begins_like_a_test():
    lines = (HERE / "left_to_test_all.txt").read_text().splitlines()
    entries = [line.partition(" 1/")[0] for line in lines if line and not line.startswith("#")]
    assert len(entries) > 100
    for entry in entries:
        path, _, test = entry.partition("[")[0].partition("::")
        assert f"def {test}" in (HERE / path).read_text() if test else (HERE / path).exists(), entry
