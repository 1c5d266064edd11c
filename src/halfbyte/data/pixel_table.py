"""Faster patches for transformers' processors of Qwen's and GLM's kind: pixels stay 8-bit until they are in patches.

These processors rescale and normalise an image in float32 and float64 before they order it into patches. Each value
depends on its channel and its 8-bit level alone. `order_levels_first` orders the levels, a quarter of the bytes, and
then reads the values from a table that the processor's own methods made, so that the result has equal bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LEVELS = 256
CHANNELS = 3
PROBE_PATCHES = 6, 4  # merged patches of the sides of the image on which both ways are compared


def order_levels_first(processor: Any) -> bool:
    """Give an image processor a class with faster `rescale`, `normalize` and `patchify`, if its patches stay the same.

    Args:
        processor: an image processor of transformers with the PIL backend, used with its own options from here on.

    Returns:
        Whether its class has changed.
    """
    names = ("rescale", "normalize", "patchify", "patch_size", "merge_size", "temporal_patch_size")
    if not all(hasattr(processor, name) for name in names) or not (processor.do_rescale and processor.do_normalize):
        return False
    side = processor.patch_size * processor.merge_size
    shape = CHANNELS, PROBE_PATCHES[0] * side, PROBE_PATCHES[1] * side
    probe = np.random.default_rng(0).integers(0, LEVELS, shape, dtype=np.uint8)
    sizes = {name: getattr(processor, name) for name in names[3:]}
    frames = processor.temporal_patch_size
    table = _normalized(processor, np.tile(np.arange(LEVELS, dtype=np.uint8), (CHANNELS, 1, 1)))[:, 0]
    table = np.ascontiguousarray(table, dtype=np.float32)

    class Faster(type(processor)):  # type: ignore[misc]
        def rescale(self, image: np.ndarray, *_: Any, **__: Any) -> np.ndarray:
            return image

        normalize = rescale

        def patchify(
            self, image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int
        ) -> tuple[np.ndarray, int, int]:
            return _ordered(image, patch_size, merge_size)

        def _preprocess(self, *args: Any, **options: Any) -> Any:
            batch = super()._preprocess(*args, **options)  # with levels
            batch["pixel_values"] = torch.from_numpy(_looked_up(np.asarray(batch["pixel_values"]), table, frames))
            return batch

    expected = processor.patchify(_normalized(processor, probe), **sizes)
    try:
        levels, *counts = Faster.patchify(processor, probe, **sizes)
    except (TypeError, ValueError):  # other arguments, or another layout
        return False
    if not (np.array_equal(_looked_up(levels, table, frames), expected[0]) and (*counts,) == expected[1:]):
        return False
    Faster.__name__ = type(processor).__name__  # which the processor stores
    processor.__class__ = Faster
    return True


def _normalized(processor: Any, image: np.ndarray) -> np.ndarray:
    """Return an 8-bit image [C, H, W] as the processor rescales and normalises it."""
    return processor.normalize(
        processor.rescale(image, processor.rescale_factor), processor.image_mean, processor.image_std
    )


def _ordered(image: np.ndarray, side: int, merge: int) -> tuple[np.ndarray, int, int]:
    """Return the patches [N, C·side²] of an image [C, H, W], and their numbers in H and W.

    Patches that the model merges are adjacent.
    """
    channels, height, width = image.shape
    rows, columns = height // side, width // side
    split = image.reshape(channels, rows // merge, merge, side, columns // merge, merge, side)
    return split.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1), rows, columns


def _looked_up(levels: np.ndarray, table: np.ndarray, frames: int) -> np.ndarray:
    """Return the values fp32 [N, C·frames·side²] of levels [N, C·side²] in `frames` equal frames.

    Args:
        table: value of each channel's levels, fp32 [C, 256].
    """
    patches = levels.reshape(len(levels), len(table), 1, -1)
    values = np.empty((len(levels), len(table), frames, patches.shape[-1]), dtype=np.float32)
    for channel, channel_values in enumerate(table):
        values[:, channel] = channel_values.take(patches[:, channel])
    return values.reshape(len(levels), -1)
