"""Every row of `families` is true of transformers' classes and llama.cpp's graphs; no other module names a family."""

import ast
import functools
import importlib
import inspect
import re

import gguf
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from halfbyte.modeling import families
from halfbyte.modeling.architectures import auto_class
from halfbyte.modeling.families import ACTIVATIONS, family_of_config
from tests.helpers.families import EXPERTS, FAMILIES, MULTIMODAL, SHAPE, TEXT_PARTS
from tests.helpers.gguf_models import MODELS, SIZES
from tests.helpers.sources import PACKAGE, syntax_nodes
from tests.helpers.vision_models import MODELS as VISION

ROWS = {row.name: row for row in families.FAMILIES}
SCALES = {
    "residual_scale": "residual_multiplier", "embedding_scale": "embedding_multiplier",
    "query_multiplier": "qk_scale_factor",
}  # fmt: skip


@functools.cache
def models() -> dict[str, object]:
    """Name of a row → a tiny model of it, without storage."""
    found = {}
    tiny = [(name, SHAPE | keys) for name, keys in FAMILIES.items()]
    whole = [*VISION.values(), *TEXT_PARTS.items()]
    for family, keys in [*((name, SIZES | keys) for name, keys in MODELS.values()), *whole, *tiny]:
        config = getattr(transformers, f"{family}Config")(**keys)
        row = family_of_config(config.get_text_config())
        if row is not None and row.name not in found:
            with torch.device("meta"):
                found[row.name] = auto_class(config).from_config(config)
    return found


def departures(row, model) -> dict[str, object]:
    """Return the fields of a family row as transformers' classes and configs define them."""
    config, module = model.config.get_text_config(), importlib.import_module(row.module)
    backbone = getattr(model.base_model, "language_model", model.base_model)
    parts = [(layer, part) for layer in backbone.layers for part in layer.children()]
    layer, attention = next((layer, part) for layer, part in parts if type(part).__name__.endswith("Attention"))
    other = next(
        (part for each in backbone.layers for name, part in each.named_children() if name == "linear_attn"), None
    )
    source = inspect.getsource(type(attention))
    windows = {"module": "self.sliding_window =", "config": '"sliding_window"'}
    unrotated = {
        "use_rope": "if self.use_rope" in source,
        "layer_rope_theta": hasattr(config, "layer_rope_theta"),
        "window": "if self.sliding_window is" in source,
        "all": "cos" not in source,
    }
    routed = any(hasattr(part, "experts") for each in backbone.layers for part in each.children())
    named = {part for name, _ in backbone.named_parameters() for part in name.split(".")}
    linears = {name.rpartition(".")[2] for name, _ in layer.named_modules() if name.endswith("_proj")}
    forward = inspect.getsource(type(layer).forward)
    own_layer = "per_layer_input" in forward or any("Mamba" in type(part).__name__ for _, part in parts)
    own_layer = own_layer or any(type(part).__name__ == "BambaMixer" for _, part in parts)
    names, parallel = (families.Norms(), False) if own_layer else norms_of(forward)
    norm = next(part for _, part in parts if type(part).__name__.endswith("Norm"))
    gates = {"q_proj": "self.head_dim * 2" in source, "gate_proj": hasattr(attention, "gate_proj")}
    dropout = {"layer": hasattr(layer, "resid_attn_dropout"), "half": hasattr(attention, "residual_dropout")}
    return {
        "model_type": config.model_type,
        "norms": names,
        "parallel": parallel,
        "norm_offset": bool(normed(norm, 0.0).any()),
        "layer_norm": not normed(norm, 1.0).any(),
        "qk_norm": qk_norm(attention),
        "rope_pairs": rope_pairs(module, type(getattr(backbone, "rotary_emb", None))),
        "unrotated": next((where for where, has in unrotated.items() if has), None),
        "scaled_queries": "attn_scale(" in source,
        "fused": tuple(name for name in ("qkv_proj", "gate_up_proj") if name in linears),
        "gated_mlp": bool(named & {"gate_proj", "gate_up_proj"}),
        "residual_dropout": next((where for where, drops in dropout.items() if drops), None),
        "gated_attention": next((where for where, has in gates.items() if has), None),
        "mixer": mixer_of(row, other),
        "softcap": "softcap=" in source,
        "sinks": hasattr(attention, "sinks"),
        "rope_by_layer": "sliding_attention" in (getattr(config, "rope_parameters", None) or {}),
        "window": next((where for where, text in windows.items() if text in source), None),
        "experts": routed,
        "tower": bool(row.gguf.arch) and "vision_config" in CONFIG_MAPPING[row.package].sub_configs,
        "shares_keys": "shared_kv_states" in source,
        "own_layer": own_layer,
        "classes": all(
            hasattr(module, row.name + kind) or hasattr(module, f"{row.name}Text{kind}")
            for kind in (*([] if own_layer else ["DecoderLayer"]), "Attention")
        ),
    } | {field: key if hasattr(config, key) else "" for field, key in SCALES.items()}


def norms_of(forward: str) -> tuple[families.Norms, bool]:
    """Where norms stand in a layer's forward, and whether attention and MLP read the same of them."""
    found: dict[str, str] = {}
    half = where = ""
    for called in re.findall(r"residual = hidden_states|self\.\w+(?=\()", forward):
        name = called.removeprefix("self.")
        if called.startswith("residual"):
            half, where = ("mlp", "before") if half else ("attention", "before")
        elif name in ("self_attn", "mlp", "block_sparse_moe"):
            half, where = "attention" if name == "self_attn" else "mlp", "after"
        elif name.endswith("norm"):
            found[f"{where}_{half}"] = name
    parallel = len(re.findall("residual = hidden_states", forward)) == 1
    if parallel:
        found["before_mlp"] = found["before_attention"]
    places = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    return families.Norms(*(found.get(place, "") for place in places)), parallel


def mixer_of(row, module) -> families.Mixer | None:
    if module is None:
        return None
    reads = re.findall(r"self\.(\w+)\(hidden_states\)", inspect.getsource(type(module).forward))
    (norm,) = (name for name, _ in module.named_children() if name.endswith("norm"))
    (output,) = (name for name, _ in module.named_children() if name.startswith("out"))
    return families.Mixer(type(module).__name__.removeprefix(row.name), "linear_attn", tuple(reads), output, norm)


def normed(norm, weight: float) -> torch.Tensor:
    """Ones through a norm of this class."""
    made = type(norm)(4)
    torch.nn.init.constant_(made.weight, weight)
    return made(torch.ones(1, 4))


def qk_norm(attention) -> str | None:
    if not hasattr(attention, "q_norm"):
        return "shared" if hasattr(attention, "qk_norm") else None
    return "head" if attention.q_norm.weight.numel() == attention.head_dim else "all"


def rope_pairs(module, rotary) -> str:
    rotate = getattr(module, "rotate_half_llm", getattr(module, "rotate_half", None))  # a tower has one of its own
    turned = inspect.getsource(rotate) if rotate else ""
    if "::2" not in turned:
        return "once" if rotary is not type(None) and "emb = freqs\n" in inspect.getsource(rotary) else "halves"
    return "repeated" if "repeat_interleave" in inspect.getsource(rotary) else "neighbours"


def stated(row) -> dict[str, object]:
    keys = (
        "model_type", "norms", "parallel", "norm_offset", "layer_norm", "qk_norm", "rope_pairs", "unrotated",
        "scaled_queries", "fused", "gated_mlp", "residual_dropout", "gated_attention", "mixer",
        "softcap", "sinks", "rope_by_layer", "window", "shares_keys", "own_layer", *SCALES,
    )  # fmt: skip
    own = {key: getattr(row, key) for key in keys}
    return own | {"experts": row.experts is not None, "tower": row.tower is not None, "classes": True}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.patched or row.tower])
def test_a_row_says_what_transformers_has(name):
    row = ROWS[name]
    assert stated(row) == departures(row, models()[name])
    config = models()[name].config.get_text_config()
    assert getattr(config, row.activation) in ACTIVATIONS or not row.gated_mlp
    assert row.experts is None or getattr(config, row.experts.count) == 4


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.gguf.arch])
def test_a_rows_graph_is_llamacpps(name):
    row, config = ROWS[name], models()[name].config.get_text_config()
    graph = row.gguf
    assert graph.arch in gguf.MODEL_ARCH_NAMES.values()
    assert graph.text_alone == (row.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    later = {"swiglu_limit"}  # transformers 5.17 has the number in its code
    for key in {*graph.keys.values(), *graph.fixed, *graph.bias_keys} - later:
        assert hasattr(config, key), key
    assert set(graph.optional) <= graph.keys.keys()
    assert bool(graph.wide_layers) == hasattr(config, "query_pre_attn_scalar")
    assert ("sliding_attention" in (getattr(config, "layer_types", None) or ())) == (
        graph.window_every > 1 or graph.layered
    )
    assert ("expert_count" in graph.keys) == (row.experts is not None)


def test_every_row_is_tried_by_the_tests_of_patch_generation_and_gguf():
    patched = {name.removesuffix("Text") for name in (*FAMILIES, *MULTIMODAL, *TEXT_PARTS)}
    assert patched == {name.removesuffix("Text") for name, row in ROWS.items() if row.patched}
    assert {name for name, row in ROWS.items() if row.experts and row.patched} == {
        name.removesuffix("Text") for name in EXPERTS
    }
    assert models().keys() == ROWS.keys()
    towers = {getattr(transformers, f"{family}Config").model_type for family, _ in VISION.values()}
    assert families.towers().keys() == towers


@pytest.mark.slow
def test_no_other_module_names_a_family():
    """A second table would be one that a new row is missing in. What llama.cpp calls tokenizers is no family."""
    names = {name for row in ROWS.values() for name in (row.name, row.package, row.model_type, row.gguf.arch)}
    names = {name.lower() for name in names if name} | families.towers().keys()
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        for node in syntax_nodes(path):
            if isinstance(node, ast.Constant) and str(node.value).lower() in names:
                found.append(f"{where}: {node.value}")
    # data is below modeling: how processors take images is a table there; phimoe's own RoPE is refused by name
    tables = (
        "modeling/families.py",
        "gguf/tokenizer.py",
        "data/image_processor.py",
        "modeling/rope_scaling.py: phimoe",
    )
    assert {place for place in found if not place.startswith(tables)} == set()
