"""Importance matrices: the mean square of each weight column's input activation, from calibration text.

An error e in column j of W changes the output by e·x_j, so its expected square is e² times the mean of x_j². That mean
weights the squared errors (llama.cpp pull request 4861). The file format is llama.cpp's imatrix format: GGUF,
with the sum of squares and the number of tokens for every matrix; an expert counts the tokens routed to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGUFType, GGUFWriter, Keys
from torch import Tensor

from ..utils.errors import CheckpointError, ConfigError
from ..utils.files import new_file
from ..utils.notices import notice
from .file import GgufFile

SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass
class Seen:
    """Activation statistics of a matrix or of its experts: Σ x² [experts, columns] and number of tokens [experts]."""

    squares: Tensor
    tokens: Tensor

    def add(self, expert: int, x: Tensor) -> None:
        """Add inputs [tokens, columns] of one expert."""
        self.squares[expert] += x.float().square().sum(0)
        self.tokens[expert] += x.shape[0]


def matrix_path(importances: Path | str) -> Path | None:
    """Return the path of an importance matrix, or None if `given` names calibration text.

    Raises:
        ConfigError: a file in llama-imatrix's old format.
    """
    path = Path(importances)
    if path.suffix == ".dat":
        raise ConfigError(
            f"--importance {path}: llama-imatrix's old format is not read",
            f"convert it: llama-imatrix --in-file {path} -o {path.with_suffix('.gguf')}",
        )
    return path if path.suffix == ".gguf" else None


def write_importances(path: Path, seen: Mapping[str, Seen], text: str, rows: int, row: int) -> None:
    """Write an importance matrix in llama.cpp's format.

    Args:
        text: source of the calibration text.
        rows, row: number of sequences, and tokens of each.
    """
    with new_file(path) as aside:
        writer = GGUFWriter(aside, "")
        writer.add_type(GGUFType.IMATRIX)
        writer.add_array(Keys.IMatrix.DATASETS, [text])
        writer.add_uint32(Keys.IMatrix.CHUNK_COUNT, rows)
        writer.add_uint32(Keys.IMatrix.CHUNK_SIZE, row)
        for name, statistics in seen.items():
            writer.add_tensor(name + SUMS, statistics.squares.cpu().numpy())
            writer.add_tensor(name + COUNTS, statistics.tokens.cpu().numpy()[:, None])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def read_importances(path: Path) -> dict[str, Tensor]:
    """Tensor name → mean square of each column's activation, fp32 [columns] or [experts, columns].

    An expert without tokens gets the mean of its layer's other experts; a notice reports their number.

    Raises:
        CheckpointError: not an importance matrix.
    """
    file = GgufFile(path)
    names = [name.removesuffix(SUMS) for name in file.tensors if name.endswith(SUMS)]
    if not names or any(name + COUNTS not in file.tensors for name in names):
        raise CheckpointError(f"{path} is not an importance matrix", "name a file that llama-imatrix wrote")
    means = {}
    missed = 0
    experts = 0
    for name in names:
        sums, counts = (file.values(name + suffix, torch.float32) for suffix in (SUMS, COUNTS))
        reached, mean = counts.view(-1) > 0, sums / counts.clamp(min=1).view(-1, 1)
        if not bool(reached.all()):
            mean[~reached] = mean[reached].mean(0) if bool(reached.any()) else 1.0
        missed += int((~reached).sum())
        experts += len(reached)
        mean = mean.squeeze(0)
        means[name] = mean + 1e-4 * mean.mean(-1, keepdim=True) + 1e-30  # a column of zeros still counts
    if missed:
        message = f"{missed} of {experts} matrices got no token of the text (experts that the router never chose)"
        notice("importance-unreached", f"{message}: they use the mean of their layer's other experts")
    return means
