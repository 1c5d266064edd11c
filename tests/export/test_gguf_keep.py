"""`quantization: keep`: linear layers of a GGUF file in formats that hold its very values, trained on and merged."""

import json
from collections import Counter

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from halfbyte.adapters.lora import add_adapter
from halfbyte.cli.check import check_run
from halfbyte.config import Origin, RunConfig, load_config
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.gguf.formats import EXACT, exact_format, exact_parts
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.find import load_model_config
from halfbyte.loading.load import load_model
from halfbyte.plan.shapes import ModelShapes
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import finetune
from halfbyte.utils.errors import CheckpointError, ConfigError
from halfbyte.utils.notices import notices_so_far
from tests.helpers.gguf_models import save_model

OPTIONS = {"dtype": "float32", "device": "cpu"}
IDS = torch.arange(40, 80)[None]
TYPES = {  # of the mixed file; norms stay in F32
    "attn_q": Type.Q4_0, "attn_k": Type.Q8_0, "attn_v": Type.MXFP4, "attn_output": Type.Q4_1, "ffn_gate": Type.Q4_0,
    "ffn_up": Type.Q5_0, "ffn_down": Type.Q8_0, "token_embd": Type.Q8_0, "output.": Type.Q8_0,
}  # fmt: skip
FILES = {  # llama.cpp's names of weights with kept types, and where transformers has them
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))


def rewritten(path, out, types=TYPES, change=lambda name, data: data):
    """An F32 file once more, its tensors encoded by the gguf library in the types of what their names contain."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        own = [type_ for key, type_ in types.items() if key in tensor.name and "norm" not in tensor.name]
        type_ = own[0] if own else Type.F32
        values = np.array(tensor.data).reshape([int(size) for size in reversed(tensor.shape)])
        data = values if type_ == Type.F32 else gguf.quants.quantize(values, type_)
        writer.add_tensor(tensor.name, change(tensor.name, data), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A Llama's F32 file."""
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder / "model", "llama", intermediate_size=128)
    export_gguf(folder / "model", "f32", folder / "m.gguf", device="cpu")
    return folder / "m.gguf"


@pytest.fixture(scope="module")
def mixed(exact):
    return rewritten(exact, exact.parent / "mixed.gguf")


def decoded(path):
    """Name in the file → fp32 values of the gguf library."""
    tensors = gguf.GGUFReader(path).tensors
    return {each.name: torch.from_numpy(gguf.quants.dequantize(each.data, each.tensor_type)) for each in tensors}


def in_halves(rows, heads):
    """Rows of each head 0, 1, 2, 3, … of the file to 0, 2, …, 1, 3, …"""
    size = len(rows) // heads
    order = [head * size + at for head in range(heads) for first in (0, 1) for at in range(first, size, 2)]
    return rows[order]


def linears(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}


def plain_twin(model):
    """The model with its dequantized weights in fp32, in nn.Linear."""
    twin = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    state = {name: each for name, each in model.state_dict().items() if name in twin.state_dict()}
    state |= {f"{name}.weight": each.weight.dequantize(torch.float32) for name, each in linears(model).items()}
    twin.load_state_dict(state)
    return twin


def random_blocks(type_, rows, count):
    """Blocks with any codes, and scales from the whole range that quantizers write."""
    size = gguf.GGML_QUANT_SIZES[type_][1]
    blocks = torch.randint(0, 256, (rows, count, size), dtype=torch.uint8)
    if type_ == Type.MXFP4:
        blocks[..., 0] = torch.randint(0, 255, (rows, count))
        return blocks
    scales = torch.randn(rows, count, 1) * 2.0 ** torch.randint(-26, 15, (rows, count, 1))  # subnormal ones too
    scales = scales.abs() if type_ == Type.Q8_0 else scales
    blocks[..., :2] = scales.half().view(torch.uint8)
    return blocks


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", EXACT, ids=lambda type_: type_.name)
def test_any_blocks_keep_their_values(type_):
    for rows, count in ((8, 1), (24, 3), (64, 5)):
        blocks, shape = random_blocks(type_, rows, count), (rows, 32 * count)
        expected = gguf.quants.dequantize(blocks.flatten(1).numpy(), type_)
        parts, format_ = exact_parts(type_, blocks), exact_format(type_, shape)
        assert {name: (tuple(part.shape), part.dtype) for name, part in parts.items()} == format_.part_specs(shape)
        found = format_.dequantize(parts, shape, torch.float32)
        assert torch.equal(found, torch.from_numpy(expected))
        for dtype in (torch.bfloat16, torch.float16):  # rounded once
            assert torch.equal(format_.dequantize(parts, shape, dtype), found.to(dtype))


def test_layers_of_a_file_hold_its_values(mixed):
    model, values = load_model(str(mixed), quantization="keep", **OPTIONS), decoded(mixed)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for layer in range(2):
        for theirs, ours in FILES.items():
            weight = model.get_submodule(f"model.layers.{layer}.{ours}").weight
            assert weight.format == EXACT[TYPES[theirs]][0]
            expected = values[f"blk.{layer}.{theirs}.weight"]
            if theirs in heads:
                expected = in_halves(expected, heads[theirs])
            assert torch.equal(weight.dequantize(torch.float32), expected), ours
    assert Counter(each.weight.format.spec for each in linears(model).values()) == {
        "gptq_v2:32:float16:runs": 4, "hqq:8:32:range:float16": 4, "mxfp4": 2, "blockwise4:nf4:64:nested": 4,
    }  # fmt: skip
    kept, others = "2 MXFP4, 4 Q4_0, 4 Q8_0", "2 Q4_1, 2 Q5_0"
    assert any(str(mixed) in text and kept in text and others in text for text in notices_so_far().values()), (
        notices_so_far()
    )


def test_the_default_import_lists_what_keep_preserves(mixed, exact, tmp_path):
    load_model(str(mixed), **OPTIONS)
    load_model(str(exact), **OPTIONS)
    hints = [each for each in notices_so_far().values() if str(tmp_path) in each and "`quantization: keep`" in each]
    assert len(hints) == 1
    assert hints[0].startswith(f"importing {mixed}")
    assert hints[0].endswith(": 4 Q4_0, 4 Q8_0, 2 MXFP4")


def test_logits_are_those_of_the_dequantized_model(mixed):
    model = load_model(str(mixed), quantization="keep", **OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, plain_twin(model)(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["llama, linear rope, biases", "qwen2", "qwen3", "gemma3", "phi3", "mixtral"])
@pytest.mark.parametrize("mix", ["q4_0", "q8_0"])
def test_other_families(tmp_path, name, mix):
    save_model(tmp_path / "model", name)
    export_gguf(tmp_path / "model", mix, tmp_path / "m.gguf", device="cpu")
    options = {"dtype": "bfloat16", "device": "cpu"}
    kept = load_model(str(tmp_path / "m.gguf"), quantization="keep", **options)
    usual = load_model(str(tmp_path / "m.gguf"), load_in_4bit=False, **options)
    assert {each.weight.format for each in linears(kept).values()} == {EXACT[Type[mix.upper()]][0]}
    with torch.no_grad():
        assert torch.equal(kept(IDS).logits, usual(IDS).logits)


# --- training ---------------------------------------------------------------------------------------------------------


def gradients(model):
    adapted = add_adapter(model, RunConfig(model_name_or_path="x", dataset="x", r=4, use_kernels=False))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    return {name: each.grad for name, each in adapted.named_parameters() if each.requires_grad}


def test_gradients_of_adapters_are_those_on_the_dequantized_model(mixed):
    model = load_model(str(mixed), quantization="keep", **OPTIONS)
    expected, found = gradients(plain_twin(model)), gradients(model)
    assert len(found) == 2 * 14
    for name, value in expected.items():
        assert float(found[name].norm()) > 0
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": f"what is {n}?", "completion": f" it is {n}."} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "data.jsonl")


@pytest.mark.slow
def test_a_run_is_saved_merged_and_exported(mixed, tmp_path, data):
    out = tmp_path / "out"
    keys = {"output_dir": str(out), "device": "cpu", "max_steps": 2, "max_length": 64, "r": 4, "learning_rate": 1e-2}
    finetune(str(mixed), data, quantization="keep", **keys)
    saved = load_saved(str(out))
    assert (saved.config.model_name_or_path, saved.config.quantization) == (str(mixed), "keep")
    report = merge(out, tmp_path / "merged")
    assert report.targets.keys() == {"dequantized"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    weight = saved.model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    update = weight.lora_B["default"].weight @ weight.lora_A["default"].weight * weight.scaling["default"]
    expected = (weight.base_layer.weight.dequantize(torch.float32) + update).bfloat16()
    assert torch.equal(merged.model.layers[0].self_attn.q_proj.weight, expected)
    export_gguf(out, "q8_0", tmp_path / "run.gguf", device="cpu")
    again = load_model(str(tmp_path / "run.gguf"), quantization="keep", **OPTIONS)
    assert {each.weight.format.spec for each in linears(again).values()} == {"hqq:8:32:range:float16"}
    unpacked = [each.name for each in (tmp_path / "cache/gguf").iterdir() if each.name.startswith("mixed")]
    assert len(unpacked) == 1  # once for all of this
    with pytest.raises(ConfigError):
        merge(out, tmp_path / "other", base="original")


@pytest.mark.llamacpp
@pytest.mark.parametrize("mix", ["q4_0", "q8_0"])
def test_an_adapter_of_a_kept_base_fits_the_file_in_llamacpp(exact, tmp_path, data, mix):
    """Logits differ only by llama.cpp's 8-bit activations (2.5%); the adapter changes them by their own size."""
    llama_cpp = pytest.importorskip("llama_cpp")
    types = dict.fromkeys(("attn", "ffn", "token_embd", "output."), Type[mix.upper()])
    base, out = rewritten(exact, tmp_path / "m.gguf", types), tmp_path / "out"
    keys = {"output_dir": str(out), "device": "cpu", "max_steps": 8, "max_length": 64, "r": 4, "learning_rate": 3e-2}
    finetune(str(base), data, quantization="keep", **keys)
    adapter = str(export_adapter(out, "f32"))
    model = load_saved(str(out), ["dtype=float32"]).model
    with torch.no_grad():
        adapted = model(IDS).logits[0]
        with model.disable_adapter():
            bare = model(IDS).logits[0]
    options = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "type_k": 0, "type_v": 0, "n_threads": 1}
    for expected, lora in ((adapted, {"lora_path": adapter}), (bare, {})):
        theirs = llama_cpp.Llama(str(base), logits_all=True, verbose=False, **options, **lora)
        theirs.eval(IDS[0].tolist())
        found = torch.from_numpy(np.array(theirs.scores[: IDS.numel()]))[:, : expected.shape[1]]
        assert (found - expected).norm() < 0.05 * expected.norm()
    assert (adapted - bare).norm() > 0.5 * bare.norm()


@pytest.mark.gpu
def test_on_a_gpu(mixed, tmp_path, data):
    """The CPU's values in every layer, bit for bit, and a run of two steps."""
    here, there = (
        load_model(str(mixed), quantization="keep", dtype="bfloat16", device=each) for each in ("cpu", "cuda")
    )
    for name, each in linears(here).items():
        for dtype in (torch.float32, torch.bfloat16):
            found = there.get_submodule(name).weight.dequantize(dtype).cpu()
            assert torch.equal(found, each.weight.dequantize(dtype)), (name, dtype)
    keys = {"output_dir": str(tmp_path / "out"), "device": "cuda", "max_steps": 2, "max_length": 64, "r": 4}
    finetune(str(mixed), data, quantization="keep", **keys)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert merge(tmp_path / "out", tmp_path / "merged").targets


@pytest.mark.slow
def test_the_plan_counts_what_is_stored(mixed, data, capsys):
    keys = {"model_name_or_path": str(mixed), "dataset": data, "quantization": "keep", "device": "cpu"}
    config = load_config(None, keys)
    model = load_model(str(mixed), quantization="keep", device="cpu", dtype="bfloat16")
    parts = [part for each in linears(model).values() for part in each.weight.parts.values()]
    rest = [each for name, each in model.named_parameters() if name.removesuffix(".weight") not in linears(model)]
    expected = sum(each.nbytes for each in (*parts, *rest, *model.buffers()))
    config.dtype = "bfloat16"
    shapes = ModelShapes(config, load_model_config(Origin(str(mixed), keep=True)), torch.device("cpu"))
    assert shapes.frozen_bytes() == expected
    check_run(config)
    assert "ready" in capsys.readouterr().out


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_keep_without_any_preserved_type_is_refused(exact, tmp_path):
    path = rewritten(exact, tmp_path / "m.gguf", {"ffn": Type.Q4_1, "attn": Type.Q5_1})
    message = r"m\.gguf.*8 Q5_1, 6 Q4_1.*Q4_0, Q8_0, MXFP4"
    with pytest.raises(ConfigError, match=message) as refused:
        load_model(str(path), quantization="keep", **OPTIONS)
    assert "remove" in refused.value.fix
    assert not list((tmp_path / "cache").glob("gguf/*"))


@pytest.mark.parametrize("kind", ["attn_q", "attn_k", "attn_v"])
def test_damaged_scales_are_named(exact, tmp_path, kind):
    bad = {"attn_q": (slice(0, 2), (0, 0x7C)), "attn_k": (slice(0, 2), (1, 0x80)), "attn_v": (0, 0xFF)}[kind]

    def damage(name, value):
        if name == f"blk.1.{kind}.weight":
            value[0, bad[0]] = bad[1]
        return value

    path = rewritten(exact, tmp_path / "m.gguf", change=damage)
    message = rf"m\.gguf: blk\.1\.{kind}\.weight \({TYPES[kind].name}\): 1 "
    with pytest.raises(CheckpointError, match=message):
        load_model(str(path), quantization="keep", **OPTIONS)
    assert not list((tmp_path / "cache").rglob("*"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"skip_quant_first_layers": 1}, "skip_quant_first_layers.*quantization: keep"),
        ({"load_in_4bit": False}, "load_in_4bit: false.*quantization: keep"),
        ({"use_peft": False}, None),
        ({"qat_scheme": "nf4"}, None),
    ],
)
def test_keys_that_contradict_it(keys, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"model_name_or_path": "m.gguf", "dataset": "x", "quantization": "keep", **keys})
    config = load_config(None, {"model_name_or_path": "m.gguf", "dataset": "x", "quantization": "keep",
                                "bnb_4bit_quant_type": "fp4", "bnb_4bit_blocksize": 128})  # fmt: skip
    assert (config.quantized, config.bnb_4bit_quant_type) == (True, "fp4")
