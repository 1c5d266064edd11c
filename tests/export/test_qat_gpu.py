"""Quantization-aware training on a GPU: the bits of the forward, gradients, and a run through to the merged model."""

import gc
import json

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.autograd.lora import LoRA
from halfbyte.config import load_config
from halfbyte.export.merge import merge
from halfbyte.formats import named
from halfbyte.qat.fake_quantize import fake_quantize, fake_quantized_linear, merged_weight
from halfbyte.tensor import QuantizedTensor
from halfbyte.train.run import train
from tests.helpers.merge_runs import byte_tokenizer

pytestmark = pytest.mark.gpu
SCHEMES = ["nf4", "int4", "int8", "fp8", "nvfp4", "kbit2"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_against_autograd_of_the_composition(scheme):
    format = named(scheme)
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1536, 1024, device="cuda", dtype=torch.bfloat16)
    lora = LoRA(
        torch.randn(16, 1024, device="cuda", requires_grad=True),
        torch.randn(1536, 16, device="cuda", requires_grad=True),
        0.5,
    )
    merged = merged_weight(weight, lora)
    result = fake_quantized_linear(x, weight, None, format, lora)
    stored = QuantizedTensor.quantize(merged, format)
    assert torch.equal(result, F.linear(x, stored.dequantize(torch.bfloat16)))
    trained, grad = (x, lora.a, lora.b), torch.randn_like(result)
    composed = F.linear(x, fake_quantize(weight + (lora.b @ lora.a) * 0.5, format).bfloat16())
    theirs = torch.autograd.grad(composed, trained, grad)
    for own, other in zip(torch.autograd.grad(result, trained, grad), theirs, strict=True):
        assert (own - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bits_are_those_of_a_cpu(scheme):
    weight = torch.randn(200, 1000).bfloat16()
    assert torch.equal(fake_quantize(weight.cuda(), named(scheme)).cpu(), fake_quantize(weight, named(scheme)))


@pytest.mark.parametrize("keys", [{}, {"use_peft": False, "learning_rate": 1e-3}], ids=["lora", "full"])
@pytest.mark.parametrize("scheme", ["nf4", "int4", "nvfp4"])
def test_a_run_is_merged_to_what_it_computed(tmp_path, scheme, keys):
    gc.collect()
    others = torch.cuda.memory_allocated()  # what other tests hold, which counts as this run's memory
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 272}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=257, bos_token_id=256))
    model.bfloat16().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"what is {n} plus 3?", "completion": f" it is {n + 3}."} for n in range(64)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"model_name_or_path": str(tmp_path / "model"), "dataset": str(tmp_path / "data.jsonl"), "device": "cuda"}
    own |= {"output_dir": str(tmp_path / "out"), "load_in_4bit": False, "qat_scheme": scheme, "max_length": 64}
    own |= {"per_device_train_batch_size": 8, "sample_prompts": 1, "sample_max_new_tokens": 4, "num_train_epochs": 2.0}
    result = train(load_config(None, own | keys))
    memory = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert memory["measured"]["peak_bytes"] - others <= 1.1 * memory["predicted"]["total"]
    found = merge(result.output_dir, tmp_path / "merged").targets["original"]
    # Trained whole, embeddings, norms and head are fp32; merged they are bf16: three roundings in a row.
    rounding = 1e-3 if keys == {} else 3 * 2**-9
    assert found.trained.max_logit_difference <= rounding * found.largest_logit
    assert found.noise.kl > 10 * found.trained.kl
