"""What the stages of a pipeline hold apart, as one process would hold it: weights and the optimizer's state.

Checkpoints and adapters are written whole, by the main process, in the order of one process's parameters. So they do
not tell how many processes there were, and a run continues on another number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from halfbyte.modeling.adapters import adapter_weights
from halfbyte.modeling.projections import scaling_indices
from halfbyte.ops.fp8_scaling import DelayedScaling
from halfbyte.optim import trained_parameters
from halfbyte.parallel.mesh import AXES, Mesh
from halfbyte.parallel.pipeline.model import Stages

Key = TypeVar("Key")


@dataclass(frozen=True)
class PipelineState:
    """The trained parameters of a model in stages; every process calls the same methods."""

    mesh: Mesh
    stages: Stages

    def weights(self) -> dict[str, Tensor]:
        """Of the whole model's adapter, by their names in its file, on the CPU."""
        return self._from_stages(adapter_weights(self.stages.model))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state dict that one process's optimizer would have."""
        groups, state = self._groups(optimizer), optimizer.state_dict()
        own = [name for group in self._own_groups(optimizer) for name in group]
        found = self._from_stages({own[index]: _on_cpu(each) for index, each in state["state"].items()})
        order = {name: index for index, name in enumerate(name for group in groups for name in group)}
        return {
            "state": {order[name]: each for name, each in sorted(found.items(), key=lambda item: order[item[0]])},
            "param_groups": [
                {**options, "params": [order[name] for name in group]}
                for options, group in zip(state["param_groups"], groups, strict=True)
            ],
        }

    def own_part(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Of `state`, one process's, what this process's optimizer takes."""
        order = {name: index for index, name in enumerate(name for group in self._groups(optimizer) for name in group)}
        groups = self._own_groups(optimizer)
        own = [name for group in groups for name in group]
        here = {name: index for index, name in enumerate(own)}
        return {
            "state": {here[name]: state["state"][order[name]] for name in own if order[name] in state["state"]},
            "param_groups": [
                {**options, "params": [here[name] for name in group]}
                for options, group in zip(state["param_groups"], groups, strict=True)
            ],
        }

    def scaling(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The amax histories and scales that one process would have, on the CPU: layer by layer."""
        own = {
            index: {name: value[rows].cpu() for name, value in state.items()} for index, rows in self._rows().items()
        }
        found = self._from_stages(own)
        return {name: torch.cat([found[index][name] for index in sorted(found)]) for name in state}

    def own_scaling(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of one process's, what this process's layers take."""
        own, found = self._rows(), dict[str, Tensor]()
        lengths = self._from_stages({index: len(rows) for index, rows in own.items()})
        order = sorted(lengths)
        for name, whole in state.items():
            parts = dict(zip(order, whole.split([lengths[index] for index in order]), strict=True))
            found[name] = whole.new_empty(sum(map(len, own.values())), *whole.shape[1:])
            for index, rows in own.items():
                found[name][rows] = parts[index]
        return found

    def _rows(self) -> dict[int, list[int]]:
        """Number of a layer of this process → its tensors in the state of a recipe."""
        found = {index: scaling_indices(layer.modules()) for index, layer in enumerate(self.stages.all)}
        return {index: rows for index, rows in found.items() if rows}

    def _own(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.stages.model)

    def _own_groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Names of this process's parameters in each group of its optimizer."""
        names = {id(parameter): name for name, parameter in self._own().items()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Names of the whole model's parameters in each group, as one process's optimizer has them."""
        parts = self.mesh.gather(self._own_groups(optimizer))
        held = [{name for part in parts for name in part[index]} for index in range(len(parts[0]))]
        return [[name for name in self.stages.names if name in group] for group in held]

    def _from_stages(self, own: dict[Key, Any]) -> dict[Key, Any]:
        """The entries of all stages; other processes have the same as one of these."""
        speaks = self.mesh.coordinate(*(axis for axis in AXES if axis != "pipeline")) == 0
        return {name: each for part in self.mesh.gather(own if speaks else {}) for name, each in part.items()}


def scaling_state(scaling: DelayedScaling | None, gathered: PipelineState | None) -> dict[str, Tensor] | None:
    """What a checkpoint keeps of a recipe's state, whole; None: the run has none. Every process calls it."""
    if scaling is None:
        return None
    return gathered.scaling(scaling.state_dict()) if gathered else scaling.state_dict()


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
