"""Folders from which whole runs start: a tiny model with a byte-level tokenizer, and rows of chosen lengths."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

VOCABULARY = 264  # bytes and special tokens, in eights
WORDS = ("what", "is", "one", "plus", "two", "it", "three", "a", "of", "four", "and", "five", "minus", "the")


def write_tokenizer(folder: Path) -> None:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["one plus two"], vocab_size=260, special_tokens=["</s>", "<pad>"])
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names).save_pretrained(folder)


def write_model(folder: Path, model: torch.nn.Module) -> Path:
    """`model` in bfloat16 and the tokenizer; norms and biases are moved from ones and zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_rows(path: Path, lengths: list[int]) -> Path:
    """A prompt and a completion a row, about so many tokens (a byte each) together."""
    generator = torch.Generator().manual_seed(1)

    def text(size: int) -> str:
        picked = torch.randint(len(WORDS), (size // 4 + 1,), generator=generator)
        return " ".join(WORDS[i] for i in picked.tolist())[:size]

    rows = [{"prompt": text(size // 4), "completion": " " + text(size - size // 4 - 2)} for size in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
