"""Inputs and gradients of rows of the data, which initialisations of adapters read before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..adapters.initial import AdapterInitialiser
from ..adapters.initial_data import LabelledBatch, weight_gradients
from ..adapters.lora import add_adapter
from ..config import Storage
from .completeness import meta_model
from .find import ModelFiles
from .load import check_not_quantized, load_model
from .quantizer import assigned_formats
from .streamed import stream_moments


def observe_inputs(
    initial: AdapterInitialiser,
    files: ModelFiles,
    storage: Storage,
    rows: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Compute the factors of an initialisation that reads the inputs of linear layers on rows of tokens.

    Args:
        storage: how the model will be stored.
        rows: token ids of documents.
        dtype: of the computation, and of the weights before they are quantized.

    Raises:
        ModelError: the checkpoint is quantized, or no token reached a module.
    """
    check_not_quantized(files)
    initial.prepare(add_adapter(meta_model(files.origin, files.config), initial.adapter))
    formats = assigned_formats(files.origin, storage)[0] if storage.quantized else {}

    def visit(module: str, weight: Tensor, moment: Tensor) -> None:
        initial.compute(module, weight, formats.get(f"{module}.weight"), moment)

    stream_moments(files, rows, initial.modules, visit, device=device, dtype=dtype, by_row=initial.by_row)


def observe_gradients(
    initial: AdapterInitialiser,
    files: ModelFiles,
    storage: Storage,
    batches: Sequence[LabelledBatch],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Measure the gradients of the weights on the stored base, for an initialisation that reads them.

    The model is loaded, and dropped before it is loaded again without the initial factors.

    Args:
        storage: how the model will be stored.
        batches: rows of the data on `device`, read until the direction of the gradients stands.
        dtype: of the computation.

    Raises:
        ModelError: the checkpoint is quantized, or a module has no gradient.
    """
    check_not_quantized(files)
    initial.prepare(add_adapter(meta_model(files.origin, files.config), initial.adapter))
    model = load_model(files, storage, dtype=dtype, device=device)
    initial.gradients = weight_gradients(model, initial.modules, batches)
