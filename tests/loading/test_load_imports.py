"""Checkpoints of other tools through the loader: a tiny Llama in GPTQ, AWQ, ModelOpt or MXFP4 entries."""

import pytest
import torch

from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from tests.helpers.imported_checkpoints import CONFIGS, converted


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.name)
def test_a_checkpoint_keeps_its_bytes(cls, tiny_checkpoint, tmp_path):
    states = converted(tiny_checkpoint("Llama"), tmp_path / "model", cls)
    model = load_model(str(tmp_path / "model"), device="cpu", dtype="float32")
    for name, state in states.items():
        expected = QuantizedTensor(*cls.from_state(state, name))
        weight = model.get_parameter(name)
        assert type(weight.format) is cls
        for part, value in expected.parts.items():
            assert torch.equal(weight.parts[part], value), (name, part)
    x = torch.arange(12).view(1, 12)
    assert torch.isfinite(model(input_ids=x).logits).all()
