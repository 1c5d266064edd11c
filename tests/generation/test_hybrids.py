"""Layers with recurrent state, and sinks: tokens equal transformers', independent of batch, seat and preemption."""

import pytest
import torch

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.generation import Rollouts, Sampling
from halfbyte.generation.decoder import DeltaNetLayer
from halfbyte.generation.engine import StaticEngine
from halfbyte.loading.load import load_model
from halfbyte.utils import notices
from tests.helpers import decoding
from tests.helpers.decoding import halfbyte_greedy, transformers_greedy
from tests.helpers.patch_models import quantize, tiny

# More than a chunk of the recurrence, less than its convolution's kernel, and between.
PROMPTS = [*decoding.PROMPTS, [at % 97 + 2 for at in range(150)]]
HYBRIDS = ["Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def answered(model, engine, new=20, n=3, **keys):
    notices.reset_notices()
    sampling = keys.pop("sampling", Sampling())
    found = engine.generate(PROMPTS, n, max_new_tokens=new, sampling=sampling, stops=[], **keys)
    assert not any(key.startswith("rollouts") for key in notices.notices_so_far()), notices.notices_so_far()
    return found


def sharp(model):
    """Its adapter matters more."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(5)
    return model.eval()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_equal_transformers(name, device):
    """Packed weights and an adapter; on a GPU the steps of both engines are graphs."""
    model = sharp(quantize(tiny(name))).to(device)
    expected = [transformers_greedy(model, ids) for ids in PROMPTS]
    assert halfbyte_greedy(model, PROMPTS) == expected
    assert [each.ids for each in answered(model, Rollouts(model, rows=5))] == [
        own for own in expected for _ in range(3)
    ]
    with model.disable_adapter():
        base = [transformers_greedy(model, ids) for ids in PROMPTS]
    assert halfbyte_greedy(model, PROMPTS[:2] * 2, adapter=["default", None, None, "default"]) == [
        expected[0], base[1], base[0], expected[1],
    ]  # fmt: skip


def packed(tmp_path, device):
    """gpt-oss with its experts in NF4, attention and experts adapted."""
    tiny("GptOss", adapter=False).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", device=device)
    model = add_adapter(model, RunConfig(model_name_or_path="m", dataset="d", output_dir="o", r=4, lora_alpha=8.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_a_model_with_sinks_equal_transformers(device, tmp_path):
    """With a window in every other layer. Sinks that are trained are read as they are."""
    model = packed(tmp_path, device)
    expected = [transformers_greedy(model, ids) for ids in PROMPTS]
    assert halfbyte_greedy(model, PROMPTS) == expected
    engine = Rollouts(model, rows=5)
    assert [each.ids for each in answered(model, engine)] == [own for own in expected for _ in range(3)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.add_(4)
    changed = [transformers_greedy(model, ids) for ids in PROMPTS]
    assert halfbyte_greedy(model, PROMPTS) == changed != expected
    assert [each.ids for each in answered(model, engine)] == [own for own in changed for _ in range(3)]


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_rows_continue_unchanged(device):
    wide = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}  # whose state is more than a page
    model = sharp(quantize(tiny("Qwen3_5Text", shape=wide))).to(device)
    keys = {"new": 60, "n": 4, "sampling": Sampling(1.0, seed=3)}
    roomy = Rollouts(model, rows=16)
    expected = answered(model, roomy, **keys)
    decoder = roomy._decoder
    assert decoder.seats == 18  # one for each row, one for a cached prompt, and seat 0
    few = Rollouts(model, rows=16, memory_gib=2 * 8 * decoder.state_bytes / 2**30)
    found = answered(model, few, **keys)
    assert few._decoder.seats == 8  # states take half of the memory at most
    assert few._decoder.pages < decoder.pages
    assert [each.ids for each in found] == [each.ids for each in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-3, atol=1e-3)
    longer = answered(model, few, **keys | {"new": 70})  # the same engine
    assert [each.ids[:60] for each in longer] == [each.ids for each in expected]


def test_log_probabilities_equal_the_training_forward():
    """The chunked recurrence of prompts and the single steps of decoding compute the same model."""
    model = sharp(quantize(tiny("Qwen3Next")))
    for found, ids in zip(answered(model, Rollouts(model), n=1), PROMPTS, strict=True):
        whole = torch.tensor([[*ids, *found.ids]])
        with torch.no_grad():
            logits = model(input_ids=whole, use_cache=False).logits[0, len(ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(found.ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(found.log_probs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_adapters_and_states_are_reset_in_each_call():
    model = sharp(quantize(tiny("Qwen3_5Text")))
    first = halfbyte_greedy(model, PROMPTS)
    engine = StaticEngine(model, ["default"], 32, None)
    assert sum(isinstance(layer, DeltaNetLayer) for layer in engine.layers) == 1
    sharp(model)
    assert engine.renew(model)
    assert first != halfbyte_greedy(model, PROMPTS) == [transformers_greedy(model, ids) for ids in PROMPTS]
