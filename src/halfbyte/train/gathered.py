"""What the stages of a pipeline hold apart, as one process would hold it: weights and the optimizer's state.

Checkpoints and adapters are written whole, by the main process, in the order of one process's parameters. So they do
not tell how many processes there were, and a run continues on another number of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.adapters import adapter_weights
from halfbyte.models.stages import Stages
from halfbyte.optim import trained_parameters
from halfbyte.parallel import AXES, Mesh


@dataclass(frozen=True)
class Gathered:
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

    def _from_stages(self, own: dict[str, Any]) -> dict[str, Any]:
        """The entries of all stages; other processes have the same as one of these."""
        speaks = self.mesh.place(*(axis for axis in AXES if axis != "pipeline")) == 0
        return {name: each for part in self.mesh.gather(own if speaks else {}) for name, each in part.items()}


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
