"""Every causal LM with decorated experts: quantized while loading, adapted, logits equal to the dequantized model."""

from pathlib import Path

import pytest
import torch
import transformers

from halfbyte.adapters.expert_adapters import expert_wrappers
from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.loading.load import load_model
from halfbyte.modeling.architectures import expert_stacks, runs_experts
from halfbyte.tensor import QuantizedTensor
from tests.helpers.all_families import NAMES, build
from tests.helpers.expert_models import dequantized

pytestmark = pytest.mark.slow

MODELS = Path(transformers.__file__).parent / "models"
DECORATED = {path.parent.name for path in MODELS.glob("*/modeling_*.py") if "@use_experts_impl" in path.read_text()}
FAMILIES = [name for name in NAMES if name.removesuffix("_text") in DECORATED or name in DECORATED]
IDS = torch.arange(10, 30)[None]


def built(name):
    try:
        model = build(name).eval()
    except Exception as error:
        pytest.skip(f"it does not build: {error}")
    if not any(runs_experts(module) for module in model.modules()):
        pytest.skip("no experts by default")
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_in_nf4(name, tmp_path):
    model = built(name)
    model.save_pretrained(tmp_path)
    stored = load_model(str(tmp_path), dtype="float32", device="cpu")
    stacks = expert_stacks(model, [])
    assert all(isinstance(stored.get_parameter(stack), QuantizedTensor) for stack in stacks)
    mine, expected = logits(stored), logits(dequantized(model.float(), stored))
    assert (mine - expected).abs().max() <= 2e-5 * expected.abs().max()

    adapted = add_adapter(stored, RunConfig(model_name_or_path="m", dataset="d", r=2)).train()
    wrappers = dict(expert_wrappers(adapted))
    assert wrappers.keys() == {f"base_model.model.{stack}" for stack in stacks}
    adapted(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(wrapper.lora_B["default"].weight.grad.any() for wrapper in wrappers.values())
