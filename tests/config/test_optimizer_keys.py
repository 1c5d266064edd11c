"""Keys of optimizers: options by row, targets, LLaMA-Factory's switches, and combinations that are refused by name."""

import pytest

from halfbyte.config import dump_config, load_config
from halfbyte.config.foreign import OPTIMIZER_KEYS, OPTIMIZER_SWITCHES, Ignored, Mapped, Refused, translate
from halfbyte.optim import OPTIMIZERS, option_values, parse_options
from halfbyte.utils.errors import ConfigError

NEEDED = {"model_name_or_path": "m", "dataset": "d"}


def config(**keys):
    return load_config(None, NEEDED | keys)


def refused(*words, **keys):
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("given", ["rank=64, scale=2, proj_type=left", {"rank": 64, "scale": 2, "proj_type": "left"}])
def test_options_are_text_or_a_mapping(given):
    found = config(optim="galore_adamw", optim_args=given)
    values = option_values(OPTIMIZERS["galore_adamw"].options, found.optim_args)
    assert values == {"rank": 64, "update_proj_gap": 200, "scale": 2.0, "proj_type": "left"}
    assert isinstance(values["scale"], float)


def test_options_are_read_from_files_and_the_command_line_and_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\ndataset: d\noptim: badam\noptim_args: badam_mode=ratio\n")
    assert load_config(path).optim_args == {"badam_mode": "ratio"}
    found = load_config(
        path, ["optim=galore_adamw", "optim_args=rank=8, scale=1e-1", "optim_target_modules=[mlp, attn]"]
    )
    assert found.optim_args == {"rank": 8, "scale": 0.1}
    assert found.optim_target_modules == ["mlp", "attn"]
    path.write_text(dump_config(found))
    assert load_config(path) == found


def test_bits_are_read_from_files_and_the_command_line_and_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text('model_name_or_path: m\ndataset: d\noptim_bits: {"*embed_tokens*": 32, "*": 8}\n')
    assert load_config(path).optim_bits == {"*embed_tokens*": 32, "*": 8}
    path.write_text(dump_config(load_config(path)))
    assert [*load_config(path).optim_bits] == ["*embed_tokens*", "*"]
    assert load_config(path, ["optim_bits=16"]).optim_bits == 16


def test_text_becomes_numbers_and_switches():
    assert parse_options("a=1,b = 0.5 , c=true, d=std, e=1e-3,") == {"a": 1, "b": 0.5, "c": True, "d": "std", "e": 1e-3}
    assert parse_options("") == {}


@pytest.mark.parametrize("text", ["rank", "rank=", "=3", "rank=3, scale"])
def test_text_that_is_not_key_and_value_is_refused(text):
    refused("optim_args", optim="galore_adamw", optim_args=text)


@pytest.mark.parametrize(("optim", "given", "words"), [
    ("galore_adamw", {"ranck": 4}, ["ranck", "rank?"]),
    ("apollo_adamw", {"update_gap": 4}, ["update_gap", "update_proj_gap?"]),
    ("adamw_torch", {"rank": 4}, ["rank"]),
    ("badam", {"badam_switch_intervall": 4}, ["badam_switch_intervall", "badam_switch_interval?"]),
    ("galore_adamw", {"rank": 0}, ["rank"]),
    ("galore_adamw", {"rank": 2.5}, ["rank"]),
    ("galore_adamw", {"rank": True}, ["rank"]),
    ("galore_adamw", {"rank": "many"}, ["rank"]),
    ("galore_adamw", {"scale": 0}, ["scale"]),
    ("galore_adamw", {"proj_type": "up"}, ["proj_type", "std"]),
    ("q_galore_adamw8bit", {"quant_n_bit": 5}, ["quant_n_bit", "4 or 8"]),
    ("apollo_mini", {"scale_type": "row"}, ["scale_type", "tensor"]),
    ("badam", {"badam_start_block": -1}, ["badam_start_block"]),
    ("badam", {"badam_update_ratio": 1.5}, ["badam_update_ratio"]),
    ("sgd", {"nesterov": 1}, ["nesterov", "true or false"]),
    ("adamw", {"storage": "int3"}, ["storage", "companded8"]),
    ("adamw", {"storge": "fp32"}, ["storge", "storage?"]),
    ("adamw", {"storage": "dynamic4"}, ["storage", "dynamic4"]),
    ("ademamix", {"storage": "companded8"}, ["storage", "companded8"]),
    ("adamw_torch", {"storage": "fp32"}, ["storage"]),
    ("adamw", {"rounding": "up"}, ["rounding", "correction8"]),
    ("adamw", {"rounding": "stochastic"}, ["rounding", "adapter_dtype"]),
    ("lars", {"trust_coefficient": 0}, ["trust_coefficient"]),
])  # fmt: skip
def test_an_unknown_or_wrong_option_is_named(optim, given, words):
    refused("optim_args", *words, optim=optim, optim_args=given)


def test_every_default_is_allowed():
    for row in OPTIMIZERS.values():
        for name, option in row.options.items():
            assert option.default is None or option.accepts(option.default), name
            assert option.allowed()


@pytest.mark.parametrize(("key", "keys"), [
    ("optim_target_modules", {"optim": "adamw_torch", "optim_target_modules": ["mlp"]}),
    ("optim_target_modules", {"optim": "galore_adamw", "optim_target_modules": []}),
    ("optim_target_modules", {"optim": "galore_adamw", "optim_target_modules": "(mlp"}),
    ("optim_target_modules", {"optim": "galore_adamw", "optim_target_modules": ["mlp", "*a"]}),
    ("max_grad_norm", {"optim": "galore_adamw_layerwise"}),
    ("gradient_accumulation_steps",
     {"optim": "galore_adamw_layerwise", "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}),
    ("dtype", {"optim": "apollo_adamw_layerwise", "max_grad_norm": 0.0, "dtype": "float16"}),
    ("lora_preconditioner",
     {"optim": "galore_adamw_layerwise", "max_grad_norm": 0.0, "lora_preconditioner": "riemannian"}),
    ("loraplus_lr_embedding", {"loraplus_lr_embedding": 1e-5}),
    ("loraplus_lr_ratio", {"loraplus_lr_ratio": 16.0, "use_peft": False, "load_in_4bit": False}),
    ("lora_preconditioner", {"lora_preconditioner": "riemannian", "use_peft": False, "load_in_4bit": False}),
    ("lora_preconditioner", {"lora_preconditioner": "newton"}),
    ("optim_bits", {"optim": "adamw_torch", "optim_bits": 32}),
    ("optim_bits", {"optim": "muon", "optim_bits": {"*": 32}}),
    ("optim_bits", {"optim": "lion_8bit", "optim_bits": {"*": 32, "*mlp*": 4}}),
    ("optim_bits", {"optim_bits": 8, "optim_args": {"storage": "fp32"}}),
    ("optim_bits", {"optim_bits": 7}),
    ("optim_bits", {"optim_bits": {"*": "8"}}),
    ("optim_bits", {"optim_bits": {}}),
    ("rounding", {"optim_args": {"rounding": "correction8"}, "use_peft": False, "load_in_4bit": False}),
    ("adamw", {"optim_args": {"storage": "companded8"}, "parallel": {"tensor": 2}}),
    ("embedding_learning_rate", {"embedding_learning_rate": 0.0}),
    ("galore_adamw_layerwise", {"optim": "galore_adamw_layerwise", "max_grad_norm": 0.0, "parallel": {"data": 2}}),
    ("badam", {"optim": "badam", "parallel": {"pipeline": 2}}),
    ("galore_adamw", {"optim": "galore_adamw", "parallel": {"pipeline": 2}}),
    ("galore_adamw", {"optim": "galore_adamw", "parallel": {"tensor": 2}}),
    ("lora_preconditioner", {"lora_preconditioner": "riemannian", "parallel": {"shard": 2}}),
])  # fmt: skip
def test_a_contradiction_names_its_key(key, keys):
    refused(key, **keys)


@pytest.mark.parametrize("keys", [
    {"optim": "galore_adamw_layerwise", "max_grad_norm": 0.0},
    {"optim": "badam", "parallel": {"data": 2}},
    {"optim": "galore_adamw", "parallel": {"shard": 2}, "gradient_accumulation_steps": 4},
    {"lora_preconditioner": "riemannian", "parallel": {"data": 2}},
    {"optim": "adamw_8bit", "optim_args": "storage=fp32", "parallel": {"tensor": 2}},
    {"optim_bits": {"*embed_tokens*": 32, "*lora_A*": 16}, "optim_args": {"storage": "companded8"}},
    {"optim_args": {"rounding": "correction8"}, "adapter_dtype": "bfloat16"},
])  # fmt: skip
def test_supported_combinations_are_accepted(keys):
    assert config(**keys).optim == keys.get("optim", "adamw")


@pytest.mark.parametrize(("given", "expected"), [
    ({"use_galore": True},
     {"optim": "galore_adamw", "optim_target_modules": "all-linear",
      "optim_args": {"rank": 16, "update_proj_gap": 200, "scale": 2.0, "proj_type": "std"}}),
    ({"use_galore": True, "optim": "adamw_8bit", "galore_target": "mlp, self_attn", "galore_rank": 64,
      "galore_update_interval": 20, "galore_scale": 0.5, "galore_proj_type": "left", "galore_layerwise": True,
      "max_grad_norm": 0.0},
     {"optim": "galore_adamw_8bit_layerwise", "optim_target_modules": ["mlp", "self_attn"],
      "optim_args": {"rank": 64, "update_proj_gap": 20, "scale": 0.5, "proj_type": "left"}}),
    ({"use_apollo": True, "optim": "adamw_torch", "apollo_scale_type": "tensor", "apollo_rank": 1,
      "apollo_scale": 128.0, "apollo_scale_front": True},
     {"optim": "apollo_adamw", "optim_target_modules": "all-linear",
      "optim_args": {"rank": 1, "update_proj_gap": 200, "scale": 128.0, "proj": "random", "proj_type": "std",
                     "scale_type": "tensor"}}),
    ({"use_badam": True, "badam_mode": "ratio", "badam_mask_mode": "scatter", "badam_switch_interval": 9,
      "badam_start_block": 2, "badam_update_ratio": 0.1, "badam_switch_mode": "random", "badam_verbose": 2},
     {"optim": "badam", "optim_target_modules": None,
      "optim_args": {"badam_mode": "ratio", "badam_mask_mode": "scatter", "badam_switch_interval": 9,
                     "badam_start_block": 2, "badam_update_ratio": 0.1, "badam_switch_mode": "random"}}),
    ({"use_badam": False, "use_galore": False, "badam_mode": "ratio"},
     {"optim": "adamw", "optim_args": None, "optim_target_modules": None}),
    ({"embedding_lr": 1e-5}, {"embedding_learning_rate": 1e-5}),
])  # fmt: skip
def test_keys_of_llama_factory_and_axolotl_are_mapped(given, expected):
    found = config(**given)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("given", [
    {"use_galore": True, "use_apollo": True}, {"use_galore": True, "optim": "adafactor"},
    {"use_badam": True, "badam_mode": "rows"}, {"use_apollo": True, "apollo_proj": "gauss"},
])  # fmt: skip
def test_keys_that_have_no_equivalent_are_refused(given):
    refused("", **given)


def test_every_key_of_a_switch_is_known():
    for switch, options in OPTIMIZER_SWITCHES.items():
        assert isinstance(translate(switch, {switch: True}), Mapped)
        assert isinstance(translate(switch, {switch: True, "optim": "lion_8bit"}), Refused)
        for key in (*options, *OPTIMIZER_KEYS[switch]):
            assert translate(key, {key: 1, switch: True}) == Ignored("")
            assert isinstance(translate(key, {key: 1}), Ignored)


@pytest.mark.parametrize(("key", "given"), [
    ("optim_in_backward", {"optim_in_backward": True, "optim": "adafactor", "max_grad_norm": 0}),
    ("max_grad_norm", {"optim_in_backward": True}),
    ("gradient_accumulation_steps",
     {"optim_in_backward": True, "max_grad_norm": 0, "gradient_accumulation_steps": 2}),
    ("dtype", {"optim_in_backward": True, "max_grad_norm": 0, "dtype": "float16"}),
    ("lora_preconditioner", {"optim_in_backward": True, "max_grad_norm": 0, "lora_preconditioner": "riemannian"}),
    ("parallel", {"optim_in_backward": True, "max_grad_norm": 0, "parallel": {"data": 2}}),
    ("optim_offload", {"optim_offload": True, "optim": "muon"}),
    ("optim_offload", {"optim_offload": True, "optim": "lamb"}),
    ("optim_offload", {"optim_offload": False, "optim": "paged_adamw_8bit"}),
])  # fmt: skip
def test_places_that_an_optimizer_does_not_have_are_refused(key, given):
    refused(key, **given)


@pytest.mark.parametrize("given", [
    {"optim_in_backward": True, "max_grad_norm": 0}, {"optim_offload": True}, {"optim_offload": False},
    {"optim_offload": True, "optim": "paged_lion_8bit", "optim_in_backward": "auto"},
])  # fmt: skip
def test_places_that_an_optimizer_has(given):
    assert config(**given).optim_in_backward == given.get("optim_in_backward", "auto")
