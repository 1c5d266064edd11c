"""load_model and load_tokenizer on tiny checkpoints of five families: values, dtypes, and the answers to bad input."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig
from transformers.models.falcon.modeling_falcon import FalconLinear

from halfbyte.config import RunConfig
from halfbyte.formats import Blockwise4
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.find import load_model_config
from halfbyte.loading.load import check_attention, load_model, load_tokenizer
from halfbyte.modeling.architectures import is_plain_linear
from halfbyte.plan.shapes import ModelShapes
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Gemma3Text", "Phi3")
TOKENS = torch.tensor([[5, 9, 3, 77, 21, 4, 4, 60]])


@pytest.fixture
def damaged(tiny_checkpoint, tmp_path):
    """A copy of the tiny Llama that a test may break."""
    return shutil.copytree(tiny_checkpoint(), tmp_path / "tiny-llama")


def original(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def quantized_linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def weights_on_disk(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, tiny_checkpoint):
    folder = tiny_checkpoint(family)
    assert len(list(folder.glob("*.safetensors"))) >= 2
    model, reference = load_model(str(folder), dtype="float32", device="cpu"), original(folder)
    linears = {name for name, module in reference.named_modules() if isinstance(module, nn.Linear)}
    found = quantized_linears(model)
    assert set(found) == linears - {"lm_head"}
    format_ = Blockwise4("nf4", 64, True)
    for name, module in found.items():
        source = reference.get_submodule(name)
        expected = QuantizedTensor.quantize(source.weight.detach(), format_)
        assert module.weight.format == format_
        assert all(torch.equal(part, expected.parts[key]) for key, part in module.weight.parts.items()), name
        assert not module.weight.requires_grad
        assert (module.bias is None) == (source.bias is None)
        source.weight.data = expected.dequantize()
    rest = {name: p for name, p in model.named_parameters() if not isinstance(p, QuantizedTensor)}
    for name, parameter in rest.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, reference.get_parameter(name)), name
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-5)
    assert not model.training


def test_bfloat16_checkpoint(tiny_checkpoint):
    folder = tiny_checkpoint(dtype="bfloat16")
    model = load_model(str(folder), dtype=torch.bfloat16, device="cpu")
    stored = weights_on_disk(folder)
    for name, module in quantized_linears(model).items():
        expected = QuantizedTensor.quantize(stored[f"{name}.weight"], Blockwise4("nf4", 64, True))
        assert module.weight.dtype == torch.bfloat16
        assert torch.equal(module.weight.packed, expected.packed)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert logits(model).dtype == torch.bfloat16


def test_auto_dtype_depends_on_hardware_and_is_logged(tiny_checkpoint):
    from halfbyte.utils.hardware import compute_dtype

    model = load_model(str(tiny_checkpoint()), device="cpu")
    chosen = compute_dtype(torch.device("cpu"))
    assert model.model.norm.weight.dtype == chosen.dtype
    assert chosen.reason in notices.notices_so_far()["dtype-cpu"]


def test_sixteen_bit_mode(tiny_checkpoint):
    folder = tiny_checkpoint()
    model = load_model(str(folder), load_in_4bit=False, dtype="bfloat16", device="cpu")
    assert not quantized_linears(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), logits(original(folder, torch.bfloat16)))


@pytest.mark.parametrize(("family", "keys"), [("GPTNeoX", {}), ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64})])
def test_another_architecture_through_its_linears(family, keys, tiny_checkpoint):
    folder = tiny_checkpoint(family, **keys)
    model, reference = load_model(str(folder), dtype="float32", device="cpu"), original(folder)
    found = quantized_linears(model)
    head = {"lm_head", "embed_out"}
    linears = {name for name, module in reference.named_modules() if isinstance(module, nn.Linear)}
    assert set(found) == linears - head
    for name, module in found.items():
        reference.get_submodule(name).weight.data = module.weight.dequantize()
        assert torch.equal(module.bias, reference.get_submodule(name).bias)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_falcons_linears_are_quantized_and_planned(tmp_path, bias):
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    reference = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, bias=bias)).eval()
    reference.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", device="cpu")
    found = quantized_linears(model)
    assert found.keys() == {name for name, module in reference.named_modules() if isinstance(module, FalconLinear)}
    for name, module in found.items():
        reference.get_submodule(name).weight.data = module.weight.dequantize()
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-5)
    keys = {"model_name_or_path": str(tmp_path), "dataset": "d", "device": "cpu"}
    planned = ModelShapes(RunConfig(**keys), AutoConfig.from_pretrained(tmp_path), torch.device("cpu"))
    assert {name.removesuffix(".base_layer") for name in quantized_linears(planned.causal_lm)} == found.keys()


def test_the_plan_and_the_loader_refuse_conv1d_alike(tiny_checkpoint):
    """GPT-2 has transformers' transposed Conv1D."""
    folder = tiny_checkpoint("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=64)
    keys = {"model_name_or_path": str(folder), "dataset": "d", "device": "cpu"}
    with pytest.raises(ModelError, match=r"Conv1D") as loaded:
        load_model(str(folder), device="cpu")
    with pytest.raises(ModelError) as planned:
        ModelShapes(RunConfig(**keys), AutoConfig.from_pretrained(folder), torch.device("cpu"))
    assert str(planned.value) == str(loaded.value)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Grouped(nn.Linear):
    def forward(self, x):
        return F.linear(x.view(len(x), 2, -1), self.weight[:, : self.in_features // 2]).flatten(1)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


class Gained(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(sizes[1]))

    def forward(self, x):
        return super().forward(x) * self.gain


class Transposing(nn.Linear):
    def forward(self, x):
        return x.matmul(self.weight.t()).add(0 if self.bias is None else self.bias)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("bias", [True, False])
def test_subclasses_that_compute_a_linear_are_linears(device, bias):
    with torch.device(device):
        plain = [nn.Linear(64, 32, bias), Transposing(64, 32, bias), FalconLinear(64, 32, bias)]
        others = [Scaled(64, 32, bias), Grouped(64, 32), Noisy(64, 32, bias), Gained(64, 32), nn.Embedding(4, 64)]
        assert all(map(is_plain_linear, plain))
        assert not any(map(is_plain_linear, others))


def test_a_checkpoint_on_a_cpu_is_not_mapped_after_loading(tiny_checkpoint):
    """Its pages would count as the run's memory."""
    for keys in ({}, {"load_in_4bit": False}):
        model = load_model(str(tiny_checkpoint()), device="cpu", dtype="float32", **keys)
        tensors = [*model.parameters(), *model.buffers()]
        parts = [part for tensor in tensors for part in getattr(tensor, "parts", {"": tensor}).values()]
        assert all(part.untyped_storage().resizable() for part in parts)


# ---- checkpoints of bitsandbytes


@pytest.fixture(scope="module")
def bitsandbytes_checkpoint(tiny_checkpoint, tmp_path_factory):
    """The tiny Llama as transformers and bitsandbytes quantize and save it on a CPU."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("bnb")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(), quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    model.save_pretrained(folder, max_shard_size="50KB")
    return folder


def test_bitsandbytes_checkpoint_keeps_its_bytes(bitsandbytes_checkpoint):
    model = load_model(str(bitsandbytes_checkpoint), dtype="bfloat16", device="cpu")
    stored, found = weights_on_disk(bitsandbytes_checkpoint), quantized_linears(model)
    assert len(found) == 14
    for name, module in found.items():
        entries = module.state_dict()
        for suffix, value in entries.items():
            assert torch.equal(value, stored[f"{name}.{suffix}"]), f"{name}.{suffix}"
    assert "prequantized" in notices.notices_so_far()


def test_bitsandbytes_8bit_checkpoint_keeps_its_bytes(tiny_checkpoint, tmp_path):
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(), quantization_config=config, device_map={"": "cpu"}, dtype=torch.float16
    )
    theirs.save_pretrained(tmp_path)
    found = quantized_linears(load_model(str(tmp_path), dtype="bfloat16", device="cpu"))
    stored = weights_on_disk(tmp_path)
    assert len(found) == 14
    for name, module in found.items():
        assert torch.equal(module.weight.parts["codes"], stored[f"{name}.weight"]), name
        assert torch.equal(module.weight.parts["absmax"], stored[f"{name}.SCB"]), name
    assert "(int8)" in notices.notices_so_far()["prequantized"]


def test_what_we_save_loads_in_bitsandbytes(tiny_checkpoint, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    model = load_model(str(tiny_checkpoint()), dtype="bfloat16", device="cpu")
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    for name, module in quantized_linears(model).items():
        their_weight = theirs.get_submodule(name).weight
        assert isinstance(their_weight, bnb.nn.Params4bit)
        theirs_by_suffix = their_weight.quant_state.as_dict(packed=True) | {"": their_weight.data}
        for suffix, value in module.weight.format.to_state(
            module.weight.parts, module.weight.shape, torch.bfloat16
        ).items():
            assert torch.equal(theirs_by_suffix[suffix].view(-1), value.view(-1)), f"{name}.{suffix}"


def edit_config(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "16 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq"),
        ({"quant_method": "aqlm"}, "aqlm"),
    ],
)
def test_other_quantized_checkpoints_are_refused_by_name(damaged, entry, named):
    edit_config(damaged, quantization_config=entry)
    with pytest.raises((ModelError, CheckpointError), match=named):
        load_model(str(damaged), device="cpu")


# ---- bad input


def test_missing_folder_suggests_its_neighbour(damaged):
    with pytest.raises(ModelError):
        load_model(str(damaged.parent / "tiny-lama"))


def test_a_model_that_is_no_causal_lm(damaged):
    edit_config(damaged, model_type="t5", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(ModelError, match="causal"):
        load_model(str(damaged), device="cpu")


# ---- tokenizers


def write_tokenizer(folder, **special):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


def test_tokenizer_without_eos(tmp_path):
    with pytest.raises(ModelError, match="EOS"):
        load_tokenizer(write_tokenizer(tmp_path, pad_token="<pad>"))


def test_tokenizer_without_pad(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, eos_token="</s>"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert "pad-token" in notices.notices_so_far()


def test_folder_without_tokenizer(tiny_checkpoint):
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(str(tiny_checkpoint()))


def test_chat_template_from_a_file(tmp_path):
    folder = write_tokenizer(tmp_path, eos_token="</s>", pad_token="<pad>")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(folder, chat_template_path=str(tmp_path / "chat.jinja"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "a b"
    with pytest.raises(ModelError, match=r"absent\.jinja"):
        load_tokenizer(folder, chat_template_path=str(tmp_path / "absent.jinja"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("foo", "foo: Specified .* is not supported"),
        ("flash_attention_2", "flash_attention_2: FlashAttention2 .* installed"),
        ("kernels-community/flash-attn2", "kernels-community/flash-attn2: .*kernels.* not installed"),
        ("flex_attention", "flex_attention computes no gradients on a CPU"),
    ],
)
def test_unavailable_attention_is_named_with_its_key(tiny_checkpoint, name, why):
    folder, cpu = tiny_checkpoint(), torch.device("cpu")
    with pytest.raises(ConfigError, match=f"attn_implementation: ({why})") as found:
        check_attention(load_model_config(str(folder)), name, cpu, trains=True)
    assert "attn_implementation" in found.value.fix
    if name != "flex_attention":  # which evaluates
        with pytest.raises(ConfigError, match="attn_implementation: "):
            load_model(str(folder), device="cpu", attn_implementation=name)


@pytest.mark.gpu
def test_flex_attention_trains_on_a_gpu(tiny_checkpoint):
    inputs = torch.randint(3, 128, (2, 40), device="cuda")
    losses = []
    for name in ("sdpa", "flex_attention"):
        model = load_model(str(tiny_checkpoint(head_dim=16)), attn_implementation=name, load_in_4bit=False)
        loss = model.requires_grad_(True)(inputs, labels=inputs).loss
        loss.backward()
        losses.append(loss.item())
        assert model.model.layers[0].self_attn.q_proj.weight.grad.any()
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_4bit_checkpoint_is_not_loaded_in_16_bits(bitsandbytes_checkpoint):
    with pytest.raises(ModelError):
        load_model(str(bitsandbytes_checkpoint), load_in_4bit=False, device="cpu")
