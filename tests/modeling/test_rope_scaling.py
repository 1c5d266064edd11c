"""The RoPE scaling that follows from a model's config and `max_length`."""

import copy
import math

import pytest
import torch
import transformers
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from halfbyte.config import RopeScaling, load_config
from halfbyte.modeling.architectures import auto_class
from halfbyte.modeling.rope_scaling import config_overrides, resolve_rope, scale_rope, set_rope
from halfbyte.utils.errors import ConfigError, HalfbyteError, ModelError
from tests.helpers.families import families

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
UNSCALED = ("Gemma4Text", "Phi3", "Ministral3", "Apertus", "Phimoe", "GptOss", "GraniteMoeHybrid", "Jamba", "NemotronH")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(rope=None, context=2048, **keys):
    return LlamaConfig(**SIZES, max_position_embeddings=context, rope_parameters=rope, **keys)


def scaled(config, options, length):
    config = copy.deepcopy(config)
    scale_rope(config, RopeScaling({"rope_type": options} if isinstance(options, str) else options, length))
    return config


@pytest.mark.parametrize("name", ["yarn", "linear", "llama3"])
def test_factor_follows_from_max_length(name):
    config = scaled(llama(), name, 5120)
    assert config.rope_parameters["factor"] == 2.5
    assert config.max_position_embeddings == 5120
    assert config.rope_parameters.get("original_max_position_embeddings", 2048) == 2048


def test_dynamic_is_transformers_dynamic_at_the_longest_length():
    config = scaled(llama(), "dynamic", 6144)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](
        llama({"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}), "cpu", seq_len=6144
    )
    theta = config.rope_parameters["rope_theta"]
    torch.testing.assert_close(theta ** (-torch.arange(0, 16, 2) / 16), expected)
    assert config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("rope", "context", "length", "factor"),
    [
        (LLAMA3 | {"original_max_position_embeddings": 8192}, 131072, 262144, 16.0),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 4096, 32768, 8.0),
        ({"rope_type": "linear", "factor": 2.0}, 4096, 8192, 4.0),
    ],
)
def test_scaled_model_is_scaled_further(rope, context, length, factor):
    config = scaled(llama(rope, context), rope["rope_type"], length)
    assert config.rope_parameters["factor"] == factor
    assert config.max_position_embeddings == length
    original = "original_max_position_embeddings"
    assert config.rope_parameters.get(original) == rope.get(original)


@pytest.mark.parametrize("name", ["yarn", "linear", "dynamic", "llama3"])
def test_resolved_options_give_the_same_config_at_any_max_length(name):
    options = resolve_rope(llama(), RopeScaling({"rope_type": name}, 8192))
    assert scaled(llama(), options, 100).to_dict() == scaled(llama(), name, 8192).to_dict()


def test_options_are_used_as_given():
    config = scaled(llama(), {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "attention_factor": 1.5}, 100)
    expected = {"factor": 4.0, "beta_fast": 16, "attention_factor": 1.5, "original_max_position_embeddings": 2048}
    assert config.rope_parameters == expected | {"rope_type": "yarn", "rope_theta": 1e4}
    assert config.max_position_embeddings == 8192


def test_layers_with_a_window_keep_their_rope():
    base = Gemma3TextConfig(**SIZES, max_position_embeddings=1024)
    config = scaled(base, "linear", 4096)
    assert config.rope_parameters["sliding_attention"] == base.rope_parameters["sliding_attention"]
    assert config.rope_parameters["full_attention"]["factor"] == 4.0
    assert config_overrides(config)["rope_parameters"] == config.rope_parameters


def test_longrope_takes_its_lists_and_both_contexts():
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = scaled(Phi3Config(**SIZES, pad_token_id=0), {"rope_type": "longrope"} | lists, 16384)
    expected = math.sqrt(1 + math.log(4) / math.log(4096))
    _, attention = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=5000)
    assert attention == pytest.approx(expected)
    assert config.max_position_embeddings == 16384


@pytest.mark.parametrize(
    ("config", "options", "error"),
    [
        (GPT2Config(), "yarn", ModelError),
        (LlamaConfig(**SIZES), "yarn", ConfigError),  # within the trained context
        (LlamaConfig(**SIZES), "default", ConfigError),
        (LlamaConfig(**SIZES), "longrope", ConfigError),
        (LlamaConfig(**SIZES), {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, ConfigError),
        (llama(LLAMA3 | {"original_max_position_embeddings": 512}), "yarn", ModelError),
        (PhimoeConfig(**SIZES), {"rope_type": "yarn", "factor": 2.0}, ModelError),
        (transformers.Gemma4TextConfig(**SIZES), {"rope_type": "linear", "factor": 2.0}, ModelError),
        (transformers.GraniteMoeHybridConfig(**SIZES, position_embedding_type="nope"), "yarn", ModelError),
        (transformers.FalconConfig(**SIZES, alibi=True), "yarn", ModelError),
    ],
)
def test_what_cannot_be_scaled_is_refused(config, options, error):
    with pytest.raises(error, match="rope_scaling"):
        scaled(config, options, 2048)


@pytest.mark.parametrize("name", [name for name in families(width=64, mlp=64, expert=64, vocabulary=64)])
def test_family_computes_with_the_scale_or_is_refused(name):
    """The logits change, and a config.json in the layout before transformers 5 says the same."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 16}
    own = families(width=64, mlp=64, expert=64, vocabulary=64)[name]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = getattr(transformers, f"{name}Config")(**(sizes | {"num_hidden_layers": 2} | own | tokens))
    if name in UNSCALED:
        with pytest.raises(HalfbyteError, match="rope_scaling"):
            scaled(base, "linear", 64)
        return
    config = scaled(base, "linear", 64)
    torch.manual_seed(0)
    models = [auto_class(each).from_config(copy.deepcopy(each)).eval() for each in (base, config)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        plain, changed = (model(input_ids=ids, use_cache=False).logits for model in models)
    assert (plain - changed).abs().max() > 1e-4 * plain.abs().max()
    document = base.to_dict()
    parameters = document.pop("rope_parameters")
    if "full_attention" not in parameters:
        document |= {key: value for key, value in parameters.items() if key in ("rope_theta", "partial_rotary_factor")}
        set_rope(document, config)
        assert type(base).from_dict(document).rope_parameters == config.rope_parameters


@pytest.mark.parametrize(
    "value",
    ["ntk", {"rope_type": ["yarn"]}, {"rope_type": "yarn", "truncate": 2}, {"rope_type": "yarn", "factor": "4"},
     {"rope_type": "yarn", "beta": 2}, {"factor": 2.0}, {"type": "linear", "factor": 0.5}, 3, ["yarn"],
     {"rope_type": "yarn", "factor": 1e300}, {"rope_type": "llama3", "low_freq_factor": 4.0},
     {"rope_type": "yarn", "original_max_position_embeddings": 2.5}, {"rope_type": "yarn", "beta_slow": 40},
     {"rope_type": "yarn", "factor": True}, {"rope_type": "default", "rope_theta": -1.0}],
)  # fmt: skip
def test_wrong_value_is_refused(value):
    with pytest.raises(ConfigError, match="rope_scaling"):
        load_config(None, {"model_name_or_path": "m", "dataset": "d", "rope_scaling": value})


def test_other_tools_keys():
    common = {"model_name_or_path": "m", "dataset": "d"}
    for foreign in (
        {"rope_scaling": "yarn"},  # LLaMA-Factory
        {"rope_scaling": {"type": "yarn"}},  # Axolotl
        {"overrides_of_model_config": {"rope_scaling": {"rope_type": "yarn"}}},
        {"rope_parameters": {"rope_type": "yarn"}},
    ):
        assert load_config(None, common | foreign).rope_scaling == {"rope_type": "yarn"}
    with pytest.raises(ConfigError, match="overrides_of_model_config"):
        load_config(None, common | {"overrides_of_model_config": {"hidden_act": "relu"}})
