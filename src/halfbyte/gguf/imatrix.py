"""Importance matrices: how strongly each column of each weight matrix is met by activations, from calibration text.

An error e in column j of W changes the output by e·x_j, so its expected square is e² times the mean of x_j²: that is
the weight of the squared errors (llama.cpp pull request 4861). Files are those of llama.cpp's imatrix tool: GGUF, with
the sum of squares and the number of tokens of every matrix, of an expert's those that were routed to it.
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


def write_importances(path: Path, seen: Mapping[str, Seen], text: str, rows: int, row: int) -> None:
    """Write a file that llama.cpp's quantizer reads, too.

    Args:
        text: where the calibration text came from.
        rows, row: how many rows of it met the model, and the tokens of one.
    """
    with new_file(path) as aside:
        writer = GGUFWriter(aside, "")
        writer.add_type(GGUFType.IMATRIX)
        writer.add_array(Keys.IMatrix.DATASETS, [text])
        writer.add_uint32(Keys.IMatrix.CHUNK_COUNT, rows)
        writer.add_uint32(Keys.IMatrix.CHUNK_SIZE, row)
        for name, each in seen.items():
            writer.add_tensor(name + SUMS, each.squares.cpu().numpy())
            writer.add_tensor(name + COUNTS, each.tokens.cpu().numpy()[:, None])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def read_importances(path: Path) -> dict[str, Tensor]:
    """Tensor name → mean square of the activation at each column, fp32 [columns] or [experts, columns].

    An expert that no token reached has the mean of its layer's others; how many there are is said.

    Raises:
        CheckpointError: not an importance matrix.
    """
    file = GgufFile(path)
    names = [name.removesuffix(SUMS) for name in file.tensors if name.endswith(SUMS)]
    if not names or any(name + COUNTS not in file.tensors for name in names):
        raise CheckpointError(f"{path} is not an importance matrix", "name a file that llama-imatrix wrote")
    means, missed, experts = {}, 0, 0
    for name in names:
        sums, counts = (file.values(name + kind, torch.float32) for kind in (SUMS, COUNTS))
        reached, mean = counts.view(-1) > 0, sums / counts.clamp(min=1).view(-1, 1)
        if not bool(reached.all()):
            mean[~reached] = mean[reached].mean(0) if bool(reached.any()) else 1.0
        missed, experts = missed + int((~reached).sum()), experts + len(reached)
        mean = mean.squeeze(0)
        means[name] = mean + 1e-4 * mean.mean(-1, keepdim=True) + 1e-30  # a column never seen still has an error
    if missed:
        said = f"{missed} of {experts} matrices met no token of the text (experts that none was sent to)"
        notice("importance-unreached", f"{said}: they are weighed as the others of their layer")
    return means
