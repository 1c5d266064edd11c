"""Users of bitsandbytes, unchanged, with the real package and under install(): losses, outputs and files compared.

`tests.helpers.bnb_users` has the programs. One process for each package runs all of them, since imports take 10 s.
"""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.bnb_models import save_llama
from tests.helpers.bnb_users import PACKAGES, STAGES, results

pytestmark = pytest.mark.slow

EXACT = ("transformers-nf4-nested",)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folder of the results of both packages; each stage of a package runs after the stages before it of both."""
    for name in ("bitsandbytes", "peft", "trl"):
        pytest.importorskip(name)
    root = tmp_path_factory.mktemp("users")
    save_llama(root / "llama")
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}  # PEFT writes sets into its config
    with contextlib.ExitStack() as stack:
        processes = {}
        for package, other in zip(PACKAGES, reversed(PACKAGES), strict=True):
            (root / package).mkdir()
            command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.bnb_users", package]
            errors = stack.enter_context(open(root / f"{package}.txt", "w"))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            process = subprocess.Popen([*command, str(root / package), str(root / other)], env=environment, **pipes)
            processes[package] = stack.enter_context(process)
            stack.callback(process.kill)
        for stage in STAGES:
            for package, process in processes.items():
                finished = any(line.strip() == stage for line in process.stdout)
                assert finished, (root / f"{package}.txt").read_text()
            for process in processes.values() if stage == "first" else ():
                process.stdin.write("\n")
                process.stdin.flush()
    return root


def pair(root, case, stage="first"):
    """Results of halfbyte and of bitsandbytes."""
    return results(root / "own", case, stage), results(root / "real", case, stage)


def assert_close(found, expected, tolerance):
    """Compare values recursively: integers and texts are equal, and tensors as close as `tolerance` by the 2-norm."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value, tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for each in zip(found, expected, strict=True):
            assert_close(*each, tolerance)
    elif isinstance(expected, torch.Tensor) and expected.is_floating_point():
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert (found.float() - expected.float()).norm() <= tolerance * expected.float().norm()
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def assert_same_files(root, case, folder):
    written = [
        {path.name: path.read_bytes() for path in (root / package / case / folder).iterdir()} for package in PACKAGES
    ]
    assert written[0].keys() == written[1].keys()
    assert "config.json" in written[0] or "adapter_config.json" in written[0]
    for name, content in written[0].items():
        assert written[1][name] == content, name


@pytest.mark.parametrize("case", ["transformers-nf4-nested", "transformers-int8"])
def test_transformers_load_generate_save_and_reload(root, case):
    """int8 layers round their inputs to fp16 in bitsandbytes, and not in halfbyte, before these are quantized."""
    tolerance = 0 if case in EXACT else 0.01
    assert_close(*pair(root, case), tolerance)
    assert_same_files(root, case, "saved")
    first = results(root / "own", case, "first")
    for package, others in zip(("own", "real"), pair(root, case, "second"), strict=True):
        assert others["differ"] == [], package
        assert len(others["entries"]) > 40
        assert_close(others["logits"], first["logits"], tolerance)
        assert_close(others["tokens"], first["tokens"], 0)


def test_peft_on_4bit_layers_is_bit_equal(root):
    case = "peft-nf4-nested"
    found, expected = pair(root, case)
    assert_close(found, expected, 0)
    assert_same_files(root, case, "adapter")
    assert_same_files(root, case, "merged")
    assert not torch.equal(found["merged"], found["trained"])  # merging rounds to 4 bits again
    assert found["losses"][2] < found["losses"][0]


def test_peft_on_int8_layers(root):
    """Training multiplies unquantized inputs in both packages. Evaluation quantizes them."""
    found, expected = pair(root, "peft-int8")
    assert_close(found["losses"], expected["losses"], 1e-6)
    assert_close(found, expected, 0.01)
    adapters = [load_file(root / package / "peft-int8" / "adapter" / "adapter_model.safetensors")
                for package in PACKAGES]  # fmt: skip
    assert_close(*adapters, 1e-5)


def test_sft_trainer(root):
    """The weights differ where the table search of bitsandbytes' CPU library misses the nearest 8-bit code."""
    case = "trl"
    found, expected = pair(root, case)
    assert set(found["bits"]) == {8, 32}
    assert len(found["losses"]) == 3
    assert_close(found["losses"], expected["losses"], 1e-5)
    assert_close(found, expected, 0.02)
    resumed = pair(root, case, "second")  # from the other package's checkpoint; TRL makes the adapters fp32
    assert_close(*resumed, 0.02)
    for each in resumed:
        assert_close(each["losses"], expected["losses"], 1e-5)
        for name, weight in expected["weights"].items():
            assert_close(each["weights"][name].to(weight.dtype), weight, 0.02)
    states = [torch.load(root / package / case / "run" / "checkpoint-2" / "optimizer.pt", weights_only=True)
              for package in PACKAGES]  # fmt: skip
    for real, own in zip(*(each["state"].values() for each in states), strict=True):
        assert own["step"] == real["step"] == 2
        assert layout(own) == layout(real)


def layout(state):
    """Shapes and dtypes of tensors, by their keys."""
    if isinstance(state, dict):
        return {key: layout(value) for key, value in state.items()}
    return (state.shape, state.dtype) if isinstance(state, torch.Tensor) else type(state)
