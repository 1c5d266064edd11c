"""Full state of a model in pipeline stages: weights and optimizer state as one process would hold them.

Checkpoints and adapters are full, written by the main rank in the order of one process's parameters. They do not depend
on the number of ranks, and a run may resume with another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...adapters.lora import adapter_weights
from ...mesh.mesh import AXES, Mesh
from ...modeling.projections import scaling_indices
from ...ops.fp8_scaling import DelayedScaling
from ...optim import trained_parameters
from .model import LocalStages

Key = TypeVar("Key")


@dataclass(frozen=True)
class PipelineState:
    """Gathers and splits the trained state of a model in stages; all ranks must call the same methods."""

    mesh: Mesh
    stages: LocalStages

    def weights(self) -> dict[str, Tensor]:
        """Return the full model's adapter, by the names in its file, on the CPU."""
        return self._gather_stages(adapter_weights(self.stages.model))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state dict that the optimizer of one process would have."""
        groups, state = self._groups(optimizer), optimizer.state_dict()
        local_names = [name for group in self._local_group_names(optimizer) for name in group]
        local_states = {
            local_names[index]: {name: x.cpu() if isinstance(x, Tensor) else x for name, x in values.items()}
            for index, values in state["state"].items()
        }
        states = self._gather_stages(local_states)
        order = {name: index for index, name in enumerate(name for group in groups for name in group)}
        return {
            "state": {order[name]: values for name, values in sorted(states.items(), key=lambda item: order[item[0]])},
            "param_groups": [
                {**options, "params": [order[name] for name in group]}
                for options, group in zip(state["param_groups"], groups, strict=True)
            ],
        }

    def local_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of one process's optimizer `state`."""
        order = {name: index for index, name in enumerate(name for group in self._groups(optimizer) for name in group)}
        groups = self._local_group_names(optimizer)
        local_names = [name for group in groups for name in group]
        local_numbers = {name: index for index, name in enumerate(local_names)}
        return {
            "state": {
                local_numbers[name]: state["state"][order[name]]
                for name in local_names
                if order[name] in state["state"]
            },
            "param_groups": [
                {**options, "params": [local_numbers[name] for name in group]}
                for options, group in zip(state["param_groups"], groups, strict=True)
            ],
        }

    def scaling(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the amax histories and scales that one process would have, in the order of layers, on the CPU."""
        by_layer = {
            index: {name: value[rows].cpu() for name, value in state.items()} for index, rows in self._rows().items()
        }
        all_layers = self._gather_stages(by_layer)
        return {name: torch.cat([all_layers[index][name] for index in sorted(all_layers)]) for name in state}

    def local_scaling(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of one process's amax histories and scales."""
        local_rows, local = self._rows(), dict[str, Tensor]()
        lengths = self._gather_stages({index: len(rows) for index, rows in local_rows.items()})
        order = sorted(lengths)
        for name, full in state.items():
            by_layer = dict(zip(order, full.split([lengths[index] for index in order]), strict=True))
            local[name] = full.new_empty(sum(map(len, local_rows.values())), *full.shape[1:])
            for index, rows in local_rows.items():
                local[name][rows] = by_layer[index]
        return local

    def _rows(self) -> dict[int, list[int]]:
        """Map the index of each local layer to its tensors in the recipe's state."""
        indices = {index: scaling_indices(layer.modules()) for index, layer in enumerate(self.stages.layers)}
        return {index: rows for index, rows in indices.items() if rows}

    def _local_group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of this rank's parameters in each group of its optimizer."""
        names = {id(parameter): name for name, parameter in trained_parameters(self.stages.model).items()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of the full model's parameters in each group, in the order of one process."""
        by_rank = self.mesh.gather(self._local_group_names(optimizer))
        members = [{name for groups in by_rank for name in groups[index]} for index in range(len(by_rank[0]))]
        return [[name for name in self.stages.names if name in group] for group in members]

    def _gather_stages(self, entries: dict[Key, Any]) -> dict[Key, Any]:
        """Merge the entries of all stages; along other axes ranks have equal entries, so one of them contributes."""
        contributes = self.mesh.coordinate(*(axis for axis in AXES if axis != "pipeline")) == 0
        gathered = self.mesh.gather(entries if contributes else {})
        return {name: value for rank_entries in gathered for name, value in rank_entries.items()}


def scaling_state(scaling: DelayedScaling | None, pipeline: PipelineState | None) -> dict[str, Tensor] | None:
    """Return the full state of a delayed-scaling recipe for a checkpoint, or None; all ranks must call it."""
    if scaling is None:
        return None
    return pipeline.scaling(scaling.state_dict()) if pipeline else scaling.state_dict()
