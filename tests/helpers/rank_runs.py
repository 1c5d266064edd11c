"""Whole runs on several ranks and on one process, and their files."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from halfbyte.config import load_config
from halfbyte.train.run import train

VOCABULARY = 272


def write_place(folder, rows=23, **sizes):
    """A tiny Llama with a byte-level tokenizer in `model`, and `data.jsonl` with sums of uneven lengths."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["what is 1 plus 2? it is 3."] * 4, vocab_size=VOCABULARY, special_tokens=["</s>", "<pad>"])
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names).save_pretrained(folder / "model")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 1, "eos_token_id": 0}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(bos_token_id=None, **shape | sizes)).to(torch.bfloat16).save_pretrained(
        folder / "model"
    )
    texts = [{"prompt": "x" * (n % 5), "completion": f" it is {'1' * (n % 7 + 1)}."} for n in range(rows)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


def configured(place, output, **changed):
    keys = {
        "model_name_or_path": str(place / "model"),
        "dataset": str(place / "data.jsonl"),
        "output_dir": str(output),
        "device": "cpu",
        "dtype": "float32",
        "eval_split_size": 4,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "max_length": 64,
        "r": 4,
        "lora_dropout": 0.0,
        "sample_prompts": 2,
        "sample_max_new_tokens": 4,
        "max_grad_norm": 0.05,
    }
    return load_config(None, keys | changed)


def trains(mesh, place, output, keys, resume):
    """A case for ranks: a whole run, laid out as the configuration says."""
    train(configured(place, output, **keys), resume=resume)


def run(ranks, place, output, resume=None, **keys):
    """Train on `ranks`, or in this process if None, and return the run's files."""
    if ranks is None:
        train(configured(place, output, **keys), resume=resume)
    else:
        ranks.run(trains, place, output, keys, resume)
    return Left(output)


class Left:
    """Files of a finished run."""

    def __init__(self, folder):
        self.folder = Path(folder)
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        self.trained = [record for record in records if record["kind"] == "train"]
        self.evaluated = [record for record in records if record["kind"] == "eval"]
        files = ("adapter/adapter_model.safetensors", "model/model.safetensors")
        self.adapter = load_file(next(path for name in files if (path := self.folder / name).is_file()))
        self.memory = json.loads((self.folder / "memory.json").read_text())
        self.answers = json.loads((self.folder / "generations.json").read_text())

    def same_as(self, other, loss=1e-6, weights=1e-5):
        """Equal steps, counts and answers; losses and adapters but for the order of sums."""
        assert len(self.trained) == len(other.trained)
        for kind in ("trained", "evaluated"):
            for mine, theirs in zip(getattr(self, kind), getattr(other, kind), strict=True):
                for count in ("step", "tokens", "trained_tokens"):
                    assert mine.get(count) == theirs.get(count)
                assert abs(mine["loss"] - theirs["loss"]) <= loss * theirs["loss"], (kind, mine["step"])
        assert self.adapter.keys() == other.adapter.keys()
        for name, tensor in self.adapter.items():
            expected = other.adapter[name]
            error = (tensor - expected).norm() / expected.norm().clamp(min=1e-3)
            assert error <= weights, f"{name}: relative error {error:.2g}"
        assert self.answers == other.answers
