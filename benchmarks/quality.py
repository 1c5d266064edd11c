"""What each stored format costs: bits per weight, weight SQNR, perplexity, and perplexity after a short QLoRA run.

    python -m benchmarks.quality MODEL TEXT [--tokens 32768] [--steps 40] [--device cuda] [--only nf4 ...] [--json FILE]

MODEL is a checkpoint in 16 bits or a GGUF file. The weights of a GGUF file in Q4_1 lie on 16 equal steps per block of
32, which no trained weight does, so formats that fit this grid would look too good. Uniform noise of one step's width
(seeded) is added: every rounding cell of the file is filled evenly, and the result, in 16 bits, is the model measured.

TEXT has one JSON object per line with a `text`, or, as .txt, one document after another as in TinyStories' files: blank
lines between paragraphs, none between documents. Each document is preceded by EOS and split at --length tokens. Evenly
spaced windows of about --tokens tokens are held out. The QLoRA run trains on rows of 256 tokens from the other windows:
the same rows, order and initial adapters for every format. Products are in float32 unless --dtype says otherwise, so
that rows differ in the storage only.

FILE is written after every figure, and figures of the same run in it are not measured again. A row added on another
device records the device and the commit.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.harness import parser_of, provenance, write_result
from halfbyte import load_model, load_tokenizer
from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.formats import named, names
from halfbyte.gguf.file import GgufFile
from halfbyte.gguf.hyperparameters import read_config
from halfbyte.gguf.tensors import entries
from halfbyte.gguf.tokenizer import read_tokenizer
from halfbyte.layers import QuantizedLinear
from halfbyte.layers.int8 import Linear8bitLt
from halfbyte.loading.quantizer import quantizable
from halfbyte.modeling.head import IGNORE_INDEX, causal_lm_loss

WHOLE = "as it is"
GGUF_SUFFIX, GGUF_STEPS = ".gguf", "Q4_1"  # the type whose blocks begin with the step in fp16
# In addition to the registry's names: plain scales (bitsandbytes' default) and k-bit's other codebooks.
VARIANTS = (
    "blockwise4:nf4:64:plain", "blockwise4:fp4:64:plain", "kbit:2:affine",
    *(f"kbit:{k}:{codebook}" for k in (2, 3, 4, 5) for codebook in ("nf", "bnf", "bof", "bof:searched", "fitted")),
    "blockwise4:nf4:32:plain", "blockwise4:nf4:128:plain",
    *(f"hqq:{bits}:{group}" for bits in (2, 3, 4) for group in (32, 128)), "hqq:4:32:range", "hqq:4:128:range",
)  # fmt: skip
INT8_PRODUCTS = "int8, products in int8"
BITSANDBYTES = {"bitsandbytes NF4": "nf4", "bitsandbytes FP4": "fp4", "bitsandbytes INT8": "int8"}
HQQ = {f"hqq's own, {bits} bits": bits for bits in (4, 3, 2)}  # rows where that package is installed
ROW, BATCH, RANK, LEARNING_RATE, SEED = 256, 4, 16, 5e-4, 11


def documents(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".txt":
        return [story.replace("\n\n", "\n") for story in re.split(r"(?<!\n)\n(?!\n)", text.strip())]
    return [json.loads(line)["text"] for line in text.splitlines()]


def windows(tokenizer: Any, file: Path, length: int) -> Tensor:
    """Return int64 [n, length]: EOS and a document, split at `length` and padded with IGNORE_INDEX."""
    rows = []
    for document in documents(file):
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(document, add_special_tokens=False)["input_ids"]])
        rows += [F.pad(row, (0, length - len(row)), value=IGNORE_INDEX) for row in ids.split(length)]
    return torch.stack(rows)


def split(rows: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return evenly spaced held-out windows of about `tokens` tokens, and the other rows [n, ROW] in a fixed order."""
    held = torch.zeros(len(rows), dtype=torch.bool)
    held[:: max(int((rows != IGNORE_INDEX).sum()) // tokens, 1)] = True
    others = rows[~held].view(-1, ROW)
    others = others[others[:, 1] != IGNORE_INDEX]
    return rows[held], others[torch.randperm(len(others), generator=torch.Generator().manual_seed(SEED))]


def loss_sum(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the number of predicted tokens. Padding is on the right and changes nothing."""
    rows = rows.to(model.device)
    return causal_lm_loss(model, {"input_ids": rows.clamp(min=0), "labels": rows})


@torch.no_grad()
def perplexity(model: Any, rows: Tensor, batch: int = 8) -> float:
    total, tokens = 0.0, 0
    for chunk in rows.split(batch):
        loss, count = loss_sum(model, chunk)
        total, tokens = total + float(loss), tokens + int(count)
    return math.exp(total / tokens)


def train(model: Any, rows: Tensor, steps: int) -> Any:
    """Train adapters for `steps` of AdamW with a linearly decaying rate. Returns the model."""
    torch.manual_seed(SEED)
    config = RunConfig(model_name_or_path="-", dataset="-", r=RANK, lora_alpha=RANK, adapter_dtype="float32")
    model = add_adapter(model, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(steps):
        loss, count = loss_sum(model, rows[torch.arange(step * BATCH, (step + 1) * BATCH) % len(rows)])
        (loss / count).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


class Dithered(GgufFile):
    """A GGUF file whose Q4_1 tensors are read with uniform noise of one step's width, the same in every read."""

    def values(self, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        values = super().values(name, torch.float32, expert)
        if self.tensors[name].tensor_type.name == GGUF_STEPS:
            steps = self.blocks(name)[..., :2].clone().view(torch.float16).float()
            generator = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
            blocks = values.view(*steps.shape[:-1], -1)
            blocks += (torch.rand(blocks.shape, generator=generator) - 0.5) * steps
        return values.to(dtype)


def write_dithered(path: Path, folder: str) -> None:
    """Write the model of a GGUF file with noise (`Dithered`) as a 16-bit checkpoint with its tokenizer."""
    file = Dithered(path)
    config = read_config(file)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.load_state_dict({entry.name: entry.read() for entry in entries(file, config)}, strict=False)
    model.save_pretrained(folder)
    read_tokenizer(file).save_pretrained(folder)


def load(path: str, name: str, dtype: str, device: str) -> Any:
    """Load the model as row `name` of the table stores it."""
    if name in BITSANDBYTES:
        return load_bitsandbytes(path, BITSANDBYTES[name], dtype, device)
    if name in HQQ:
        return round_by_hqq(load(path, WHOLE, dtype, device), HQQ[name])
    if name == WHOLE:
        return load_model(path, load_in_4bit=False, dtype=dtype, device=device)
    spec = "int8" if name == INT8_PRODUCTS else name
    model = load_model(path, quantization=spec, dtype=dtype, device=device)
    if name == INT8_PRODUCTS:
        for layer, module in list(model.named_modules()):
            if isinstance(module, QuantizedLinear):
                model.set_submodule(layer, Linear8bitLt.from_linear(module))
    return model


def load_bitsandbytes(path: str, kind: str, dtype: str, device: str) -> Any:
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs a cast to fp16 at every product
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else four))
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=getattr(torch, dtype), device_map={"": device}
    ).eval()


def round_by_hqq(model: nn.Module, bits: int) -> nn.Module:
    """Round `model`'s linears by the hqq package, with groups and scales as in halfbyte's hqq rows."""
    from hqq.core.quantize import Quantizer

    options = {"group_size": 64, "axis": 1, "compute_dtype": torch.bfloat16}
    for linear in quantizable(model).values():
        weight = linear.weight.data
        codes, meta = Quantizer.quantize(weight, bits, device=str(weight.device), **options)
        linear.stored_bytes = codes.nbytes + meta["scale"].nbytes + meta["zero"].nbytes
        linear.weight.data = Quantizer.dequantize(codes, meta).to(weight.dtype)
    return model


def stored_weights(model: nn.Module) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the name, bytes and fp32 values of each quantized weight, of halfbyte or a peer."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, QuantizedLinear):
            yield name, module.weight.nbytes, module.weight.dequantize(torch.float32)
        elif hasattr(module, "stored_bytes"):
            yield name, module.stored_bytes, weight.float()
        elif hasattr(weight, "SCB"):
            scales = weight.SCB.float()
            yield name, weight.nbytes + scales.nbytes, weight.data.float() * (scales / 127).unsqueeze(1)
        elif hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            state = weight.quant_state
            yield name, weight.nbytes + state.absmax.nbytes, dequantize_4bit(weight.data, state).float()


def weight_error(model: nn.Module, exact: dict[str, Tensor]) -> dict[str, float | None]:
    """Return the bits per weight of the quantized layers and their signal-to-noise ratio in dB."""
    stored = signal = noise = weights = 0.0
    for name, size, values in stored_weights(model):
        weight = exact[f"{name}.weight"].to(values.device).float()
        stored, weights = stored + 8 * size, weights + weight.numel()
        signal += float(weight.square().sum())
        noise += float((values - weight).square().sum())
    if not weights:
        return {"bits_per_weight": None, "sqnr_db": None}
    return {"bits_per_weight": stored / weights, "sqnr_db": 10 * math.log10(signal / noise)}


def measure(given: argparse.Namespace, table: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its next figures: first weights and perplexity of all rows, then all QLoRA runs."""
    held, rows = split(windows(load_tokenizer(given.model), given.text, given.length), given.tokens)
    exact = load(given.model, WHOLE, given.dtype, "cpu").state_dict()
    variants = [spec for spec in VARIANTS if spec not in names().values()]
    peers = [*(BITSANDBYTES if find_spec("bitsandbytes") else ()), *(HQQ if find_spec("hqq") else ())]
    every = [WHOLE, *names(), *variants, INT8_PRODUCTS, *peers]
    wanted = [name for name in every if not given.only or name in given.only]
    tokens = int((held != IGNORE_INDEX).sum())
    print(f"{tokens:,} held-out tokens in {len(held)} windows of at most {given.length}", flush=True)
    for name in wanted:
        if "perplexity" not in table.get(name, {}):
            model = load(given.model, name, given.dtype, given.device)
            spec = {"spec": named(name).spec} if name in names() or ":" in name else {}
            yield name, {**spec, **weight_error(model, exact), "perplexity": perplexity(model, held)}
    for name in wanted if given.steps else ():
        if "perplexity_after_qlora" not in table[name]:
            model = train(load(given.model, name, given.dtype, given.device), rows, given.steps)
            yield name, {"perplexity_after_qlora": perplexity(model, held)}


def stored(file: Path | None, run: dict[str, Any]) -> dict[str, Any]:
    """Return the rows that `file` already has for this run, and the device and commit of the first of them."""
    if file is None or not file.exists():
        return {}
    result = json.loads(file.read_text())
    if any(result.get(key, False) != value for key, value in run.items() if key != "on"):
        return {}
    return {key: result[key] for key in (*provenance(), "on", "stored_as")}


def elsewhere(kept: dict[str, Any]) -> dict[str, Any]:
    """Return the device and commit to record in a row that is added on another device than the file's first."""
    here = provenance()
    same = kept.get("device", here["device"]) == here["device"]
    return {} if same else {key: here[key] for key in ("device", "commit")}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("model")
    made.add_argument("text", type=Path)
    made.add_argument("--tokens", type=int, default=32768, help="held-out tokens")
    made.add_argument("--length", type=int, default=512, help="tokens of a window, a multiple of 256")
    made.add_argument("--steps", type=int, default=40, help="steps of the QLoRA run; 0: none")
    made.add_argument("--only", nargs="+", metavar="NAME", help="measure only these rows")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dtype", default="float32")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    run = {
        "model": Path(given.model).name, "dithered": given.model.endswith(GGUF_SUFFIX), "text": given.text.name,
        "tokens": given.tokens, "length": given.length, "dtype": given.dtype, "on": given.device,
        "steps": given.steps, "batch": [BATCH, ROW], "rank": RANK, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    kept = stored(given.json, run)
    table = kept.pop("stored_as", {})
    with tempfile.TemporaryDirectory() as folder:
        if run["dithered"]:
            write_dithered(Path(given.model), folder)
            given.model = folder
        for name, figures in measure(given, table):
            table[name] = table.get(name, {}) | figures | elsewhere(kept)
            print(name, json.dumps(figures), flush=True)
            write_result(given.json, {**run, **kept, "stored_as": table})


if __name__ == "__main__":
    main()
