"""One forward for several adapters: a model without adapters, in which equal ranges of a batch's rows have one each.

The model of `RowAdapters` shares the frozen tensors of models that have an adapter each. Its fused forwards read, at
every linear, the adapters of these models for the ranges of rows (`autograd.lora.RowLoRA`): each weight is read and
dequantized once for all of them. The head computes each range by the range's own model. A linear that runs its own
forward would leave adapters out without an error, so `unjoinable` looks for such linears before training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from ..batch import INPUT_IDS, LABELS
from ..ops import IGNORE_INDEX
from ..utils.errors import ModelError
from .head import backbone_inputs, hidden_loss, verified_head
from .layer import causal_lm_of, decoder_layers
from .patch_record import ActiveRows, RowModules, record


class RowAdapters:
    """Computes the losses of several models that share frozen tensors by one forward.

    Args:
        joint: a transformers model of the frozen tensors of `models`, without adapters, patched as they are.
        models: a PeftModel for each adapter, patched, of the same architecture.
    """

    def __init__(self, joint: Any, models: Sequence[Any]):
        self.joint = joint
        self.models = models
        self._rows = ActiveRows()
        of_models = [dict(causal_lm_of(model).named_modules()) for model in models]
        head = joint.get_output_embeddings()
        layers = {id(layer) for layer in decoder_layers(joint)[1]}
        self._adapted: dict[str, int] = {}  # name of each linear with adapters → its id
        for name, module in joint.named_modules():
            in_models = [modules[name] for modules in of_models]
            adapted = any(isinstance(module, BaseTunerLayer) for module in in_models)
            if adapted and module is not head:  # the head of each model is read as it is
                self._adapted[name] = id(module)
            if name in self._adapted or id(module) in layers:
                record(module).row_modules = RowModules(self._rows, in_models)

    @contextlib.contextmanager
    def active(self, adapters: Sequence[int]) -> Iterator[None]:
        """Within the context, which includes backward, equal ranges of the batch's rows have these adapters."""
        self._rows.adapters = tuple(adapters)
        try:
            yield
        finally:
            self._rows.adapters = ()

    def losses(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """Return the summed cross-entropy of each range of rows, 0-d fp32; within `active`.

        Args:
            batch: as `causal_lm_loss` takes it, with equally many rows for each active adapter, in their order.
        """
        adapters = self._rows.adapters
        inputs = backbone_inputs(self.joint, batch)
        labels = F.pad(batch[LABELS][..., 1:], (0, 1), value=IGNORE_INDEX)
        hidden = self.joint.base_model(**inputs, use_cache=False).last_hidden_state
        losses = []
        ranges = zip(adapters, hidden.chunk(len(adapters)), labels.chunk(len(adapters)), strict=True)
        for adapter, range_hidden, range_labels in ranges:
            model = self.models[adapter]
            head = verified_head(model, inputs)
            if isinstance(head, str):
                raise ModelError(
                    f"one forward cannot compute several adapters: {head}", "train each in a run of its own"
                )
            losses.append(hidden_loss(causal_lm_of(model), head, range_hidden, range_labels))
        return losses

    @torch.no_grad()
    def unjoinable(self, ids: Tensor) -> str | None:
        """Return why one forward cannot compute all adapters, or None. It runs one on token ids [1, T]."""
        self._rows.read.clear()
        batch = {key: ids.expand(len(self.models), -1) for key in (INPUT_IDS, LABELS)}
        try:
            with self.active(range(len(self.models))):
                self.losses(batch)
        except ModelError as error:
            return error.message
        unread = [name for name, module in self._adapted.items() if module not in self._rows.read]
        return f"{unread[0]} runs a forward of its own" if unread else None
