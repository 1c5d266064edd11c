"""The formats registered with transformers: from_pretrained(quantization_config=...), and memory while loading."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from halfbyte.formats import Blockwise4
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.load import load_model
from halfbyte.loading.quantizer import HalfbyteConfig
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ConfigError

TOKENS = torch.tensor([[5, 9, 3, 77, 21, 4, 4, 60]])


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def from_pretrained(folder, config, **keys):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, **keys
    )


def test_from_pretrained_equals_load_model(tiny_checkpoint):
    folder = tiny_checkpoint()
    one = from_pretrained(folder, HalfbyteConfig())
    other = load_model(str(folder), dtype="float32", device="cpu")
    assert linears(one).keys() == linears(other).keys()
    for name, module in linears(one).items():
        found = linears(other)[name].weight
        assert module.weight.format == found.format
        assert all(torch.equal(part, found.parts[key]) for key, part in module.weight.parts.items())
    with torch.no_grad():
        assert torch.equal(one(TOKENS).logits, other(TOKENS).logits)
    assert one.is_quantized


@pytest.mark.parametrize(
    ("options", "format"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, Blockwise4("fp4", 64, True)),
        ({"bnb_4bit_blocksize": 256, "bnb_4bit_use_double_quant": False}, Blockwise4("nf4", 256, False)),
    ],
)
def test_options(options, format, tiny_checkpoint):
    model = from_pretrained(tiny_checkpoint(), HalfbyteConfig(**options))
    assert {module.weight.format for module in linears(model).values()} == {format}


def test_skip_modules_stay_unquantized(tiny_checkpoint):
    model = from_pretrained(tiny_checkpoint(), HalfbyteConfig(llm_int8_skip_modules=["lm_head", "down_proj"]))
    assert len(linears(model)) == 12
    assert not any("down_proj" in name for name in linears(model))
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_tied_head_stays_unquantized(tiny_checkpoint):
    model = from_pretrained(tiny_checkpoint("Qwen2", tie_word_embeddings=True), HalfbyteConfig())
    assert "lm_head" not in linears(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="nf3"):
        HalfbyteConfig(bnb_4bit_quant_type="nf3")
    with pytest.raises(ConfigError, match="48"):
        HalfbyteConfig(bnb_4bit_blocksize=48)


def test_saved_config_names_the_layout_on_disk(tiny_checkpoint, tmp_path):
    from_pretrained(tiny_checkpoint(), HalfbyteConfig()).save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (entry["quant_method"], entry["load_in_4bit"], entry["bnb_4bit_quant_type"]) == ("bitsandbytes", True, "nf4")
    again = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert all(isinstance(module.weight, QuantizedTensor) for module in linears(again).values())


def test_training_mode_and_gradients(tiny_checkpoint):
    """The base is frozen; a gradient reaches the embeddings through every quantized layer."""
    model = from_pretrained(tiny_checkpoint(), HalfbyteConfig()).train()
    model(TOKENS, labels=TOKENS).loss.backward()
    assert model.model.embed_tokens.weight.grad.norm() > 0
    assert all(module.weight.grad is None for module in linears(model).values())


MEASURE = """
import sys, threading, time
import psutil, torch, transformers
from halfbyte.loading import quantizer
from halfbyte.loading.load import load_model

def anonymous():  # the mapped checkpoint is the system's cache, not our memory
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

torch.set_num_threads(1)
load_model(sys.argv[2], device="cpu", dtype="bfloat16")  # imports, first allocations
peak = before = anonymous()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], device="cpu", dtype="bfloat16")
done = True
watcher.join()
print("GROWTH", peak - before, "HELD", anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_while_loading(tiny_checkpoint, tmp_path):
    """Peak growth stays below two shards and the quantized model, for 8 shards of about 20 MB."""
    shard, slack = 20e6, 12e6
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 64}
    config = transformers.LlamaConfig(vocab_size=1000, num_attention_heads=8, num_key_value_heads=8, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=int(shard))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert len(list(tmp_path.glob("*.safetensors"))) >= 8
    del model
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(tiny_checkpoint())],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.split()
    growth, held = int(words[words.index("GROWTH") + 1]), int(words[words.index("HELD") + 1])
    assert growth <= 2 * shard + 0.30 * stored + slack, f"{growth / 1e6:.0f} MB for {stored / 1e6:.0f} MB on disk"
    assert held <= 0.30 * stored + slack, f"{held / 1e6:.0f} MB held for {stored / 1e6:.0f} MB on disk"
