"""Features of images that were computed before training: one file per image, read in place of its pixels.

A file has what the model's vision tower and projector gave for the image, and the processor's other columns for it
(its grid of patches). It is mapped into memory, so that reading a batch copies each feature once.

Features in FP8 are E4M3 codes with a scale per token, in the dtype of the features: half of 16 bits, and one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..formats.float8 import dequantize_float8, quantize_float8
from ..reading.tensors import read_header, read_tensors
from ..utils.errors import CheckpointError, DataError
from ..utils.files import new_file

FEATURES = "features"  # field of a stored image: path of its file. Also its tensor's name, [T, W]
SCALE = "features_scale"  # of a file in FP8, [T] in the dtype of the features
PIXELS = "pixel_values"  # column of the model that has the features in their place


def token_bytes(features: Tensor, in_fp8: bool) -> int:
    """Return the bytes of a token's features on disk."""
    return features.shape[-1] + features.element_size() if in_fp8 else features[0].nbytes


def write_features(path: Path, features: Tensor, columns: Mapping[str, Tensor], *, in_fp8: bool = False) -> None:
    """Write an image's features [T, W] and its other columns [1, ...] to a new file.

    Raises:
        TrainingError: the disk is full, or there may be no such folder.
    """
    tensors = {FEATURES: features, **columns}
    if in_fp8:
        codes, scale = quantize_float8(features, "row")
        tensors |= {FEATURES: codes, SCALE: scale.to(features.dtype)}
    with new_file(path) as aside:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, aside)


def has_features(path: Path, tokens: int) -> bool:
    """Return whether a file has the features of an image of `tokens` tokens; False for a damaged one."""
    if not path.is_file():
        return False
    try:
        shape = read_header(path)[FEATURES]["shape"]
    except (CheckpointError, KeyError):
        return False
    return len(shape) == 2 and shape[0] == tokens


def feature_columns(images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the model's inputs for stored images with `FEATURES`: `PIXELS` [all tokens, W] and the other columns.

    Raises:
        DataError: a file is damaged or gone.
    """
    paths = [image[FEATURES] for image in images]
    files = {path: _read(Path(path)) for path in dict.fromkeys(paths)}  # once: answers to a prompt share its images
    columns = {name: torch.cat([files[path][name] for path in paths]) for name in files[paths[0]]}
    return {PIXELS: columns.pop(FEATURES), **columns}


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, with features in their own dtype.

    Raises:
        DataError: as `feature_columns`.
    """
    try:
        tensors = read_tensors(path)
    except CheckpointError as error:
        raise DataError(error.message, "start the run again, which computes the features again") from error
    if (scale := tensors.pop(SCALE, None)) is not None:
        tensors[FEATURES] = dequantize_float8(tensors[FEATURES], scale.float(), "row", scale.dtype)
    return tensors
