"""Importance matrices: how strongly each column of each weight matrix is met by activations, from calibration text.

An error e in column j of W changes the output by e·x_j, so its expected square is e² times the mean of x_j²: that is
the weight of the squared errors (llama.cpp pull request 4861). Files are those of llama.cpp's imatrix tool: GGUF, with
the sum of squares and the number of tokens of every matrix, of an expert's those that were routed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter, get_tensor_name_map
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.config import load_config
from halfbyte.data.calibration import ROW, calibration_rows
from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.files import new_file
from halfbyte.models.head import backbone_inputs
from halfbyte.runs.saved import load_saved

from .families import Family
from .tensors import BESIDE_TEXT, FUSED_EXPERTS, gguf_name, layer_of

TOKENS = 16384  # of the calibration text
SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass
class Seen:
    """What met a matrix, or each of its experts: the sum of x² [experts, columns], and of how many tokens [experts]."""

    squares: Tensor
    tokens: Tensor

    def add(self, expert: int, x: Tensor) -> None:
        """Count inputs [tokens, columns]."""
        self.squares[expert] += x.float().square().sum(0)
        self.tokens[expert] += x.shape[0]


def matrix_path(given: Path | str) -> Path | None:
    """The importance matrix that `given` names; None if it names text.

    Raises:
        ConfigError: a file of llama-imatrix's old format.
    """
    path = Path(given)
    if path.suffix == ".dat":
        raise ConfigError(
            f"--importance {path}: llama-imatrix's old format",
            f"convert it: llama-imatrix --in-file {path} -o {path.with_suffix('.gguf')}",
        )
    return path if path.suffix == ".gguf" else None


# --- collecting ------------------------------------------------------------------------------------------------------


def collect(
    run_or_model: str, text: str, out: Path, names: Collection[str], family: Family, device: torch.device,
    trust_remote_code: bool, progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Run a model, its adapter applied, over calibration text and write what its matrices meet.

    Args:
        run_or_model: as `export_gguf` takes it.
        text: a dataset's file, folder or hub id, read as for training.
        out: the file.
        names: of the file's matrices; others are left out.
        trust_remote_code: as in `export_gguf`.
        progress: called with the rows of text done, and how many there are.

    Raises:
        HalfbyteError: the model or the text cannot be used.
    """
    saved = load_saved(run_or_model, [f"device={device}", f"trust_remote_code={trust_remote_code}"])
    keys = {"model_name_or_path": saved.config.model_name_or_path, "dataset": text}
    config = load_config(None, [], keys | {"max_length": ROW, "packing": True, "device": str(device)})
    rows = list(calibration_rows(config, saved.tokenizer, TOKENS, torch.device("cpu")))
    model_config: Any = saved.model.config

    def batches() -> Iterable[dict[str, Tensor]]:
        for index, row in enumerate(rows):
            progress(index, len(rows))
            yield {key: value.to(device) for key, value in row.items()}
        progress(len(rows), len(rows))

    seen = watch(saved.model, batches(), names, family, model_config.get_text_config().num_hidden_layers)
    write_importances(out, seen, text, len(rows))


@torch.inference_mode()
def watch(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], names: Collection[str], family: Family, layers: int
) -> dict[str, Seen]:
    """Name of a matrix in the file → what met it, from the batches (arguments of the model's forward)."""
    known = get_tensor_name_map(family.arch, layers)
    seen: dict[str, Seen] = {}
    handles = []
    for key, module in model.named_modules():
        plain = key.removeprefix("base_model.model.").removesuffix(".base_layer")
        if BESIDE_TEXT.search(plain) or ".lora_" in plain:
            continue
        if isinstance(module, nn.Linear) and not plain.endswith("lm_head"):  # which llama-imatrix leaves out, too
            name = gguf_name(f"{plain}.weight", known, family)
            if name in names:
                handles.append(module.register_forward_pre_hook(partial(_linear, seen, name)))
        elif hasattr(module, "gate_up_proj") and FUSED_EXPERTS.fullmatch(f"{plain}.gate_up_proj"):
            handles.append(module.register_forward_pre_hook(partial(_experts, seen, layer_of(f"{plain}."))))
    try:
        for batch in batches:
            model(**backbone_inputs(model, batch), use_cache=False)  # with a cache packed documents see each other
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _linear(seen: dict[str, Seen], name: str, module: nn.Linear, args: tuple[Tensor]) -> None:
    """Hook of a linear layer."""
    x = args[0].reshape(-1, module.in_features)
    _entry(seen, name, 1, x).add(0, x)


def _experts(seen: dict[str, Seen], layer: int, module: Any, args: tuple[Tensor, ...]) -> None:
    """Hook of a layer's experts, called with the tokens [tokens, columns] and the experts of each [tokens, chosen]."""
    x, chosen = args[0], args[1]
    for expert in chosen.unique().tolist():
        own = x[(chosen == expert).any(-1)]
        gate, up = functional.linear(own, module.gate_up_proj[expert]).chunk(2, -1)
        for part, inputs in (("gate", own), ("up", own), ("down", module.act_fn(gate) * up)):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            _entry(seen, name, len(module.gate_up_proj), inputs).add(expert, inputs)


def _entry(seen: dict[str, Seen], name: str, experts: int, x: Tensor) -> Seen:
    """What `seen` has of a matrix, zeros at first."""
    if name not in seen:
        seen[name] = Seen(*(torch.zeros(shape, device=x.device) for shape in ((experts, x.shape[-1]), (experts,))))
    return seen[name]


# --- files -----------------------------------------------------------------------------------------------------------


def write_importances(path: Path, seen: Mapping[str, Seen], text: str, rows: int) -> None:
    """Write a file that llama.cpp's quantizer reads, too."""
    with new_file(path) as aside:
        writer = GGUFWriter(aside, "")
        writer.add_type(gguf.GGUFType.IMATRIX)
        writer.add_array(gguf.Keys.IMatrix.DATASETS, [text])
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, rows)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, ROW)
        for name, each in seen.items():
            writer.add_tensor(name + SUMS, each.squares.cpu().numpy())
            writer.add_tensor(name + COUNTS, each.tokens.cpu().numpy()[:, None])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def read_importances(path: Path) -> dict[str, Tensor]:
    """Tensor name → mean square of the activation at each column, fp32 [columns] or [experts, columns].

    Raises:
        CheckpointError: not an importance matrix.
    """
    try:
        found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in gguf.GGUFReader(path).tensors}
    except (OSError, ValueError, IndexError) as error:  # IndexError: a file cut short
        raise CheckpointError(f"cannot read {path}: {error}", "name a file that llama-imatrix wrote") from error
    sums = {name.removesuffix(SUMS): value for name, value in found.items() if name.endswith(SUMS)}
    if not sums or any(name + COUNTS not in found for name in sums):
        raise CheckpointError(f"{path} is not an importance matrix", "name a file that llama-imatrix wrote")
    means = {}
    for name, value in sums.items():
        mean = (value / found[name + COUNTS].clamp(min=1).view(-1, 1)).squeeze(0)
        means[name] = mean + 1e-4 * mean.mean(-1, keepdim=True) + 1e-30  # a column never seen still has an error
    return means
