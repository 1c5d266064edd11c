"""Features of images: compute them once before training, cache them for this run and others, release the tower.

A frozen tower with a frozen projector gives the same features in every epoch. Each image is computed by itself, so its
features do not depend on the batches that it is in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, List, Value
from torch import Tensor, nn

from .. import __version__
from ..batch import LABELS, model_inputs, to_device
from ..data.collate import make_collator
from ..data.image_features import FEATURES, PIXELS, has_features, token_bytes, write_features
from ..data.image_processor import MISSING, ImageProcessor
from ..data.images import IMAGES, STORED
from ..data.tables import with_column
from ..modeling.architectures import non_text_modules
from ..modeling.compute_dtype import compute_autocast
from ..modeling.head import backbone_inputs
from ..modeling.layer import causal_lm_of
from ..modeling.vision import OFF, VisionOutput, image_outputs, reading_features, release_tower
from ..utils.console import Console
from ..utils.errors import DataError, HalfbyteError, ModelError
from ..utils.files import cache_folder, check_space
from ..utils.hardware import is_out_of_memory
from ..utils.notices import notice
from ..utils.text import one_line, size
from ..utils.waiting import progress_bars
from .inputs import rows_with_most_images
from .preflight import PreparedRun
from .reference import describe, plain_tensors
from .verify import HIDDEN_TOLERANCE, HIDDEN_TOLERANCE_16

FREE_SHARE = 0.5  # of a disk's free bytes that `vision_cache: auto` may use
FP8_TOLERANCE = 2**-4  # of hidden states, relative: the largest rounding error of a feature in E4M3
CHECKED_ROWS = 2  # with images, on which the model's outputs from features and from pixels are compared


@contextlib.contextmanager
def with_features(
    run: PreparedRun, model: Any, rows: Any, held_out: Any, console: Console
) -> Iterator[tuple[Any, Any, dict[str, Any] | None]]:
    """Compute the features of images that are not cached, and have model and rows use them inside.

    The model has no vision tower afterwards.

    Args:
        rows, held_out: training rows, and held-out rows or None.

    Yields:
        Training rows and held-out rows whose images name the files of their features, and for checks.json the numbers
        of images and bytes. If the run uses no cache: the rows as they are, and None.

    Raises:
        TrainingError: the disk has too little space.
        ModelError: features of this model cannot be cached.
        ConfigError: there is no folder for caches.
    """
    if not run.caches_features:
        yield rows, held_out, None
        return
    try:
        cache = _Cache(run, model, [split for split in (rows, held_out) if split is not None])
        layout, results = cache.fill(console)
    except HalfbyteError as error:
        if run.config.requires_vision_cache or isinstance(error, DataError):
            raise
        notice("vision-cache", f"images are computed in every step: {error.message}")
        yield rows, held_out, None
        return
    with reading_features(model, layout):
        release_tower(model)
        yield cache.named(rows), None if held_out is None else cache.named(held_out), results


@torch.no_grad()
def check_features(run: PreparedRun, model: Any) -> None:
    """Check that the vision tower gives a feature for each token of the smallest image of a run.

    Models that do not compute the features of an image by themselves are not checked.

    Raises:
        ModelError: the processor's files are of another model.
    """
    splits = [split for split in (run.data.train, run.data.eval) if split is not None]
    images = (image for rows in splits for row in _images(rows) for image in row)
    if (image := min(images, key=lambda image: image["tokens"], default=None)) is None:
        return
    processor = ImageProcessor(run.config, run.tokenizer)
    columns = to_device(processor.image_columns(image, processor.copies(image)), run.machine.device)
    model.eval()
    try:
        with compute_autocast(model, run.machine.compute_dtype):
            _, features = image_outputs(model, columns)
    except ModelError as error:
        if error.__cause__ is None:
            return
        problem = error.message
    else:
        if len(features) == image["tokens"]:
            return
        problem = f"an image has {image['tokens']} tokens, and the tower gives {len(features)} features"
    raise ModelError(
        f"the image processor of {run.config.model_name_or_path} does not fit the model: {problem}", MISSING
    )


class _Cache:
    """The features of a run's images.

    Attributes:
        images: SHA-256 → stored image.
        in_fp8: whether files have features in 8 bits.
        folder: of the features that this tower, projector, processor and arithmetic give.
    """

    def __init__(self, run: PreparedRun, model: Any, splits: list[Dataset]):
        self.run = run
        self.model = model
        self.splits = splits
        self.in_fp8 = run.config.vision_cache == "fp8"
        self.images = {image["sha256"]: image for rows in self.splits for row in _images(rows) for image in row}
        self.processor = ImageProcessor(run.config, run.tokenizer)
        if self.processor.family.by_count and any(len(row) > 1 for rows in splits for row in _images(rows)):
            raise ModelError("rows have several images, whose features are others than those of one image", OFF)
        self.folder = cache_folder() / "image-features" / self._key()

    def _key(self) -> str:
        import PIL

        causal_lm = causal_lm_of(self.model)
        config = self.run.config
        machine = self.run.machine
        device = torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else machine.device.type
        processor = json.dumps(self.processor.processor.image_processor.to_dict(), sort_keys=True, default=str)
        arithmetic = (
            *(__version__, torch.__version__, PIL.__version__, device, machine.compute_dtype),
            *(config.use_kernels, config.attn_implementation, processor, describe(causal_lm), self.in_fp8),
        )
        digest = hashlib.sha256(repr(arithmetic).encode())
        for name in non_text_modules(causal_lm):
            module: nn.Module = causal_lm.get_submodule(name)
            for key, tensor in (*module.named_parameters(name), *module.named_buffers(name)):
                digest.update(f"{key} {tensor.dtype}".encode())
                for plain in plain_tensors(tensor.detach()):
                    digest.update(plain.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:32]

    def file(self, key: str) -> Path:
        """Return the file of an image's features."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def named(self, rows: Dataset) -> Dataset:
        """Return rows whose stored images have `FEATURES`, and no bytes."""
        if IMAGES not in rows.column_names:
            return rows
        values = [
            [{**image, "bytes": None, FEATURES: str(self.file(image["sha256"]))} for image in row]
            for row in _images(rows)
        ]
        stored = List({**STORED.feature, FEATURES: Value("string")})
        return with_column(rows.remove_columns(IMAGES), IMAGES, values, stored)

    def fill(self, console: Console) -> tuple[VisionOutput, dict[str, Any]]:
        """Compute the features that are missing, and compare the model's outputs on a few rows.

        Returns:
            The layout of the features, and numbers for checks.json.
        """
        start = time.time()
        rows = rows_with_most_images(self.splits, CHECKED_ROWS)
        checked = {image["sha256"] for row in _images(rows) for image in row}
        missing = [key for key, image in self.images.items() if not has_features(self.file(key), image["tokens"])]
        layout, features, _ = self._outputs(missing[0] if missing else min(checked))
        self._check_disk(sum(self.images[key]["tokens"] for key in missing) * token_bytes(features, self.in_fp8))
        with progress_bars("computing image features", console) as progress:
            task = progress.add_task("computing image features", total=len(missing))
            for group in ([key for key in missing if key in checked], [key for key in missing if key not in checked]):
                for key in group:
                    _, features, columns = self._outputs(key)
                    columns = {name: value for name, value in columns.items() if name != PIXELS}
                    write_features(self.file(key), features, columns, in_fp8=self.in_fp8)
                    progress.advance(task)
                if checked:
                    difference = self._compare(rows, layout)
                    checked.clear()
        stored = sum(self.file(key).stat().st_size for key in self.images)
        line = (
            f"images: features of {len(self.images):,}, {len(missing):,} of them new, {size(stored)} in {self.folder}"
        )
        seconds = time.time() - start
        console.print(one_line(f"{line}, {seconds:.1f} s"), soft_wrap=True)
        numbers = {"images": len(self.images), "computed": len(missing), "bytes": stored, "seconds": seconds}
        return layout, {**numbers, "difference": difference, "folder": str(self.folder)}

    @torch.no_grad()
    def _outputs(self, key: str) -> tuple[VisionOutput, Tensor, dict[str, Tensor]]:
        """Return the layout and the features [T, W] of an image, and its columns of the model's forward.

        Raises:
            ModelError: the model does not give one feature per token.
        """
        columns = self.processor.image_columns(self.images[key])
        self.model.eval()
        with compute_autocast(self.model, self.run.machine.compute_dtype):
            layout, features = image_outputs(self.model, to_device(columns, self.run.machine.device))
        if len(features) != (tokens := self.images[key]["tokens"]):
            raise ModelError(f"an image has {len(features)} features, and {tokens} tokens", OFF)
        return layout, features, columns

    def _compare(self, rows: Dataset, layout: VisionOutput) -> float:
        """Check that the model's hidden states from features are those from pixels, up to rounding, also of FP8.

        Returns:
            Mean absolute difference, relative to the mean absolute hidden state.

        Raises:
            ModelError: they are not.
        """
        run = self.run
        device = self.run.machine.device
        dtype = self.run.machine.compute_dtype
        is_prompt = run.method.rows == "prompts"  # with room for an answer, as a document
        collate = (make_collator if is_prompt else run.method.collator)(run.config, run.tokenizer, device)
        from_pixels = self._hidden_states(collate([*rows]))
        try:
            with reading_features(self.model, layout):
                from_features = self._hidden_states(collate([*self.named(rows)]))
        except Exception as error:  # the model's own code may read the output in any way
            if is_out_of_memory(error):
                raise
            raise ModelError(f"features of images do not fit {type(causal_lm_of(self.model)).__name__}", OFF) from error
        difference = float((from_features - from_pixels).abs().mean() / from_pixels.abs().mean())
        tolerance = HIDDEN_TOLERANCE.get(dtype, HIDDEN_TOLERANCE_16)
        if not difference <= (max(tolerance, FP8_TOLERANCE) if self.in_fp8 else tolerance):
            raise ModelError(
                f"hidden states from features of images differ by {difference:.3g} from those of pixels", OFF
            )
        return difference

    @torch.no_grad()
    def _hidden_states(self, batch: Mapping[str, Any]) -> Tensor:
        inputs = backbone_inputs(self.model, model_inputs(to_device(batch, self.run.machine.device), LABELS))
        with compute_autocast(self.model, self.run.machine.compute_dtype):
            return causal_lm_of(self.model).base_model(**inputs, use_cache=False).last_hidden_state.float()

    def _check_disk(self, needed: int) -> None:
        """Check that new features fit on the disk; if the cache is not required, in a share of its free bytes.

        Raises:
            TrainingError: they do not.
        """
        factor = 1.0 if self.run.config.requires_vision_cache else 1 / FREE_SHARE
        check_space(self.folder / "new", int(factor * needed), f"{OFF}, or HALFBYTE_CACHE to a folder on another disk")


def _images(rows: Dataset) -> list[list[dict[str, Any]]]:
    """Return the stored images of each row."""
    return list(rows[IMAGES]) if IMAGES in rows.column_names else []
