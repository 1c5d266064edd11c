"""halfbyte.patch on models loaded with BitsAndBytesConfig, under install() and with the real package."""

import pytest
import torch

import halfbyte
from tests.helpers.bnb_models import (
    CONFIGS,
    adapted,
    assert_patched_equals_stock,
    assert_same_step,
    load,
    save_llama,
    step,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_patched_step_with_the_real_package(folder, tmp_path, name):
    pytest.importorskip("bitsandbytes")
    assert_patched_equals_stock(folder, tmp_path, name)


@pytest.fixture
def real_model(folder):
    pytest.importorskip("bitsandbytes")
    return adapted(load(folder, "nf4-nested"))


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


def test_a_replaced_weight_is_read(real_model):
    """Merging and unmerging replaces the packed weight; so does loading another one."""
    halfbyte.patch(real_model)
    step(real_model)
    real_model.merge_adapter()
    real_model.unmerge_adapter()
    found = step(real_model)
    halfbyte.unpatch(real_model)
    assert_same_step(found, step(real_model), 1e-6)
