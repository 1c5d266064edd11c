"""Packed documents do not see each other, in any causal LM of transformers: as the batch is, by bounds, or unpacked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from halfbyte.data.collate import PackedCollator
from halfbyte.evaluation.held_out import measure
from halfbyte.modeling import packing
from halfbyte.modeling.architectures import all_linear
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.packed_forwards import MIN_LENGTH_RATIO, length_groups
from halfbyte.modeling.packing import isolate_documents
from halfbyte.modeling.patch import patch
from halfbyte.utils.errors import ConfigError
from tests.helpers import all_families
from tests.helpers.families import FAMILIES as FUSED
from tests.helpers.families import HYBRIDS, STATES, TEXT_PARTS
from tests.helpers.patch_models import tiny

SOME = {
    "llama": "positions", "gpt2": "positions", "mixtral": "positions", "gemma2": "positions",
    "gpt_oss": "positions", "opt": "unpacked", "bloom": "unpacked", "mpt": "unpacked", "bart": "unpacked",
    "mamba2": "unpacked",
    "lfm2": "bounds" if transformers.__version__ >= "5.23" else "unpacked",
    "granitemoehybrid": "masks", "afmoe": "masks", "qwen3_5_text": "bounds", "jamba": "unpacked",
    "kimi_linear": "bounds", "zamba": "bounds", "bamba": "bounds",
    "xlnet": "refused",
}  # fmt: skip
OTHERWISE = {"Jamba": "unpacked", "GraniteMoeHybrid": "masks"}  # hand layers no bounds, and masks no positions
LENGTHS = [[13, 1, 9, 7], [6, 17, 5]]


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    packed = []
    for lengths in LENGTHS:
        ids = torch.randint(10, 200, (sum(lengths),), generator=generator).tolist()
        packed.append({"input_ids": ids, "labels": list(ids), "seq_lengths": lengths})
    return packed


def documents():
    for row in rows():
        start = 0
        for length in row["seq_lengths"]:
            ids = row["input_ids"][start : start + length]
            yield {"input_ids": ids, "labels": ids, "seq_lengths": [length]}
            start += length


def asked(model, collate=None, **keys):
    keys = {"key": "packing", "length": 512, "tokens": range(10, 200)} | keys
    return isolate_documents(model, collate or PackedCollator(0), **keys)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "method"), SOME.items())
def test_isolation_method_of_each_family(name, method):
    row = all_families.row_of(name)
    assert (row.method, row.error < 1e-4) == (method, True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_causal_lm_of_transformers_leaks():
    """The whole table: nothing differs from the document alone, and the page in docs is this table."""
    table = all_families.table(all_families.NAMES)
    # ProphetNet's logits depend on the length of the row, in transformers itself and in padded rows, too.
    assert [row for row in table if row.name != "prophetnet" and not row.error < 1e-4] == []
    assert sum(row.method == "does not build" for row in table) <= 10
    page = all_families.PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " in page:
        assert page == all_families.page(table)
    methods = [row.split(" | ")[:2] for row in page.splitlines() if row.startswith("| ")]
    assert len(methods) > 180


MIXED = ["granitemoehybrid", "afmoe", "bamba", "lfm2", "qwen3_5_text", "kimi_linear", "zamba", "jamba", "bloom", "mpt"]
ONE_OF_EACH_WAY = ("granitemoehybrid", "lfm2", "bloom")  # how rows are put together is no matter of the family
LAYOUTS = [
    pytest.param(name, one_row, marks=[pytest.mark.slow] if one_row and name not in ONE_OF_EACH_WAY else [],
                 id=f"{'padding-free' if one_row else 'rows'}-{name}")
    for one_row in (False, True) for name in MIXED
]  # fmt: skip


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("name", "one_row"), LAYOUTS)
def test_loss_and_gradients_are_the_documents_own(name, one_row):
    """Sums over a packed batch equal those over its documents run separately, through adapters."""
    model = all_families.build(name)
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=all_linear(model))).train()
    if not any("experts" in module for module, _ in model.named_modules()):  # grouped products take no float64
        model.double()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    collate = PackedCollator(0, one_row=one_row)
    expected = sum(causal_lm_loss(model, collate([row]))[0] for row in documents() if len(row["input_ids"]) > 1)
    expected.backward()
    gradients = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    alone = measure(model.eval(), list(documents()), collate, 1).loss
    assert abs(float(causal_lm_loss(model, collate(rows()))[0]) / float(expected) - 1) > 1e-4  # it would leak

    assert asked(model.train(), collate).method == SOME[name]
    model.zero_grad()
    loss, _ = causal_lm_loss(model, collate(rows()))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for key, gradient in gradients.items():
        packed_gradient = dict(model.named_parameters())[key].grad
        assert (packed_gradient - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=1e-6), key
    assert measure(model.eval(), rows(), collate, 2).loss == pytest.approx(alone, rel=1e-5)


def test_generation_and_padded_batches_run_as_before():
    model = all_families.build("lfm2")
    ids = torch.randint(10, 200, (2, 9))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    with torch.no_grad():
        padded, cached = model(ids, attention_mask=mask).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
        asked(model)
        assert torch.equal(model(ids, attention_mask=mask).logits, padded)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), cached)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", [*FUSED, *TEXT_PARTS])
def test_packed_documents_are_isolated_in_patched_models(family):
    """Recurrent layers get document bounds."""
    model = tiny(family).eval()
    patch(model)
    isolation = asked(model, length=64, tokens=range(10, 100))
    methods = dict.fromkeys((*HYBRIDS, *STATES), "bounds") | OTHERWISE
    assert isolation.method == methods.get(family, "positions")
    assert isolation.tried[isolation.method].isolated


def test_a_noncausal_model_is_refused():
    model = transformers.BertLMHeadModel(all_families.tiny_config(transformers.BertConfig())).eval()
    words = r"padding_free: documents .* in BertLMHeadModel \(they .* in bert.encoder.*padding_free: false"
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        asked(model, PackedCollator(0, one_row=True), key="padding_free")
    assert not any("forward" in vars(module) for module in model.modules())


def bounded_attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """Attention with FlashAttention's bounds; without them, over the full row."""
    rows, heads, length, _ = query.shape
    bounds = [0, length] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    document = torch.zeros(rows * length, dtype=torch.int64)
    document[torch.tensor([begin for begin in bounds[1:] if begin < rows * length], dtype=torch.int64)] = 1
    document = document.cumsum(0).view(rows, length)
    mask = (document[:, :, None] == document[:, None]).tril()[:, None]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("fused", [False, True], ids=["isolation", "from the collator"])
def test_kernels_that_take_bounds_get_them(fused):
    """gpt-oss hands its masks no positions; a kernel that reads bounds needs none."""
    AttentionInterface.register("test_bounds", bounded_attention)
    model = all_families.build("gpt_oss")
    model.config._attn_implementation = "test_bounds"
    isolation = asked(model, PackedCollator(0, fused=fused))
    assert isolation.method == ("positions" if fused else "bounds")
    assert fused or all_families.alone_error(model) < 1e-5


def test_isolated_documents_with_wrong_positions_are_unpacked(monkeypatch):
    """Positions that go on from document to document (chunks of Llama 4 do in transformers 5.17)."""
    model = all_families.build("gpt2")
    embed = model.transformer.wpe.forward
    monkeypatch.setattr(model.transformer.wpe, "forward", lambda ids: embed(torch.arange(ids.shape[-1]).expand_as(ids)))
    isolation = asked(model)
    assert (isolation.method, isolation.tried["positions"].change) == ("unpacked", 0.0)
    assert isolation.tried["positions"].alone > 0.1 > 1e-4 > isolation.tried["unpacked"].alone


def test_a_leak_of_one_token_is_detected():
    """The weakest leak: a convolution over two tokens, in one layer, over a document of one token."""

    class Shift(torch.nn.Module):
        def forward(self, x):
            return x + 1e-3 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]

    model = LlamaForCausalLM(LlamaConfig(**all_families.tiny_config(LlamaConfig()).to_dict())).eval()
    model.model.norm = torch.nn.Sequential(model.model.norm, Shift())
    isolation = asked(model)
    assert (isolation.method, isolation.leak) == ("unpacked", "model.norm.1, a Shift")


def test_the_probe_changes_no_state():
    """Random numbers, modes and weights are as they were: resuming stays exact."""
    model = all_families.build("jamba").train()
    model.lm_head.eval()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    asked(model)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_length_groups_hold_each_token_once_with_little_padding(lengths):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    groups = list(length_groups(bounds))
    assert sorted(torch.cat([index[real] for index, real in groups]).tolist()) == list(range(bounds[-1]))
    assert sum(real.numel() for _, real in groups) * MIN_LENGTH_RATIO <= bounds[-1]
    for index, real in groups:
        assert bool((real[:, :-1] >= real[:, 1:]).all())  # padded on the right
        assert {int(start) for start in index[:, 0]} <= set(bounds[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "mamba2", "lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_on_a_gpu_in_16_bits(name):

    model = all_families.build(name).to("cuda", torch.bfloat16)
    patch(model)
    isolation = asked(model, PackedCollator(0, fused=True))
    methods = ("positions",) if SOME[name] == "positions" else ("positions", "bounds", "masks", "unpacked")
    assert isolation.method in methods
    assert isolation.tried[isolation.method].isolated


PARTS = 8


@pytest.mark.gpu
@pytest.mark.parametrize("share", range(PARTS))
def test_no_causal_lm_leaks_on_a_gpu(share, tmp_path):
    """A share of all families, in a process of its own, since a failed kernel would take the process's other tests
    along. What `isolate` does not refuse, it has found isolated; nothing else may be raised."""
    source, root = Path(packing.__file__).parents[2], Path(__file__).parents[2]
    folders = [str(source), str(root), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-m", "tests.helpers.families_on_gpu", str(share), str(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(all_families.NAMES[share::PARTS])
    assert [line for line in lines if " BUG " in line] == []
    isolated = [line for line in lines if line.split()[1] in ("positions", "bounds", "masks", "unpacked")]
    assert len(isolated) > 0.75 * len(lines)  # as on a CPU: one share has four models that are refused: not causal
