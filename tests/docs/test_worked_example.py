"""CONTRIBUTING's worked example does what it says."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.generation import generate
from halfbyte.modeling import head
from halfbyte.utils.notices import notices_so_far, reset_notices

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"\*A worked example.*?```python\n(.*?)```", TEXT, re.DOTALL).group(1)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}


class Multiplied(LlamaForCausalLM):
    """Llama, but its logits are three times as large."""

    def forward(self, **inputs):
        outputs = super().forward(**inputs)
        outputs.logits = outputs.logits * self.config.final_multiplier
        return outputs


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Multiplied(LlamaConfig(**SIZES, final_multiplier=3.0)).eval()


def test_a_head_with_a_new_logit_scale(model, monkeypatch):
    monkeypatch.setattr(head, "LOGIT_SCALES", dict(head.LOGIT_SCALES))
    ids = torch.randint(0, 61, (2, 9))
    logits = model(input_ids=ids).logits
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    reset_notices()
    loss, _ = head.causal_lm_loss(model, {"input_ids": ids, "labels": ids})
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert "full_logits" in notices_so_far()  # right, and the dear way

    exec(EXAMPLE, {})
    reset_notices()
    torch.manual_seed(0)
    known = Multiplied(model.config)
    loss, _ = head.causal_lm_loss(known, {"input_ids": ids, "labels": ids})
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert "full_logits" not in notices_so_far()
    assert head.head_from_config(model.config).scale == 3.0
    assert len(generate(known, [[3, 4, 5]], max_new_tokens=4, stops=[])[0]) == 4
