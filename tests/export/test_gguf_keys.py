"""Every config key of every family is in the GGUF file, changes no logits, or is refused by name."""

import copy
import importlib
import inspect
import math
import re

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from halfbyte.gguf.graph import INERT, READ, checked_family
from halfbyte.gguf.hyperparameters import add_hyperparameters
from halfbyte.gguf.tensors import Weight, plan
from halfbyte.modeling.families import FAMILIES
from halfbyte.utils.errors import CheckpointError, ModelError
from halfbyte.utils.notices import reset_notices
from tests.helpers.gguf_models import LLAMA3, LONG, ORIGINAL, SIZES, THETA
from tests.helpers.gguf_models import MODELS as LANGUAGE_MODELS
from tests.helpers.vision_models import MODELS as VISION

MODELS = LANGUAGE_MODELS | {
    name: (family, {key: value for key, value in VISION[whole][1]["text_config"].items() if key != "model_type"})
    for name, whole, family in (
        ("gemma4", "gemma4", "Gemma4Text"), ("lfm2", "lfm2_vl", "Lfm2"), ("ministral3", "ministral3", "Ministral3")
    )
}  # fmt: skip
IDS = torch.arange(40, 72)[None]  # longer than the windows
BASE = transformers.PreTrainedConfig().to_dict().keys()
# Keys that some code reads although the family's config does not declare them.
UNDECLARED = {
    "head_dim": 8, "attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.5, "sliding_window": 4,
    "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5, "logit_scale": 0.3, "use_qk_norm": True,
    "attention_multiplier": 0.3, "unknown_key": 3,
}  # fmt: skip
NO_KEYS = {"get_text_config", "image_token_id", "kv_sharing_modes"}  # a method, of images, and made of two keys


def others(key, value):
    """Values that a config could have instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value // 2]
    if isinstance(value, float):
        return [1.7 * value, 0.0]
    if value is None:
        return [True, 2, 0.5]
    if isinstance(value, str):
        return [each for each in ("gelu", "relu", "silu") if each != value]
    if isinstance(value, list):
        return [value[::-1], value[1:], [*value, 0], [value[0] if value else 0] * len(value)]
    return []


def flips(config, keys):
    declared = {key: value for key, value in config.to_dict().items() if key not in BASE and key != "rope_parameters"}
    for key, value in declared.items():
        for other in others(key, value):
            yield key, keys | {key: other}
    for key, other in UNDECLARED.items():
        if key not in declared:
            yield key, keys | {key: other}


def built(name, keys, state=None):
    """A model, with the weights of `state` where it has such."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{MODELS[name][0]}Config")(**copy.deepcopy(keys))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    mine = model.state_dict()
    fitting = {key: value for key, value in (state or {}).items() if key in mine and mine[key].shape == value.shape}
    model.load_state_dict(fitting, strict=False)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def file_of(model):
    """Keys and tensors of the file, without writing it."""
    config = model.config
    family = checked_family(config)
    weights = {
        key: Weight(tuple(value.shape), value.clone, bool(family.experts and family.experts.interleaved))
        for key, value in model.state_dict().items()
        if not (config.tie_word_embeddings and key == "lm_head.weight")
    }
    writer = gguf.GGUFWriter("unwritten.gguf", family.gguf.arch)
    add_hyperparameters(writer, config, family)
    keys = {key: value.value for key, value in writer.kv_data[0].items()}
    return keys, {entry.name: [*entry.pieces()] for entry in plan(weights, config, family)}


def differ(one, two):
    if one[0] != two[0] or one[1].keys() != two[1].keys():
        return True
    pairs = ((a, b) for name, pieces in one[1].items() for a, b in zip(pieces, two[1][name], strict=True))
    return not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", MODELS)
def test_a_key_that_changes_logits_changes_the_file_or_is_refused(name, caplog):
    keys = SIZES | MODELS[name][1]
    model = built(name, keys)
    state, expected, file = model.state_dict(), logits(model), file_of(model)
    silent, unnamed, counted = [], [], 0
    for key, flipped in flips(model.config, keys):
        try:
            other = built(name, flipped, state)
            found = logits(other)
        except Exception:
            continue  # transformers refuses the value, or fails with it
        if found.shape == expected.shape and torch.equal(found, expected):
            continue
        counted += 1
        caplog.clear()
        reset_notices()
        try:
            same = not differ(file_of(other), file)
        except (ModelError, CheckpointError) as error:
            same = False
            unnamed += [error.message] * (not any(word in error.message for word in ("config.json", "tensor", "bias")))
        if same and "ignores this family's sliding_window" not in caplog.text:
            silent.append((key, flipped[key]))
    assert not silent
    assert not unnamed
    assert counted > 5


def test_keys_that_transformers_reads_are_accounted_for():
    """A key that a config need not declare would be missing in the test above."""
    missing = {}
    for row in FAMILIES:
        if row.gguf.arch:
            config = transformers.AutoConfig.for_model(row.model_type)
            source = inspect.getsource(importlib.import_module(row.module))
            read = set(re.findall(r'config\.([a-z]\w+)|getattr\((?:self\.)?config, "(\w+)"', source))
            whole = CONFIG_MAPPING[row.package]
            parts = [part() for part in whole.sub_configs.values() if part is not transformers.AutoConfig]
            beside = set().union(*(part.to_dict() for part in [config, *parts, *([whole()] if parts else [])]))
            missing[row.name] = {one or two for one, two in read} - beside - NO_KEYS - READ - INERT
    assert {name: names for name, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ("name", "keys", "wrong"),
    [
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"num_hidden_layers": 5}, "num_hidden_layers"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("ministral3", {"rope_parameters": THETA | {"rope_type": "default"}}, "rope_type"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"head_dim": 8}, "head_dim"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": THETA | {"rope_type": "default", "unknown": 1}}, "unknown"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope_type"),
        ("olmo3", {"rope_parameters": {"full_attention": THETA, "sliding_attention": {"rope_theta": 5e3}}}, "sliding"),
    ],
)  # fmt: skip
def test_what_the_graph_fixes_is_refused_by_name(name, keys, wrong):
    config = getattr(transformers, f"{MODELS[name][0]}Config")(**(SIZES | MODELS[name][1] | keys))
    with pytest.raises(ModelError, match=wrong):
        checked_family(config)


# --- RoPE -------------------------------------------------------------------------------------------------------------

YARN = ORIGINAL | {"rope_type": "yarn", "factor": 4.0}
KINDS = {
    "default": THETA | {"rope_type": "default"},
    "linear": THETA | {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": LONG,
    "dynamic": THETA | {"rope_type": "dynamic", "factor": 4.0},
    "proportional": THETA | {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.5},
}
CHANGES = {
    "nothing": {}, "beta_fast": {"beta_fast": 8.0}, "beta_slow": {"beta_slow": 3.0}, "truncate": {"truncate": False},
    "usual betas": {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None},
    "usual factor": {"attention_factor": 0.1 * math.log(4) + 1}, "attention_factor": {"attention_factor": 0.6},
    "mscale": {"mscale": 0.7, "mscale_all_dim": 0.4}, "one mscale": {"mscale": 0.7}, "factor": {"factor": 3.0},
    "original": {"original_max_position_embeddings": 32}, "low": {"low_freq_factor": 2.0, "high_freq_factor": 3.0},
    "partial": {"partial_rotary_factor": 0.5}, "theta": {"rope_theta": 500.0}, "no factor": {"factor": None},
}  # fmt: skip
HARMLESS = ("usual betas", "usual factor", "one mscale", "factor")
PLACES = [("llama", None), ("glm4", None), ("gpt_oss", None), ("gemma3", "full_attention"), ("olmo3", "full_attention"),
          ("gemma3", "sliding_attention"), ("olmo3", "sliding_attention")]  # fmt: skip


def by_llamacpp(keys, tensors, sliding):
    """Frequencies and factor on cos and sin that ggml's rope and llama.cpp's context make of a file's keys."""
    arch = keys["general.architecture"]

    def key(name, default=None):
        return keys.get(f"{arch}.rope.{name}", default)

    rotated, base = key("dimension_count"), key("freq_base")
    base = key("freq_base_swa", base) if sliding else base
    kind = "none" if sliding else key("scaling.type", "none")
    frequency = base ** -(np.arange(0, rotated, 2) / rotated)
    if factors := tensors.get("rope_freqs.weight") or tensors.get("rope_factors_short.weight"):
        frequency = frequency / factors[0].double().numpy()
    if kind == "longrope":
        return frequency, key("scaling.attn_factor")
    if kind not in ("linear", "yarn"):
        return frequency, 1.0
    factor = key("scaling.factor")
    if kind == "linear":
        return frequency / factor, 1.0
    ends = [
        rotated * math.log(key("scaling.original_context_length") / (beta * 2 * math.pi)) / (2 * math.log(base))
        for beta in (32, 1)
    ]
    low, high = max(0, math.floor(ends[0])), min(rotated - 1, math.ceil(ends[1]))
    kept = 1 - np.clip((np.arange(rotated // 2) - low) / max(0.001, high - low), 0, 1)
    return frequency * (kept + (1 - kept) / factor), 0.1 * math.log(factor) + 1


@pytest.mark.sampled(9)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_llamacpps_rope_is_transformers_or_refused(kind, change, caplog):
    exported, refusals = 0, []
    for name, layer in PLACES:
        own = dict(MODELS[name][1])
        whole = KINDS[kind] | CHANGES[change]
        if name == "glm4":
            whole = {"partial_rotary_factor": 0.5} | whole
        config_class = getattr(transformers, f"{MODELS[name][0]}Config")
        usual = config_class(**(SIZES | own)).rope_parameters
        keys = SIZES | own | {"rope_parameters": {**copy.deepcopy(usual), layer: whole} if layer else whole}
        try:
            model = built(name, keys)
            logits(model)
        except Exception:
            continue  # transformers refuses the parameters, or fails with them
        caplog.clear()
        reset_notices()
        try:
            fields, tensors = file_of(model)
        except ModelError as error:
            refusals.append(error.message)
            continue
        exported += 1
        rotary = model.model.rotary_emb
        prefix = f"{layer}_" if layer else ""
        frequency, factor = by_llamacpp(fields, tensors, layer == "sliding_attention")
        if "llama.cpp rounds the bounds" in caplog.text:
            continue  # gpt-oss: in every GGUF file, with a notice
        np.testing.assert_allclose(frequency, getattr(rotary, f"{prefix}inv_freq").double().numpy(), rtol=1e-5)
        assert factor == pytest.approx(float(getattr(rotary, f"{prefix}attention_scaling")), rel=1e-5)
    assert all("rope_parameters" in message for message in refusals)
    if kind not in ("dynamic", "proportional") and change in (
        "nothing",
        "theta",
        *(HARMLESS if kind == "yarn" else ()),
    ):
        assert exported
