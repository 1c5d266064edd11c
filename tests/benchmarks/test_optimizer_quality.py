"""benchmarks.optimizer_quality: every row trains a tiny model, with the same start and data, and its command parses."""

import pytest
import torch

from benchmarks import optimizer_quality as quality
from tests.helpers.tiny_runs import tiny_llama

STEPS = 4


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    def load(path, name, dtype, device):
        torch.manual_seed(3)
        return tiny_llama().to(getattr(torch, dtype))

    monkeypatch.setattr(quality, "load", load)


def rows():
    return torch.randint(3, 60, (20, 16), generator=torch.Generator().manual_seed(1))


def trained(name):
    model, optimizer, _ = quality.prepared("-", quality.RUNS[name], "cpu")
    before = {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad}
    quality.train(model, optimizer, rows(), STEPS)
    return before, dict(model.named_parameters())


@pytest.mark.parametrize("name", quality.RUNS)
def test_a_row_trains_its_parameters(name):
    run = quality.RUNS[name]
    pytest.importorskip(run.package)
    before, after = trained(name)
    assert all("lora_" in key for key in before) == run.lora
    assert all(torch.isfinite(after[key]).all() for key in before)
    assert any(not torch.equal(after[key], value) for key, value in before.items())


def test_rows_of_the_same_rule_start_and_end_alike():
    (start, end), (others, theirs) = trained("adamw"), trained("torch AdamW")
    for key, value in start.items():
        assert torch.equal(value, others[key])
        torch.testing.assert_close(end[key], theirs[key], rtol=0, atol=1e-6)


def test_rows_are_chosen_by_name():
    given = quality.parser().parse_args(["MODEL", "TEXT", "--only", "lora+ 16", "muon"])
    assert given.only == ["lora+ 16", "muon"]
    assert quality.parser().parse_args(["MODEL", "TEXT"]).only == [*quality.RUNS]
    with pytest.raises(SystemExit):
        quality.parser().parse_args(["MODEL", "TEXT", "--only", "adam"])
