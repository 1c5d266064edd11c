"""halfbyte.patch on models loaded with BitsAndBytesConfig, under install() and with the real package."""

import subprocess
import sys

import pytest
import torch

import halfbyte
from halfbyte.modeling.head import causal_lm_loss, uses_hidden_states
from halfbyte.utils.notices import notices_so_far, reset_notices
from tests.helpers.bnb_models import (
    CONFIGS,
    ROLES,
    adapted,
    assert_patched_equals_stock,
    assert_same_step,
    load,
    save_llama,
    step,
)

UNDER_INSTALL = """
import sys
from pathlib import Path
import halfbyte.bitsandbytes as own
own.install()
from tests.helpers.bnb_models import CONFIGS, assert_patched_equals_stock
for name in CONFIGS:
    assert_patched_equals_stock(Path(sys.argv[1]), Path(sys.argv[2]), name)
import bitsandbytes, peft.tuners.lora.bnb
assert bitsandbytes is own and peft.tuners.lora.bnb.bnb is own
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


def test_patched_step_under_install(folder, tmp_path):
    arguments = ["-W", "ignore", "-c", UNDER_INSTALL, str(folder), str(tmp_path)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CONFIGS)
def test_patched_step_with_the_real_package(folder, tmp_path, name):
    pytest.importorskip("bitsandbytes")
    assert_patched_equals_stock(folder, tmp_path, name)


@pytest.fixture
def real_model(folder):
    pytest.importorskip("bitsandbytes")
    return adapted(load(folder, "nf4-nested"))


def test_checkpointing_and_upcast_norms(folder):
    """`prepare_model_for_kbit_training` makes norms fp32, so that fp32 reaches the linears of a 16-bit model."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    model = load(folder, "nf4-nested", torch.bfloat16, bnb_4bit_compute_dtype=torch.bfloat16)
    model = adapted(peft.prepare_model_for_kbit_training(model))
    expected = step(model)
    reset_notices()
    report = halfbyte.patch(model)
    assert not report.unfused
    assert "upcast-head" in notices_so_far()
    found = step(model)
    assert found[0] == pytest.approx(expected[0], rel=2e-3)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_a_head_in_16_bits_is_not_reported(folder):
    pytest.importorskip("bitsandbytes")
    model = adapted(load(folder, "nf4-nested", torch.bfloat16))
    reset_notices()
    halfbyte.patch(model)
    assert "upcast-head" not in notices_so_far()


def test_autocast(real_model):
    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return step(real_model)

    expected = run()
    halfbyte.patch(real_model)
    assert_same_step(run(), expected, 5e-3)


def test_loss_without_logits(real_model):
    """The fused loss of halfbyte's methods runs on the patched model."""
    expected = step(real_model)
    halfbyte.patch(real_model)
    torch.manual_seed(2)
    tokens = torch.randint(0, 101, (2, 17))
    assert uses_hidden_states(real_model, {"input_ids": tokens})
    real_model.zero_grad()
    loss, count = causal_lm_loss(real_model, {"input_ids": tokens, "labels": tokens})
    (loss / count).backward()
    gradients = {name: p.grad for name, p in real_model.named_parameters() if p.grad is not None}
    assert_same_step(((loss / count).item(), gradients), expected, 1e-6)


@pytest.mark.parametrize("name", ["nf4-nested", "int8"])
def test_generation_reads_the_packed_weights(folder, name):
    pytest.importorskip("bitsandbytes")
    model, prompts = adapted(load(folder, name)).eval(), [[3, 4, 5], [7, 8, 9, 10, 11]]
    found = halfbyte.generate(model, prompts, max_new_tokens=12, stops=[])
    for prompt, answer in zip(prompts, found, strict=True):
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        stock = model.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert answer == stock.tolist()


def test_merged_and_disabled_adapters_run_their_own_forward(real_model):
    halfbyte.patch(real_model)
    with torch.no_grad(), real_model.disable_adapter():
        patched = real_model(input_ids=torch.arange(9)[None]).logits
    halfbyte.unpatch(real_model)
    with torch.no_grad(), real_model.disable_adapter():
        torch.testing.assert_close(patched, real_model(input_ids=torch.arange(9)[None]).logits)


def test_a_foreign_state_stays_unpatched_with_a_reason(real_model):
    """Scales nested in blocks of 128, which halfbyte's kernels do not read, in one layer."""
    import bitsandbytes as real

    linear = real_model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    state = linear.weight.quant_state
    scales = real.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes, second = real.functional.quantize_blockwise(scales - state.offset, blocksize=128)
    state.absmax, state.state2 = codes, second
    report = halfbyte.patch(real_model)
    assert [role for role, _ in report.unfused] == ["up_proj"]
    assert report.fused["LoRA of up_proj"] == 1
    with pytest.raises(NotImplementedError):  # bitsandbytes' own forward
        step(real_model)


def test_a_layer_of_an_unknown_type_stays_unpatched(real_model):
    linear = real_model.get_base_model().model.layers[1].self_attn.o_proj.base_layer
    linear.weight.quant_state.quant_type = "af4"
    report = halfbyte.patch(real_model)
    assert [role for role, _ in report.unfused] == ["o_proj"]
    assert {role: report.fused[f"LoRA of {role}"] for role in ROLES} == dict.fromkeys(ROLES, 2) | {"o_proj": 1}


def test_a_replaced_weight_is_read(real_model):
    """Merging and unmerging replaces the packed weight; so does loading another one."""
    halfbyte.patch(real_model)
    step(real_model)
    real_model.merge_adapter()
    real_model.unmerge_adapter()
    found = step(real_model)
    halfbyte.unpatch(real_model)
    assert_same_step(found, step(real_model), 1e-6)


@pytest.mark.slow
def test_compiled(real_model):
    expected = step(real_model)
    halfbyte.patch(real_model)
    torch._dynamo.reset()
    real_model.forward = torch.compile(real_model.forward, backend="aot_eager", fullgraph=True)
    assert_same_step(step(real_model), expected, 1e-6)
