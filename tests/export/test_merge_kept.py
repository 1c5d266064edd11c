"""How much of the update and of the loss survives in every target."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from halfbyte.cli.commands import merge_run
from halfbyte.export.fidelity import Loss
from halfbyte.export.merge import EXCESS, higher_loss_error, merge
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.load import load_model
from halfbyte.runs.saved import load_saved
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.notices import notices_so_far
from tests.helpers.merge_runs import save_trained_base, tensors, train_run

EIGHT_BITS = ["bnb-int8", "fp8-block", "fp8", "fp8-tensor"]
FOUR_BITS = ["nvfp4-modelopt", "mxfp4", "bnb-nf4", "bnb-fp4", "kbit4", "hqq4", "int4", "nvfp4"]
QUICK = (*EIGHT_BITS[:2], *FOUR_BITS[:2])
SLOW = [pytest.param(target, marks=pytest.mark.slow) for target in (*EIGHT_BITS[2:], *FOUR_BITS[2:])]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    # sides of 128, which every target holds
    return save_trained_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """On the base in NF4."""
    return train_run(tmp_path_factory.mktemp("run") / "run", base)


@pytest.mark.slow
def test_the_retained_share_is_printed_without_verification(tmp_path, run, capsys):
    merge_run(run, tmp_path / "kept", "auto", False, "bnb-nf4")
    assert "original" in (out := capsys.readouterr().out)
    assert re.search(r"\d%", out)
    assert "merge-kept" not in notices_so_far()
    merge_run(run, tmp_path / "lost", "dequantized", False, "bnb-nf4")
    assert "merge-kept" in notices_so_far()


@pytest.mark.parametrize(
    ("merged", "bits", "quantized", "refused"),
    [(1.02, 4, True, True), (1.011, 4, True, False), (1.02, 4, False, False), (1.02, 3, True, False)],
)
def test_the_loss_may_increase_by_a_hundredth_of_a_nat(merged, bits, quantized, refused):
    """Two standard errors are allowed. Below 4 bits, and for runs on 16-bit weights, the loss is only reported."""
    loss, packing = Loss(merged, 1.0, 0.002, 4000, True), SimpleNamespace(bits=bits, name="nf4")
    assert (higher_loss_error(loss, packing, quantized) is not None) == refused


@pytest.mark.slow
@pytest.mark.parametrize("onto", ["original", pytest.param("dequantized", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", [*QUICK, *SLOW])
def test_every_target_retains_the_update_or_is_refused(tmp_path, run, target, onto):
    needed = 0.99 if target in EIGHT_BITS else 0.98
    try:
        report = merge(run, tmp_path / "merged", base=onto, quantize=target)
    except ConfigError as error:
        refused = error.message
    else:
        kept, loss = report.kept[onto], report.targets[onto].loss
        assert kept.share + 2 * kept.error >= needed
        assert loss.excess - 2 * loss.error <= EXCESS
        assert loss.tokens > 500
        return
    assert target in FOUR_BITS
    assert target in refused
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_the_bnb_int8_folder_is_loaded_trained_on_and_merged(tmp_path, run):
    """A merge for bitsandbytes is a base like any other; its bytes are kept."""
    merge(run, tmp_path / "int8", base="original", quantize="bnb-int8", verify=False)
    stored, model = tensors(tmp_path / "int8"), load_model(str(tmp_path / "int8"), dtype="float32", device="cpu")
    linears = {name: each.weight for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    assert len(linears) == 14
    for name, weight in linears.items():
        assert torch.equal(weight.parts["codes"], stored[f"{name}.weight"]), name
        assert torch.equal(weight.parts["absmax"], stored[f"{name}.SCB"]), name
    again = train_run(tmp_path / "again", tmp_path / "int8", max_steps=4)
    assert json.loads((again / "checks.json").read_text())["adapter_reload"]["equal"]
    found = load_saved(str(again)).model
    assert torch.equal(found.get_submodule("base_model.model.lm_head").weight, model.lm_head.weight)
    report = merge(again, tmp_path / "merged")
    assert report.target == "dequantized"
    assert report.kept["dequantized"].share > 0.9
