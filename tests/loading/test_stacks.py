"""Stacked experts quantized while a model loads: values, bytes, memory, reload, and notices of unquantized stacks."""

import json
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from halfbyte.config import Origin
from halfbyte.formats import Blockwise4, Stack
from halfbyte.loading import expert_stacks as loading
from halfbyte.loading.completeness import check_complete
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ModelError
from tests.helpers.expert_models import MIXTURES, TOKENS, dequantized, mixture, stacks
from tests.helpers.gpt_oss_checkpoint import save_gpt_oss


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from a mixture's name to it and the folder it is saved in."""
    made = {}

    def make(name="Qwen3Moe", **keys):
        key = (name, *sorted(keys.items()))
        if key not in made:
            model, folder = mixture(name, **keys), tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return make


def load(folder, **keys):
    return load_model(str(folder), dtype="float32", device="cpu", **keys)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


NF4, KBIT = {}, {"quantization": {"*": "kbit3"}}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "keys"), [*((name, NF4) for name in MIXTURES), ("Qwen3Moe", KBIT), ("GptOss", KBIT)], ids=str
)
def test_logits_are_those_of_the_dequantized_experts(name, keys, saved, tmp_path):
    model, folder = saved(name)
    stored = load(folder, **keys)
    layers = 1 if name == "DeepseekV3" else 2  # its first is dense
    assert len(stacks(stored)) == 2 * layers
    torch.testing.assert_close(logits(stored), logits(dequantized(model, stored)), rtol=0, atol=1e-6)
    assert (logits(stored) - logits(model)).abs().max() > 1e-3  # it is quantized

    stored.save_pretrained(tmp_path)
    again = load(tmp_path)
    for key, stack in stacks(stored).items():
        assert stacks(again)[key].format == stack.format
        assert all(torch.equal(part, stacks(again)[key].parts[each]) for each, part in stack.parts.items())
    assert torch.equal(logits(again), logits(stored))


def test_bytes_are_those_of_the_stack_that_transformers_makes(saved):
    from bitsandbytes.functional import quantize_4bit

    model, folder = saved()
    for key, stack in stacks(load(folder)).items():
        packed, state = quantize_4bit(model.get_parameter(key).data, quant_type="nf4", compress_statistics=True)
        assert torch.equal(stack.packed, packed)
        assert torch.equal(stack.absmax, state.absmax)
        assert torch.equal(stack.nested_absmax, state.state2.absmax)


def test_what_is_saved_is_bitsandbytes_layout(saved, tmp_path):
    _, folder = saved()
    load(folder).save_pretrained(tmp_path)
    entries = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    assert {key.removeprefix(name) for key in entries if key.startswith(name)} == {
        "", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4"
    }  # fmt: skip
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert name in entry["formats"]["blockwise4:nf4:64:nested"]


def test_one_expert_is_read_at_a_time(saved, monkeypatch):
    _, folder = saved()
    held, most = 0, 0
    read = loading.read_entry

    def counted(entry):
        nonlocal held, most
        tensor = read(entry).clone()
        held += 1
        most = max(most, held)
        weakref.finalize(tensor, let_go)
        return tensor

    def let_go():
        nonlocal held
        held -= 1

    monkeypatch.setattr(loading, "read_entry", counted)
    assert len(stacks(load(folder))) == 4
    assert most <= 4, "gate and up of an expert, and of the next"  # of 8 in a layer


def test_layers_and_patterns_reach_experts(saved):
    _, folder = saved()
    found = stacks(load(folder, skip_quant_first_layers=1))
    assert {key.split(".")[2] for key in found} == {"1"}
    patterns = {"*.experts.*": "kbit2", "*.0.self_attn.*": "16bit", "*": "nf4"}
    found = load(folder, quantization=patterns)
    assert {type(stack.format) for stack in stacks(found).values()} == {Stack}
    assert not isinstance(found.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)
    assert isinstance(found.model.layers[1].self_attn.q_proj.weight.format, Blockwise4)


def test_a_stack_without_full_blocks_stays_in_16_bits_with_a_notice(saved, caplog):
    _, folder = saved("Qwen3Moe", moe_intermediate_size=17)
    notices.reset_notices()
    stored = load(folder, bnb_4bit_blocksize=4096)
    assert not stacks(stored)
    assert "16 bits" in caplog.text


def damaged(folder, to, change):
    entries = load_file(folder / "model.safetensors")
    change(entries)
    save_file(entries, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


def test_a_damaged_experts_tensor_is_named(saved, tmp_path):
    _, folder = saved()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def not_a_number(entries):
        entries[name][3, 4] = float("nan")

    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: expert 2:.*NaN"):
        load(damaged(folder, tmp_path, not_a_number))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        load(damaged(folder, tmp_path, lambda entries: entries.pop(name)))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight.*shape \(31, 64\)"):
        load(damaged(folder, tmp_path, lambda entries: entries.update({name: entries[name][:31].clone()})))


def test_gpt_oss_as_it_is_published(tmp_path):
    """MXFP4 experts and 16-bit linears: the file's codes are kept, never requantized."""
    expected = save_gpt_oss(tmp_path)
    entries = load_file(tmp_path / "model.safetensors")
    check_complete(Origin(str(tmp_path)), transformers.AutoConfig.from_pretrained(tmp_path))
    stored = load(tmp_path)
    assert stacks(stored).keys() == expected.keys()
    for key, stack in stacks(stored).items():
        assert torch.equal(stack.packed, expected[key].packed)
        assert torch.equal(stack.scale, expected[key].scale)
    assert type(stored.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    torch.testing.assert_close(logits(stored), logits(dequantized(mixture("GptOss"), stored)), rtol=0, atol=1e-6)

    gone = {key: value for key, value in entries.items() if not key.endswith("1.mlp.experts.down_proj_scales")}
    save_file(gone, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_scales"):
        load(tmp_path)
