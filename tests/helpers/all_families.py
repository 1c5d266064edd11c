"""Every causal LM of transformers, tiny: how it is built, and whether its packed documents see each other.

python -m tests.helpers.all_families            prints the table of docs/families.md for this transformers
python -m tests.helpers.all_families --write    writes it there
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from halfbyte.data.collate import PackedCollator
from halfbyte.modeling.architectures import auto_class
from halfbyte.modeling.head import backbone_inputs
from halfbyte.modeling.packing import isolate_documents
from halfbyte.modeling.patch import patch
from halfbyte.modeling.tiny_model import tiny_config
from halfbyte.utils.errors import ConfigError

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PAGE = Path(__file__).resolve().parents[2] / "docs/families.md"
TOKENS = range(10, 200)

# What the default configuration of a family leaves open or contradicts itself in; everything else comes from its name.
QSA = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 32,
       "indexer_compress_ratio": 4}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0,
                                                       "mrope_section": [4, 2, 2]}
                                                for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 96},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_hidden_layers": 2, "num_buckets": 4,
        "hash_seed": 7,
    },
    "qwen4_exp_text": QSA,
    "qwen4_exp": {"text_config": QSA},
}  # fmt: skip
AFTER: dict[str, dict[str, Any]] = {"xmod": {"default_language": "en_XX"}, "nemotron": {"num_key_value_heads": 2}}


def build(name: str) -> Any:
    """A random tiny model of a family: every weight matters, causal where the class can be either.

    Raises:
        Exception: the family's own, where it does not build or run.
    """
    keys = dict(DEFAULTS.get(name, {}))
    config_class = CONFIG_MAPPING[name]
    if getattr(config_class(**keys), "is_decoder", None) is False:
        keys["is_decoder"] = True
    config = tiny_config(config_class(**keys))
    for key, value in AFTER.get(name, {}).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        model(input_ids=torch.randint(10, 200, (2, 24)), use_cache=False).logits.sum().item()
    return model


@dataclass(frozen=True)
class Row:
    """A row of the table: the method that isolates documents (or "refused", "does not build"), and measurements."""

    name: str
    method: str
    fused: str = ""
    leak: str = ""
    error: float = 0.0


def row_of(name: str) -> Row:
    """Return what `isolate` finds for a family, and how far packed documents are from the same documents alone."""
    try:
        model = build(name)
    except Exception as error:
        return Row(name, "does not build", leak=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")
    report = patch(model)
    fused = "fused" if report.fused else "plain"
    try:
        isolation = isolate_documents(model, PackedCollator(0), key="packing", length=512, tokens=TOKENS)
    except ConfigError as error:
        return Row(name, "refused", fused, error.message.partition("each other in ")[2].partition(")")[0])
    return Row(name, isolation.method, fused, isolation.leak or "", alone_error(model))


@torch.no_grad()
def alone_error(model: Any) -> float:
    """The largest difference of a packed document's logits from those it has alone, relative to the largest."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for lengths in ([17, 1, 22], [21, 6, 13]):
        ids = torch.randint(10, 200, (sum(lengths),), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids, "seq_lengths": lengths})
    batch = PackedCollator(0)(rows)
    device = model.device
    batch = {key: value.to(device) for key, value in batch.items()}
    packed = model(**backbone_inputs(model, batch), use_cache=False).logits.float()
    worst = 0.0
    for row, found in zip(rows, packed, strict=True):
        start = 0
        for length in row["seq_lengths"]:
            ids = torch.tensor([row["input_ids"][start : start + length]], device=device)
            alone = model(input_ids=ids, use_cache=False).logits[0].float()
            worst = max(worst, float((found[start : start + length] - alone).abs().max() / alone.abs().max()))
            start += length
    return worst


ABOUT = """# How packed documents are isolated in each model

With `packing: true` or `padding_free: true` several documents share a row. Whether they can attend to each other
depends on the model. Every such run and every evaluation therefore starts with a check of the loaded model: one
document of a row is replaced, and no hidden state of the other documents may change. The result is in the run's
`checks.json`. Documents are isolated in one of these ways:

- **positions**: transformers isolates them by position ids that restart with each document.
- **bounds**: the model's layers get the document boundaries, and convolutions and scans restart at each. On a GPU
  convolutions are a kernel of halfbyte's. The gated delta rule is flash-linear-attention's kernel if that is installed
  (`pip install 'halfbyte[scans]'`) and can train, which on Hopper requires Triton 3.7.1 or tilelang; otherwise it is
  PyTorch matmuls whose state restarts inside the row. So does Mamba-2's scan, in kernels of halfbyte's on GPUs. Other
  scans run transformers' own function on batches of documents of similar length. FlashAttention, if requested, reads
  the boundaries too. CUDA graphs are disabled, except for Qwen3.5 and Qwen3-Next on a GPU without
  flash-linear-attention.
- **masks**: like bounds, and halfbyte passes attention masks made from position ids, because the model's own masks
  ignore them.
- **unpacked**: the backbone runs on one document per row, batched by similar length, and its output is packed again. No
  mask of quadratic size is built. It costs time, up to a third more tokens, and CUDA graphs.
- **refused**: the run stops before training and asks for `packing: false`. These models are not causal, or accept rows
  of some lengths only.

The table has all causal language models of transformers {version} in their default layout, shrunk to a few small
layers, on a CPU: {counts}.
The logits of a packed document equal the logits of the document alone within 1e-4. ProphetNet is an exception: its
logits depend on the length of the row, packed or not. With transformers 5.17 to 5.21, LFM2 is unpacked.

"fused": `halfbyte.patch` has fused forwards for the layers; "plain": training runs transformers' forwards. In Gemma 3n
and 4, Bamba, Granite 4's hybrids, Jamba and Nemotron-H only norms, attention and gated units are fused, inside
transformers' forward of the layer; recomputation is transformers' checkpointing, and generation is transformers'. Mamba
layers run transformers' code, Mamba-2 layers with halfbyte's scan. gpt_oss isolates documents by halfbyte's attention,
also on CPUs, and with `use_kernels: false` by masks. GGUF is not written for models with Mamba layers or for Gemma 3n.

`python -m tests.helpers.all_families --write` makes this page.

| model | documents | layers | where documents would see each other, or why the model does not build |
|---|---|---|---|
"""


def page(rows: list[Row]) -> str:
    ways = Counter(row.method for row in rows)
    counts = ", ".join(
        f"{ways[way]} {way}" for way in ("positions", "bounds", "masks", "unpacked", "refused", "does not build")
    )
    lines = [f"| {row.name} | {row.method} | {row.fused} | {row.leak.replace('|', ' ')} |" for row in rows]
    return ABOUT.format(version=transformers.__version__, counts=counts) + "\n".join(lines) + "\n"


def table(names: list[str]) -> list[Row]:
    transformers.logging.set_verbosity_error()
    return [row_of(name) for name in names]


if __name__ == "__main__":
    found = table([each for each in sys.argv[1:] if not each.startswith("-")] or NAMES)
    for row in found:
        print(row)
    if "--write" in sys.argv:
        PAGE.write_text(page(found), encoding="utf-8")
