"""BAdam: block coordinate descent with Adam, for full fine-tuning (Luo et al. 2024, arXiv:2404.02827, Algorithm 1).

The trained parameters are divided into blocks. Only the active block is updated. After `switch_interval` steps its
optimizer state is dropped and the next block becomes active, with zero moments.

- mode "layer": a block is one decoder layer. Parameters outside of decoder layers (embeddings, final norm, head) are
  not trained. Only the active block requires gradients, so the backward ends at its first layer.
- mode "ratio": a block is a share of the elements of every parameter: adjacent elements, or every n-th one
  ("scatter"). All gradients are computed.

Keys and names are LLaMA-Factory's. Differences: in mode "ratio" the elements change with the switch interval, and
"scatter" takes evenly spaced elements in place of random ones, because random indices need 8 bytes an element.

Memory beyond weights, for the active block: gradients, the inner optimizer's state in fp32, and fp32 master weights of
narrow or scattered elements.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..utils.errors import CheckpointError, ConfigError, TrainingError
from .groups import LAYER
from .parameters import check_gradient, check_unique, closure_loss
from .state_dicts import check_saved_groups

MakeInner = Callable[[list[dict[str, Any]]], Optimizer]  # parameter groups → the optimizer that steps them

MASTER = "master"  # key of a parameter's fp32 master weights in a state dict


@dataclass(frozen=True)
class Blocks:
    """Options of the blocks.

    Attributes:
        mode: "layer" or "ratio".
        switch_mode: order of blocks: ascending, descending, random (a permutation for each pass) or fixed.
        switch_interval: steps of a block.
        start_block: index of the first block; None: the first or, descending, the last one.
        update_ratio: share of the elements in a block of mode "ratio".
        mask_mode: "adjacent" or "scatter", which elements are a block of mode "ratio".
    """

    mode: str = "layer"
    switch_mode: str = "ascending"
    switch_interval: int = 50
    start_block: int | None = None
    update_ratio: float = 0.05
    mask_mode: str = "adjacent"

    def names(self, trained: Mapping[str, Tensor]) -> list[list[str]]:
        """Return the names of the parameters that each block has elements of.

        Without numbered layers, mode "layer" has one block of all parameters.
        """
        if self.mode == "ratio":
            return [[*trained]] * math.ceil(1 / self.update_ratio - 1e-9)
        layers: dict[str, list[str]] = {}
        for name in trained:
            if layer := LAYER.match(name):
                layers.setdefault(layer[0], []).append(name)
        return [*layers.values()] or [[*trained]]

    def elements(self, parameter: Tensor, block: int, count: int) -> Tensor:
        """Return the elements of a parameter in a block, as a view: itself, or flat in mode "ratio"."""
        if self.mode == "layer":
            return parameter
        flat = parameter.view(-1)
        if self.mask_mode == "scatter":
            return flat[block::count]
        width = -(-len(flat) // count)
        return flat[block * width : (block + 1) * width]

    def block_at(self, switches: int, count: int, seed: int) -> int:
        """Return the active one of `count` blocks after this number of switches."""
        start = self.start_block
        if self.switch_mode == "fixed":
            return start or 0
        if self.switch_mode == "random":
            turn, position = divmod(switches, count)
            order = random.Random(f"{seed}/{turn}").sample(range(count), count)
            if turn == 0 and start is not None:
                order.insert(0, order.pop(order.index(start)))
            return order[position]
        if self.switch_mode == "ascending":
            return ((start or 0) + switches) % count
        return ((count - 1 if start is None else start) - switches) % count

    def check_start(self, count: int) -> None:
        """Raise a ConfigError if the first block is not one of `count` blocks."""
        if self.start_block is not None and self.start_block >= count:
            raise ConfigError(
                f"badam_start_block: {self.start_block} is not one of the {count} blocks", f"give 0 to {count - 1}"
            )

    def check_elements(self, trained: Mapping[str, Tensor]) -> None:
        """Raise a ConfigError if mode "ratio" cannot take a parameter, or would have a block without elements."""
        if self.mode != "ratio" or not trained:
            return
        for name, parameter in trained.items():
            if not parameter.is_contiguous():
                raise ConfigError(
                    f"badam_mode: ratio divides contiguous parameters, and {name} is not",
                    "call contiguous() on its data",
                )
        count, largest = len(self.names(trained)), max(trained.values(), key=Tensor.numel)
        if not self.elements(largest.detach(), count - 1, count).numel():
            raise ConfigError(
                f"badam_update_ratio: {self.update_ratio} makes {count} blocks, and the largest parameter has"
                f" {largest.numel()} elements",
                "raise badam_update_ratio",
            )


class BAdam(Optimizer):
    """BAdam over an inner optimizer; see the module's docstring.

    Args:
        groups: parameter groups with `weight_decay`.
        trained: name → parameter, in the model's order; the parameters of all groups.
        make_inner: makes the inner optimizer of a block from groups.
        lr: learning rate of groups without their own.
        blocks: the options.
        seed: of switch_mode "random".

    Raises:
        ConfigError: `blocks.start_block` is not a block, a parameter is in two places, or mode "ratio" gets parameters
            that are not contiguous or fewer elements than blocks; or a group is added later.
    """

    def __init__(
        self, groups: list[dict[str, Any]], trained: Mapping[str, nn.Parameter], make_inner: MakeInner, *, lr: float,
        blocks: Blocks, seed: int = 0,
    ):  # fmt: skip
        self._numbered: list[tuple[int, nn.Parameter]] = []
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.blocks = blocks
        self.seed = seed
        self._make_inner = make_inner
        self._trained = dict(trained)
        self._numbered = [
            (number, parameter) for number, group in enumerate(self.param_groups) for parameter in group["params"]
        ]
        positions = {id(parameter): position for position, (_, parameter) in enumerate(self._numbered)}
        self._members = [{positions[id(trained[name])] for name in names} for names in blocks.names(trained)]
        blocks.check_start(len(self._members))
        blocks.check_elements(self._trained)
        self.steps = 0
        self._activate(0)

    def __getstate__(self) -> dict[str, Any]:
        arguments = {"trained": self._trained, "make_inner": self._make_inner, "blocks": self.blocks, "seed": self.seed}
        saved = self.state_dict()
        return {"groups": self.param_groups, **arguments, "lr": self.defaults["lr"], "saved": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        BAdam.__init__(self, **state)
        self.load_state_dict(saved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._numbered:
            wrong = "a parameter group is added to BAdam, whose blocks are made from all parameters"
            raise ConfigError(wrong, "make a new optimizer with all groups")
        param_group["params"] = [*param_group["params"]]
        check_unique(self.param_groups, param_group["params"])
        super().add_param_group(param_group)

    @property
    def active(self) -> int:
        """Index of the active block."""
        return self.blocks.block_at(self._switches, len(self._members), self.seed)

    def _activate(self, switches: int) -> None:
        """Make the block after this number of switches active, with a new inner optimizer."""
        self._switches = switches
        # position → elements of the weight, and the parameter that the inner optimizer steps
        self._active_elements: dict[int, tuple[Tensor, nn.Parameter]] = {}
        self._outer: list[int] = []
        active, count = self.active, len(self._members)
        groups: dict[int, list[nn.Parameter]] = {}
        chosen = self._members[active]
        for position, (number, parameter) in enumerate(self._numbered):
            if self.blocks.mode == "layer":
                parameter.requires_grad_(position in chosen)
            if position not in chosen:
                parameter.grad = None
                continue
            elements = self.blocks.elements(parameter.detach(), active, count)
            if elements.numel():
                stepped = nn.Parameter(elements if _is_direct(elements) else elements.float().clone().contiguous())
                self._active_elements[position] = elements, stepped
                groups.setdefault(number, []).append(stepped)
        self._outer = list(groups)
        self.inner = self._make_inner(
            [
                {"params": params, "lr": self.param_groups[number]["lr"],
                 "weight_decay": self.param_groups[number]["weight_decay"]}
                for number, params in groups.items()
            ]
        )  # fmt: skip
        self._step_supports_amp_scaling = getattr(self.inner, "_step_supports_amp_scaling", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the active block; after the last step of its interval, activate the next one."""
        loss = closure_loss(closure)
        for position in self._active_elements:
            self._check(position)
        for position, (_, stepped) in self._active_elements.items():
            gradient = self._numbered[position][1].grad
            if gradient is not None:
                block_gradient = self.blocks.elements(gradient.contiguous(), self.active, len(self._members))
                stepped.grad = block_gradient.to(stepped.dtype).contiguous()
        if self._step_supports_amp_scaling:
            self.inner.grad_scale = getattr(self, "grad_scale", None)  # type: ignore[attr-defined]
            self.inner.found_inf = getattr(self, "found_inf", None)  # type: ignore[attr-defined]
        for group, number in zip(self.inner.param_groups, self._outer, strict=True):
            for key in ("lr", "weight_decay"):
                group[key] = self.param_groups[number][key]
        self.inner.step()
        for elements, stepped in self._active_elements.values():
            if not _is_direct(elements):
                elements.copy_(stepped)
            stepped.grad = None
        self.steps += 1
        switches = len(self._members) > 1 and self.blocks.switch_mode != "fixed"
        if switches and self.steps % self.blocks.switch_interval == 0:
            self._activate(self._switches + 1)
        return loss

    def _check(self, position: int) -> None:
        """Take a parameter's elements again if its data is another tensor, and check its gradient.

        Raises:
            TrainingError: the gradient is sparse, or the parameter has another shape or dtype than before.
        """
        (elements, stepped), parameter = self._active_elements[position], self._numbered[position][1]
        if parameter.grad is not None:
            check_gradient(parameter, parameter.grad, f"parameter {position}")
        current = self.blocks.elements(parameter.detach(), self.active, len(self._members))
        if (current.shape, current.dtype, current.device) != (elements.shape, elements.dtype, elements.device):
            raise TrainingError(
                f"parameter {position} is now {parameter.dtype} {[*parameter.shape]} on {parameter.device}, which its"
                " optimizer state does not fit",
                "change parameters before the first step, or make a new optimizer",
            )
        if current.data_ptr() != elements.data_ptr():
            self._active_elements[position] = current, stepped
            stepped.data = current if _is_direct(current) else current.float().clone().contiguous()

    # --- state dicts -------------------------------------------------------------------------------------------------

    def _positions(self) -> list[int]:
        """Positions of the active parameters in the order of the inner optimizer's parameters."""
        return [
            position
            for number in self._outer
            for position in self._active_elements
            if self._numbered[position][0] == number
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the active block by parameter, with its master weights, and the position in the order."""
        packed, inner = super().state_dict(), self.inner.state_dict()["state"]
        states = {position: dict(inner.get(index, {})) for index, position in enumerate(self._positions())}
        for position, (elements, stepped) in self._active_elements.items():
            if not _is_direct(elements):
                states[position][MASTER] = stepped.detach().clone()
        return {**packed, "state": {key: value for key, value in states.items() if value},
                "steps": self.steps, "switches": self._switches}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned for the same parameters.

        Raises:
            CheckpointError: the state is of another optimizer, of other parameters or of other blocks.
        """
        check_saved_groups(state_dict, self.param_groups)
        if "switches" not in state_dict:
            raise CheckpointError("the optimizer state has no blocks", "resume with the optimizer that saved it")
        for group, saved_group in zip(self.param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        self.steps = state_dict["steps"]
        self._activate(state_dict["switches"])
        inner: dict[int, Any] = {}
        positions = self._positions()
        if surplus := state_dict["state"].keys() - {*positions}:
            raise _other_blocks(min(surplus))
        for index, position in enumerate(positions):
            saved = dict(state_dict["state"].get(position, {}))
            elements, stepped = self._active_elements[position]
            if any(
                isinstance(value, Tensor) and value.dim() and value.shape != elements.shape for value in saved.values()
            ):
                raise _other_blocks(position)
            if saved and (MASTER in saved) == _is_direct(elements):
                raise _other_blocks(position)
            if (master := saved.pop(MASTER, None)) is not None:
                stepped.data.copy_(master)
            if saved:
                inner[index] = saved
        self.inner.load_state_dict({"state": inner, "param_groups": self.inner.state_dict()["param_groups"]})


def _other_blocks(position: int) -> CheckpointError:
    return CheckpointError(
        f"the saved state of parameter {position} is of other blocks", "resume with the badam_* options that saved it"
    )


def _is_direct(elements: Tensor) -> bool:
    """Return whether the inner optimizer steps these elements in place, without an fp32 copy."""
    return elements.dtype in (torch.float32, torch.float64) and elements.is_contiguous()


def badam_bytes(trained: Mapping[str, Tensor], blocks: Blocks, copies: int = 2) -> int:
    """Return the bytes of state of the largest block, excluding step counts.

    Args:
        trained: name → trained parameter; may be on the meta device.
        copies: tensors of the inner optimizer's state.
    """
    names = blocks.names(trained)

    def bytes_of(block: int) -> int:
        views = [blocks.elements(trained[name].detach(), block, len(names)) for name in names[block]]
        return sum(view.numel() * (copies * max(view.itemsize, 4) + (0 if _is_direct(view) else 4)) for view in views)

    return max((bytes_of(block) for block in range(len(names))), default=0)
