"""Tiny bases and run directories; adapters are random unless they were trained."""

import json

import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from halfbyte.adapters.lora import add_adapter, save_adapter
from halfbyte.config import RunConfig, dump_config, load_config
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.train import run as sft

TEMPLATE = "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
TEXT = "".join(f"Question {n}: how much is {n} times {n}? Answer: {n * n}.\n" for n in range(12))


def byte_tokenizer():
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", bos_token="<s>")


def save_base(folder, dtype=torch.bfloat16, *, shard="120KB", **keys):
    """A random Llama large enough to have logits of a trained one's size."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 272}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15} | keys
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=257, bos_token_id=256)).to(dtype)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder, max_shard_size=shard)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_run(folder, base, *, text=TEXT, scale=0.05, tokenizer=None, **keys):
    """Create the output_dir of a run on `base`: adapter/, config.resolved.yaml, data_report.json. `tokenizer`:
    folder of the one to save; default: one token per byte, with a chat template that the base does not have."""
    config = RunConfig(**{"model_name_or_path": str(base), "dataset": "d", "r": 4, "device": "cpu"} | keys)
    model = load_model(str(base), load_in_4bit=config.load_in_4bit, device="cpu")
    model = add_adapter(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    save_adapter(model, folder / "adapter")
    own = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else byte_tokenizer()
    own.chat_template = own.chat_template or TEMPLATE
    own.save_pretrained(folder / "adapter")
    (folder / "config.resolved.yaml").write_text(dump_config(config))
    report = {"samples": [{"tokens": list(text), "trained": [True] * len(text)}]}
    (folder / "data_report.json").write_text(json.dumps(report))
    return folder


def by_peft(run, base, target):
    """State dict of PEFT's own merge, in fp32, of the adapter onto the base or onto what 4-bit loading makes of it."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if target == "dequantized":
        quantized = dict(load_model(str(base), device="cpu").named_parameters())
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if isinstance(quantized[name].data, QuantizedTensor):
                    parameter.copy_(quantized[name].data.dequantize(torch.float32))
    return PeftModel.from_pretrained(plain, run / "adapter").merge_and_unload().state_dict()


def tensors(folder):
    """All tensors of a checkpoint folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def sums(low, high):
    """Rows of addition, as the runs here are trained on."""
    return [f"{n} plus {n % 7} is {n + n % 7}." for n in range(low, high)]


def save_base_and_sums(folder, dtype=torch.bfloat16):
    """Create `model`, a random base, and `data.txt`, rows of addition."""
    save_base(folder / "model", dtype)
    (folder / "data.txt").write_text("\n".join(sums(1, 40)))
    return folder


def save_tied_and_untied(folder, rows):
    """Create `tied` and `untied`, random bases in float32, and `data.jsonl` with `rows`."""
    for name, tied in (("tied", True), ("untied", False)):
        save_base(folder / name, torch.float32, shard="10MB", tie_word_embeddings=tied)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def logits_in_fp32(model, ids):
    with torch.no_grad():
        return model.float().eval()(input_ids=ids).logits


def save_trained_base(folder, steps=80):
    """A small Llama that learned to add, a little."""
    save_base(folder, torch.float32, shard="10MB", initializer_range=0.05)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), byte_tokenizer()
    ids = tokenizer("".join(sums(0, 400)))["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    torch.manual_seed(5)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 64, (12,)).tolist()
        batch = torch.tensor([ids[start : start + 64] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(folder)
    return folder


def train_run(folder, base, **keys):
    """A run that really learned, by halfbyte's own trainer: the same sums in other words, some rows held out."""
    rows = [{"prompt": f"what is {n} and {n % 7}?", "completion": f" it is {n + n % 7}!"} for n in range(200, 360)]
    data = folder.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model_name_or_path": str(base), "dataset": str(data), "output_dir": str(folder), "device": "cpu"}
    given |= {"dtype": "float32", "r": 8, "max_steps": 40, "learning_rate": 1e-3, "per_device_train_batch_size": 8}
    given |= {"max_length": 64, "sample_prompts": 0, "eval_split_size": 80, "save_steps": 1000, "seed": 1}
    sft.train(load_config(None, given | keys))
    return folder
