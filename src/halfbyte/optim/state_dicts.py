"""Layouts of a parameter's optimizer state, and their conversion: halfbyte's, torch's, flashoptim's and bitsandbytes'.

Between steps a state has torch's name (`exp_avg`), a quantized one flashoptim's suffixes (`exp_avg::quantized`,
`exp_avg::scales`): fp32 and bf16 states load in torch's optimizer of the rule, companded8 in flashoptim's. dynamic8 is
saved in bitsandbytes' layout: `state1`, `absmax1` and `qmap1` under one key, the step as an int.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats.codebooks import dynamic_map
from ..ops.optimizer import RULES
from ..ops.optimizer_state import STORAGES, Storage
from ..utils.errors import CheckpointError, TrainingError

WRAPPED = "__bnb_optimizer_quant_state__"  # bitsandbytes puts tensors that FSDP must not cast under this key
RULE = "rule"  # key of a saved group: name of its rule
CORRECTION = "correction"  # key of the bits of a weight that its bf16 does not hold
CORRECTIONS = {"correction8": torch.int8, "correction16": torch.int16}
# names of the states of all rules and of torch's optimizers, and of the surplus ones of `from_bitsandbytes`
STATES = {name for row in RULES.values() for name in row.states} | {"max_exp_avg_sq", "grad_avg", "state2", "state3"}
RESUME = "resume with the optimizer that saved it"


@dataclass(frozen=True)
class StateLayout:
    """How the state of one parameter is stored.

    Attributes:
        rule: a name in `RULES`.
        storage: of every state of the rule.
        elements: of a state; the weight's, except in a state of Q-GaLore's subclass of bitsandbytes' optimizers.
        correction: dtype of the rounded bits of a bf16 weight; None: there are none.
        device: of the state; the step count is on the weight's device.
    """

    rule: str
    storage: Storage
    elements: int
    correction: torch.dtype | None
    device: torch.device

    def zeros(self, weight: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step; `weight` is the local shard.

        Raises:
            TrainingError: the host has not enough free memory.
        """
        state: dict[str, Any] = {"step": torch.zeros((), device=weight.device)}
        signs = RULES[self.rule].signed
        for number, signed in enumerate(signs):
            try:
                codes, scales = self.storage.zeros(self.elements, signed, self.device)
            except torch.OutOfMemoryError:  # of a GPU: the caller may free memory
                raise
            except RuntimeError as error:
                gib = len(signs) * self.storage.nbytes(self.elements) / 2**30
                wrong = f"{gib:.2f} GiB of host memory for the state of a parameter are not free"
                raise TrainingError(wrong, "take an optimizer with less state, such as adamw_8bit") from error
            self._set(state, number, codes, scales, weight)
        if self.correction is not None:
            state[CORRECTION] = torch.zeros(weight.shape, dtype=self.correction, device=self.device)
        return state

    def _set(self, state: dict[str, Any], number: int, codes: Tensor, scales: Tensor | None, weight: Tensor) -> None:
        if codes.numel() == weight.numel():
            codes = codes.view(weight.shape)
        state.update(zip(state_keys(self.rule, self.storage.name, number), (codes, scales), strict=False))

    def check(self, state: Mapping[str, Any], weight: Tensor, name: str) -> None:
        """Raise a TrainingError if the parameter `name` has changed so that its state does not fit it any more."""
        expected: dict[str, tuple[int, torch.dtype]] = {}
        for number, signed in enumerate(RULES[self.rule].signed):
            sizes = self.elements, self.storage.scales(self.elements)
            dtypes = self.storage.codes_dtype(signed), self.storage.scale_dtype
            keys = state_keys(self.rule, self.storage.name, number)
            expected |= zip(keys, zip(sizes, dtypes, strict=True), strict=False)
        if self.correction is not None:
            expected[CORRECTION] = self.elements, self.correction
        tensors = {key: state[key] for key in expected if key in state}
        actual = {key: (tensor.numel(), tensor.dtype) for key, tensor in tensors.items()}
        shapes = {tensor.shape for tensor in tensors.values() if tensor.dim() > 1 and tensor.numel() == weight.numel()}
        has_moved = any(tensor.device != self.device for tensor in tensors.values())
        if actual != expected or shapes - {weight.shape} or has_moved:
            raise TrainingError(
                f"{name} is now {weight.dtype} {[*weight.shape]} on {weight.device}, which its"
                f" optimizer state does not fit: {actual} instead of {expected}",
                "change parameters and options before the first step, or make a new optimizer",
            )

    def restore(self, saved: Mapping[str, Any], weight: Tensor, number: int) -> dict[str, Any]:
        """Return the saved state of parameter `number`, copied to this layout; `weight` is the local shard.

        Args:
            saved: with the names of `state_keys`; see `from_bitsandbytes`.

        Raises:
            CheckpointError: it is of another rule, storage or shape.
        """
        rule = RULES[self.rule]
        if surplus := {key.partition("::")[0] for key in saved} & STATES - {*rule.states}:
            wrong = f"the saved state of parameter {number} has {', '.join(surplus)}, and rule {self.rule} does not"
            raise CheckpointError(wrong, RESUME)
        if "step" not in saved and rule.corrects_bias:
            raise CheckpointError(f"the saved state of parameter {number} has no step", "load a full state dict")
        step = torch.as_tensor(saved.get("step", 0), dtype=torch.float32)
        state: dict[str, Any] = {"step": step.to(weight.device, copy=True)}
        for index, (name, signed) in enumerate(zip(rule.states, rule.signed, strict=True)):
            keys = state_keys(self.rule, self.storage.name, index)
            tensors = [saved[key] for key in keys if key in saved]
            if not self.storage.block and not (isinstance(saved.get(name), Tensor) and saved[name].is_floating_point()):
                tensors = []
            fits = len(tensors) == len(keys) and tensors[0].numel() == self.elements
            if not fits or (self.elements == weight.numel() and tensors[0].shape != weight.shape):
                raise CheckpointError(
                    f"the saved state of parameter {number} has {', '.join(key for key in saved if key != WRAPPED)};"
                    f" rule {self.rule} with storage {self.storage.name} needs {', '.join(keys)} of"
                    f" {self.elements} elements and the shape {[*weight.shape]}",
                    RESUME,
                )
            codes = tensors[0].to(self.device, self.storage.codes_dtype(signed), copy=True).flatten()
            scales = None
            if self.storage.block:
                scales = tensors[1].to(self.device, self.storage.scale_dtype, copy=True).flatten()
                if len(scales) != self.storage.scales(self.elements):
                    raise CheckpointError(
                        f"the saved state of parameter {number} has {len(scales)} scales; blocks of"
                        f" {self.storage.block} give {self.storage.scales(self.elements)}",
                        RESUME,
                    )
            self._set(state, index, codes, scales, weight)
        if self.correction is not None:
            state[CORRECTION] = torch.zeros(weight.shape, dtype=self.correction, device=self.device)
            if CORRECTION in saved:
                if saved[CORRECTION].shape != weight.shape:
                    wrong = f"the saved correction of parameter {number} has the shape {[*saved[CORRECTION].shape]}"
                    raise CheckpointError(wrong, f"resume with the model that saved it: {[*weight.shape]}")
                state[CORRECTION].copy_(saved[CORRECTION])
        return state


def state_keys(rule: str, storage: str, number: int) -> tuple[str, ...]:
    """Key of state `number` of a rule, or keys of its codes and scales."""
    name = RULES[rule].states[number]
    return (f"{name}::quantized", f"{name}::scales") if STORAGES[storage].block else (name,)


def state_tensors(state: Mapping[str, Any], rule: str, storage: str) -> list[tuple[Tensor, Tensor | None]]:
    """Return the codes, flat, and scales of each state of a parameter."""
    tensors = []
    for number in range(len(RULES[rule].states)):
        codes, *scales = (state[key] for key in state_keys(rule, storage, number))
        tensors.append((codes.view(-1), scales[0] if scales else None))
    return tensors


def from_bitsandbytes(rule: str, saved: dict[str, Any]) -> dict[str, Any]:
    """A parameter's saved state with the names of `state_keys`; without bitsandbytes' names it is unchanged."""
    saved = {**saved, **saved.get(WRAPPED, {})}
    if "state1" not in saved:
        return saved
    states = [(saved.get(f"state{n}"), saved.get(f"absmax{n}")) for n in (1, 2, 3) if f"state{n}" in saved]
    if rule == "ademamix" and len(states) == 2:  # bitsandbytes stacks the first moments
        (codes, scales), last = states
        pairs: Any = (None, None) if scales is None else scales
        states = [*zip(codes, pairs, strict=True), last]  # type: ignore[arg-type]
    converted = {key: value for key, value in saved.items() if key in ("step", CORRECTION, WRAPPED)}
    names = [*RULES[rule].states, *(f"state{n}" for n in range(len(RULES[rule].states) + 1, len(states) + 1))]
    for name, (codes, scales) in zip(names, states, strict=False):
        converted |= {name: codes} if scales is None else {f"{name}::quantized": codes, f"{name}::scales": scales}
    return converted


def to_bitsandbytes(rule: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as bitsandbytes saves it: step as an int, the tensors under one key.

    AdEMAMix has three states here, and two in bitsandbytes, whose first one is a stack of two.
    """
    wrapped: dict[str, Any] = {}
    for number, (name, signed) in enumerate(zip(RULES[rule].states, RULES[rule].signed, strict=True), start=1):
        if name in state:  # fp32 state of a small parameter
            wrapped[f"state{number}"] = state[name]
        else:
            codes = state[f"{name}::quantized"]
            wrapped |= {f"state{number}": codes, f"absmax{number}": state[f"{name}::scales"]}
            wrapped[f"qmap{number}"] = dynamic_map(codes.device, signed=signed)
    saved = {"step": int(state["step"]), WRAPPED: wrapped}
    return saved | ({CORRECTION: state[CORRECTION]} if CORRECTION in state else {})


def check_saved_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a CheckpointError if a state dict is incomplete, or of groups with other numbers of parameters."""
    if missing := {"param_groups", "state"} - state_dict.keys():
        raise CheckpointError(f"the optimizer state has no {', '.join(missing)}", "load a full state dict")
    saved_sizes, sizes = ([len(group["params"]) for group in g] for g in (state_dict["param_groups"], groups))
    if saved_sizes != sizes:
        wrong = f"the optimizer state has groups of {saved_sizes} parameters, and the optimizer {sizes}"
        raise CheckpointError(wrong, "load the state of this model, with the optimizer's options of its run")


def elements_per_entry(key: str, value: Any, elements: int) -> int:
    """Elements of a parameter per entry of a state tensor; 0: the value does not belong to elements.

    Args:
        key: in the optimizer's state dict, also of other optimizers.
        elements: of the parameter.
    """
    if not isinstance(value, Tensor) or key.startswith("qmap"):
        return 0
    block = 1
    if key.startswith("absmax"):
        block = STORAGES["dynamic8"].block
    elif key.endswith("::scales"):
        block = STORAGES["companded8"].block
    return block if value.dim() and value.numel() == -(-elements // block) else 0
