"""Text parts of models that take images: fused like their families, whatever stands beside them left alone."""

import pytest
import torch
from patch_models import MULTIMODAL, assert_same, batch, loss_and_gradients, tiny, with_image

import halfbyte


def inputs_of(family: str, image: bool) -> dict[str, torch.Tensor]:
    return with_image(family, batch()) if image else batch()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_loss_and_gradients_equal_the_stock_models(family, image, checkpointing):
    model, inputs = tiny(family), inputs_of(family, image)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    expected = loss_and_gradients(model, inputs)
    own = model(**inputs, use_cache=False).loss.item()
    assert expected[0] / (inputs["labels"][:, 1:] != -100).sum().item() == pytest.approx(own, rel=1e-5)
    report = halfbyte.patch(model)
    assert_same(loss_and_gradients(model, inputs), expected)
    assert report.family == family
    assert not report.unfused
    assert report.fused["RoPE"] == report.fused["LoRA of o_proj"] == report.fused["gated activation"] == 2
    assert not any("_halfbyte_family" in module.__dict__ for name, module in model.named_modules() if "vis" in name)
