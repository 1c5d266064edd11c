"""Checks on a tiny model that the model's own code does not allow: the run goes on, and a notice says so."""

import pytest
from transformers import LlamaConfig

from halfbyte.config.resolved import Parallel
from halfbyte.modeling import shifted_attention, tiny_model
from halfbyte.modeling.shifted_attention import check_shifted_attention
from halfbyte.modeling.tiny_model import check_positions
from halfbyte.parallel import context
from halfbyte.parallel.context import check_context_parallel
from halfbyte.utils.notices import notices_so_far

CHECKS = {
    "shift_attn-untried": lambda config: check_shifted_attention(config, 64),
    "context-untried": lambda config: check_context_parallel(config, Parallel(context=2)),
    "positions-untried": lambda config: check_positions(config, 10**6),
}


@pytest.mark.parametrize("key", CHECKS)
def test_an_untried_check_leaves_a_notice(key, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError

    for module in (shifted_attention, tiny_model, context):
        monkeypatch.setattr(module, "tiny_model", fail)
    CHECKS[key](LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4))
    assert key in notices_so_far()
