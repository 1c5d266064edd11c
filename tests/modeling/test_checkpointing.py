"""Activation levels: gradients equal those of `keep`, and saved bytes equal the plan's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.data.batch_shapes import Shape
from halfbyte.modeling import checkpointing
from halfbyte.modeling.attention import Implementation
from halfbyte.modeling.checkpointing import LEVELS
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.plan.ledger import Ledger
from halfbyte.plan.shapes import ModelShapes
from halfbyte.utils.errors import ModelError
from tests.helpers.families import FAMILIES, HYBRIDS
from tests.helpers.patch_models import batch, loss_and_gradients, tiny

MIXED = ("checkpoint", "recompute")
KINDS = ("Qwen3", "Gemma2", "Phi3")  # whose blocks differ from Llama's, each in its own way


def slowly(families) -> list:
    """The families other than Llama and `KINDS`."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in families if name not in (*KINDS, "Llama")]


def gradients(model: nn.Module, inputs: dict, levels) -> tuple[float, dict[str, torch.Tensor]]:
    """Gradients of a patched copy, with the same random numbers every time."""
    model = copy.deepcopy(model)
    halfbyte.patch(model, levels)
    loss_and_gradients(model, inputs)  # the head's probe comes with the first step
    torch.manual_seed(3)
    return loss_and_gradients(model, inputs)


def check_equal(model: nn.Module, levels, exact: bool = True) -> None:
    inputs = batch()
    expected, recomputed = gradients(model, inputs, "keep"), gradients(model, inputs, levels)
    assert recomputed[1].keys() == expected[1].keys()
    assert recomputed[0] == pytest.approx(expected[0], abs=0 if exact else 1e-6)
    for name, gradient in expected[1].items():
        if exact:
            assert torch.equal(recomputed[1][name], gradient), name
        else:
            torch.testing.assert_close(recomputed[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("levels", [*(level for level in LEVELS if level != "keep"), MIXED])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_of_keep(levels, dropout):
    check_equal(tiny("Llama", lora_dropout=dropout), levels)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", [*KINDS, *slowly(FAMILIES)])
@pytest.mark.parametrize("levels", ["recompute", "recompute_mlp", "checkpoint"])
def test_every_family(family, levels):
    check_equal(tiny(family), levels)


def test_tiled_level_equals_keep_up_to_rounding(monkeypatch):
    monkeypatch.setattr(checkpointing, "TILE_ROWS", 20)  # of 54 rows
    check_equal(tiny("Llama"), "tiled", exact=False)
    check_equal(tiny("Gemma3Text"), "tiled", exact=False)


@pytest.mark.parametrize("level", ["recompute", "recompute_mlp", "checkpoint"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_dora(family, level):
    check_equal(tiny(family, use_dora=True), level)


def test_dora_in_tiles(monkeypatch):
    monkeypatch.setattr(checkpointing, "TILE_ROWS", 20)
    check_equal(tiny("Llama", use_dora=True), "tiled", exact=False)


def test_tiles_draw_the_same_dropout_twice(monkeypatch):
    """With dropout a tiled forward draws other masks than a whole one, so two tiled runs are compared."""
    monkeypatch.setattr(checkpointing, "TILE_ROWS", 20)
    model, inputs = tiny("Llama", lora_dropout=0.3), batch()
    first, second = gradients(model, inputs, "tiled"), gradients(model, inputs, "tiled")
    assert first[0] == second[0]
    assert all(torch.equal(second[1][name], gradient) for name, gradient in first[1].items())


def test_last_gemm_is_not_recomputed(monkeypatch):
    from halfbyte.autograd.lora import Projections

    counts = {"products": 0}
    project = Projections._project
    monkeypatch.setattr(
        Projections,
        "_project",
        lambda *args: (counts.update(products=counts["products"] + 1), project(*args))[1],
    )
    model, inputs = tiny("Llama"), batch()
    halfbyte.patch(model, "keep")
    loss_and_gradients(model, inputs)
    for level, recomputed in {"keep": 0, "recompute_mlp": 2, "checkpoint": 6, "tiled": 6}.items():
        halfbyte.patch(model, level)
        counts["products"] = 0
        loss_and_gradients(model, inputs)
        assert counts["products"] == 2 * (7 + recomputed), level


def test_a_second_backward_is_an_error_as_without_levels():
    model = tiny("Llama")
    halfbyte.patch(model, "recompute")
    loss, _ = causal_lm_loss(model, batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="in-place"):
        loss.backward()


def live_after_forward(model: nn.Module, inputs: dict) -> int:
    """Bytes alive between forward and backward, excluding the model."""
    ledger = Ledger()
    ledger.ignore(iter((*model.parameters(), *model.buffers(), inputs["input_ids"])))
    with ledger:
        result = model.get_base_model().model(input_ids=inputs["input_ids"], use_cache=False)
        return ledger.live * (result is not None)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("family", "dropout", "frozen_a"),
    [("Llama", 0.0, False), ("Llama", 0.1, True), ("Qwen3", 0.0, False), ("Phi3", 0.0, False), ("Mixtral", 0.0, True)]
    + [pytest.param(name, 0.1, False, marks=pytest.mark.slow) for name in FAMILIES if name not in ("Llama", "Gemma2")],
)
def test_saved_bytes_are_those_of_the_plan(family, dropout, frozen_a):
    sizes = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "max_position_embeddings": 512}
    inputs = {"input_ids": torch.randint(1, 101, (2, 256))}
    config = RunConfig(
        model_name_or_path="m",
        dataset="d",
        dtype="float32",
        load_in_4bit=False,
        r=4,
        lora_dropout=dropout,
        lora_fa=frozen_a,
    )
    models = []
    for layers in (1, 2):
        extra = {"Gemma3Text": {"layer_types": ["full_attention"] * layers}}
        extra |= {name: {"sliding_window": None} for name in ("Mistral", "Mixtral", "Ministral3")}
        full = {"sliding_window": 512, "layer_types": ["full_attention"] * layers}
        extra |= {name: full for name in ("Ministral", "Olmo3", "Exaone4", "Cohere2")}
        extra |= {name: {"layer_types": ["full_attention", "linear_attention"][:layers]} for name in HYBRIDS}
        per_layer = full | {"num_kv_shared_layers": 0, "global_head_dim": 16, "intermediate_size": [160] * layers}
        extra["Gemma3nText"] = per_layer | {"activation_sparsity_pattern": [0.0] * layers}
        extra["Gemma4Text"] = per_layer | {"intermediate_size": 160}
        states = ["mamba", "attention"][:layers]
        extra["Bamba"] = {"mamba_n_heads": 8}
        extra["GraniteMoeHybrid"] = {"mamba_n_heads": 8, "layer_types": states}
        extra["NemotronH"] = {"layers_block_type": states}
        extra["SmolLM3"] = full | {"no_rope_layers": [1] * layers}
        shape = sizes | {"num_hidden_layers": layers} | extra.get(family, {})
        models.append(add_adapter(tiny(family, shape=shape, adapter=False), config))  # on experts, too
    plan = ModelShapes(config, models[1].config, torch.device("cuda"))
    of_cpu = Implementation("the CPU's, which builds no scores", scores=False, mask=False)
    plan.attention = lambda batch: of_cpu
    for level in ("keep", "recompute", "recompute_mlp", "checkpoint") if plan.fused else ("keep",):
        live = []
        for model in models:
            halfbyte.patch(model, level)
            live.append(live_after_forward(model, inputs))
        planned = plan.step(Shape(2, 256), (level,)).layers[-1].saved
        # `again` keeps the stream in a closure, which hooks do not see but the norm's own node does
        assert live[1] - live[0] == pytest.approx(planned, rel=0.05), level


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])  # RoPE in place, norms of q and k, norms of outputs
@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_dora_saves_no_outputs(family, level):
    """Attention saves q, k and v, and norms the streams whose differences are the outputs of o and down."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "num_key_value_heads": 4}
    inputs, live = {"input_ids": torch.randint(1, 101, (2, 256))}, {}
    for layers in (1, 2):
        for use_dora in (False, True):
            model = tiny(family, shape=sizes | {"num_hidden_layers": layers}, use_dora=use_dora)
            halfbyte.patch(model, level)
            live[layers, use_dora] = live_after_forward(model, inputs)
    saved = live[2, True] - live[1, True] - (live[2, False] - live[1, False])
    assert saved == 4 * (5 * 64 + 2 * 160) * (1 + 4)  # c and c∘B of the seven linears, and no output of 512 rows


@pytest.mark.parametrize(("levels", "message"), [("most", "'most'"), (["keep"] * 3, "3 levels.*2")])
def test_levels_that_do_not_fit(levels, message):
    with pytest.raises(ModelError, match=message):
        halfbyte.patch(tiny("Llama"), levels)


def test_transformers_checkpointing_with_levels_is_refused():
    model = tiny("Llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(ModelError, match="gradient_checkpointing_disable"):
        halfbyte.patch(model, "checkpoint")


def test_evaluation_and_generation_do_not_recompute():
    model, inputs = tiny("Llama").eval(), batch()
    with torch.no_grad():
        expected = model(**inputs).loss
    halfbyte.patch(model, "tiled")
    with torch.no_grad():
        assert model(**inputs).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    prompt = {"input_ids": torch.randint(1, 101, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape == (2, 11)
