"""Convert a model of llama2.c to a Hugging Face checkpoint.

    python -m benchmarks.llama2c stories260K.bin tok512.bin FOLDER

Reads the first ("legacy") export: seven int32 (dim, hidden, layers, heads, key-value heads, vocabulary, length; a
negative vocabulary means an untied head), then fp32 weights, each kind for all layers at once. The tokenizer is an
int32, then a score (fp32), a length (int32) and the bytes of each piece. <s> begins a story and serves as EOS.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"


def read_model(file: Path) -> LlamaForCausalLM:
    raw = file.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, length = struct.unpack("7i", raw[:28])
    config = LlamaConfig(
        hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=abs(vocabulary), max_position_embeddings=length, rms_norm_eps=1e-5,
        tie_word_embeddings=vocabulary > 0, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    weights, at = torch.frombuffer(bytearray(raw[28:]), dtype=torch.float32), 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        at += (count := torch.Size(shape).numel())
        if at > weights.numel():
            raise SystemExit(f"{file} holds {weights.numel():,} weights, fewer than its header describes")
        return weights[at - count : at].view(shape).clone()

    head_dim = dim // heads
    kv = kv_heads * head_dim
    state: dict[str, Any] = {"model.embed_tokens.weight": take(abs(vocabulary), dim)}
    of_layers = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": halves(take(layers, heads, head_dim, dim)).view(layers, dim, dim),
        "self_attn.k_proj": halves(take(layers, kv_heads, head_dim, dim)).view(layers, kv, dim),
        "self_attn.v_proj": take(layers, kv, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    for name, stacked in of_layers.items():
        state |= {f"model.layers.{layer}.{name}.weight": weight for layer, weight in enumerate(stacked)}
    state["model.norm.weight"] = take(dim)
    take(2, length, head_dim // 2)  # cosines and sines, which transformers computes
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if vocabulary > 0 else take(-vocabulary, dim)
    if at != weights.numel():
        raise SystemExit(f"{file} holds {weights.numel():,} weights, more than its header describes")
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model


def halves(weight: Tensor) -> Tensor:
    """Reorder [layers, heads, head dim, dim] from RoPE on neighbouring channels to RoPE on the halves of a head."""
    return torch.cat([weight[:, :, 0::2], weight[:, :, 1::2]], dim=2).contiguous()


def read_tokenizer(file: Path, size: int) -> PreTrainedTokenizerFast:
    """Read SentencePiece's BPE, which first merges the neighbours whose union has the best score."""
    raw, at, pieces, scores = file.read_bytes(), 4, [], []
    for _ in range(size):
        score, length = struct.unpack_from("fi", raw, at)
        pieces.append(raw[at + 8 : at + 8 + length].decode())
        scores.append(score)
        at += 8 + length
    pieces[:3] = [UNKNOWN, BEGIN, END]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces[3:], key=lambda piece: -scores[ids[piece]])
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=BEGIN, pad_token=UNKNOWN
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", type=Path)
    made.add_argument("tokenizer", type=Path)
    made.add_argument("folder", type=Path)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    model = read_model(given.model)
    model.save_pretrained(given.folder)
    read_tokenizer(given.tokenizer, model.config.vocab_size).save_pretrained(given.folder)


if __name__ == "__main__":
    main()
