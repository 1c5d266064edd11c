"""Resolving flat keys to typed values, from a file and from keywords in Python."""

import ast

import pytest

from halfbyte.config import SIXTEEN, Origin, Parallel, Precision, RunConfig, Storage, load_config, storage_of
from halfbyte.config.layouts import unsupported_reason
from halfbyte.config.schema import AdapterSection, QuantizationSection
from halfbyte.utils.errors import ConfigError
from tests.helpers.sources import PACKAGE, syntax_nodes

NF4 = "blockwise4:nf4:64:nested"
IN_16_BITS = {"load_in_4bit": False}


def resolved(**keys):
    return RunConfig(model_name_or_path="m", dataset="d", **keys)


STORED = [
    ({}, Storage((("*", NF4),))),
    (IN_16_BITS, Storage()),
    ({"quantization": SIXTEEN}, Storage()),
    ({"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}, Storage((("*", "blockwise4:fp4:64:plain"),))),
    ({"quantization": "fp4", "bnb_4bit_blocksize": 32}, Storage((("*", "blockwise4:fp4:32:nested"),))),
    (
        {"quantization": {"*.a": "16bit", "*.b": "blockwise4:nf4:128:plain", "*": "nf4"}, "bnb_4bit_blocksize": 256},
        Storage((("*.a", "16bit"), ("*.b", "blockwise4:nf4:128:plain"), ("*", "blockwise4:nf4:256:nested"))),
    ),
    ({"quantization": "kbit4", "skip_quant_last_layers": 2}, Storage((("*", "kbit4"),), skip_last=2)),
    (
        {"quantization": "keep", "bnb_4bit_quant_type": "fp4", "bnb_4bit_blocksize": 128},
        Storage((("*", "blockwise4:fp4:128:nested"),), keep=True),
    ),
    (IN_16_BITS | {"qat_scheme": "int4"}, Storage(qat_scheme="int4")),
]


@pytest.mark.parametrize(("keys", "storage"), STORED)
def test_storage_is_the_same_from_a_run_and_from_python(keys, storage):
    assert resolved(**keys).storage == storage
    assert storage_of(**keys) == storage
    assert storage.quantized == RunConfig(model_name_or_path="m", dataset="d", **keys).quantized
    assert resolved(**keys).origin.keep == storage.keep


def test_every_quantization_key_changes_the_storage():
    """Changing any quantization key changes `storage`."""
    other = {
        "load_in_4bit": False, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_blocksize": 32, "quantization": "int8", "skip_quant_first_layers": 1, "skip_quant_last_layers": 1,
        "merge_aware": True, "quantize_vision_tower": True,
    }  # fmt: skip
    assert other.keys() | {"qat_scheme"} == QuantizationSection.model_fields.keys()
    for key, value in other.items():
        assert storage_of(**{key: value}) != storage_of(), key
    assert storage_of(load_in_4bit=False, qat_scheme="nf4") != storage_of(load_in_4bit=False)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type.*nf4.*fp4.*'nf3'"),
        ({"bnb_4bit_blocksize": 48}, "bnb_4bit_blocksize.*32.*64"),
        ({"quant": "nf4"}, "'quant'"),
        ({"max_length": 3}, "'max_length'"),
        ({"quantization": "kbit4", "load_in_4bit": False}, "load_in_4bit: false.*quantization: kbit4"),
        ({"qat_scheme": "int4"}, None),
        ({"load_in_4bit": False, "skip_quant_first_layers": 1}, "skip_quant_first_layers"),
    ],
)
def test_keywords_are_validated_like_keys(keys, said):
    with pytest.raises(ConfigError, match=said):
        storage_of(**keys)


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, Precision("auto", "auto")),
        ({"dtype": "float16"}, Precision("float16", "float16")),
        ({"use_peft": False, **IN_16_BITS}, Precision("auto", "float32")),
        ({"use_peft": False, **IN_16_BITS, "dtype": "bfloat16"}, Precision("bfloat16", "bfloat16")),
    ],
)
def test_full_fine_tuning_keeps_float32_weights_unless_a_dtype_is_asked_for(keys, precision):
    assert resolved(**keys).precision == precision


def test_an_adapter_has_the_keys_of_its_section_and_its_base():
    keys = {"r": 4, "lora_alpha": 3.0, "use_dora": True, "rank_pattern": {"q_proj": 2}}
    adapter = resolved(**keys, model_revision="abc", trust_remote_code=True).adapter
    assert {key: getattr(adapter, key) for key in keys} == keys
    assert adapter.origin == Origin("m", "abc", True)
    assert type(adapter).model_fields.keys() - AdapterSection.model_fields.keys() == {"origin"}
    assert resolved(use_peft=False, **IN_16_BITS).adapter is None
    with pytest.raises(ValueError, match="frozen"):
        adapter.r = 8


def test_resolved_keys_are_read_only_in_config():
    """Other folders receive typed values instead. (Two are also fields of `Storage`.)"""
    keys = QuantizationSection.model_fields.keys() - {"qat_scheme", "merge_aware"} | {"model_revision"}
    assert not [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "config"
        for node in syntax_nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in keys
    ]


@pytest.mark.parametrize(
    ("key", "axis", "keys"),
    [
        ("use_peft", "pipeline", {"use_peft": False, "load_in_4bit": False}),
        ("modules_to_save", "pipeline", {"modules_to_save": ["lm_head"]}),
        ("optim", "tensor", {"optim": "adafactor"}),
        ("recipe", "tensor", {"recipe": "fp8-hybrid"}),
        ("router_aux_loss_coef", "context", {"router_aux_loss_coef": 0.1}),
    ],
)
def test_keys_that_an_axis_does_not_support_are_refused_before_processes_start(key, axis, keys):
    given = {"model_name_or_path": "m", "dataset": "d", **keys}
    with pytest.raises(ConfigError, match=key):
        load_config(None, {**given, "parallel": {axis: 2}})
    free = load_config(None, {**given, "parallel": "auto"})
    assert unsupported_reason(Parallel(**{axis: 2}), free).key == key  # `auto` does not choose the axis either
    assert unsupported_reason(Parallel(data=2, shard=2), free) is None
