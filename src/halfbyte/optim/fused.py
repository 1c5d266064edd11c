"""Optimizers that step all parameters in two launches, for every rule and storage of `ops.optimizer`.

- Nothing is read on the host: learning rate and step counts are on the device, so a CUDA graph can hold a step.
- `found_inf` and `grad_scale` of torch.amp.GradScaler are honoured: a step whose `found_inf` is not 0 changes nothing.
  `clip` computes a factor by which the next step multiplies the gradients, without another pass over them.
- torch.compile sees one op in a step and one in `clip`; see `compiled`.
- State dicts interchange: fp32 and bf16 state with torch.optim's optimizer of the same rule, dynamic8 with
  bitsandbytes' 8-bit optimizers, companded8 with flashoptim's compressed ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..dispatch import on_compiler
from ..ops.optimizer import ROUNDINGS, RULES, TRUSTS
from ..ops.optimizer_state import STORAGES, Storage
from ..utils.errors import CheckpointError, ConfigError, TrainingError
from .backward import BackwardUpdates
from .clipping import ClippedGradients, Clipping, clip_unchanged, multiply
from .compiled import opaque_clip, opaque_step, register
from .launches import DeviceParameters, ParameterSet, StepTensors
from .offload import Windows
from .parameters import FULL_ELEMENTS, check_unique, closure_loss, local_of, parameter_name, shard_groups
from .state_dicts import (
    CORRECTIONS,
    RESUME,
    RULE,
    WRAPPED,
    StateLayout,
    check_saved_groups,
    from_bitsandbytes,
    to_bitsandbytes,
)

COMMON: dict[str, Any] = {
    "storage": "fp32",
    "rounding": "nearest",
    "fp32_state": (),
    "min_quantized": 4096,
    "offload": False,
    "capturable": True,
}
WITHOUT_EFFECT = ("foreach", "fused")  # keywords of torch's optimizers that do not change a step's numbers
# keywords of torch's optimizers that do, and that the optimizers of this module only take as False, 0 or None
UNSUPPORTED = (
    "amsgrad", "maximize", "differentiable", "momentum", "dampening", "nesterov", "centered", "lr_decay",
    "initial_accumulator_value",
)  # fmt: skip


class FusedOptimizer(Optimizer):
    """Base of the optimizers. The update of one parameter is specified by a pure function of `ops.optimizer.RULES`.

    `AdamW` updates as `ops.optimizer._adamw`; kernels compute the same for all parameters of a launch (`launches`).
    A group has the options of torch's optimizer of the same rule, and:

    - storage: a name in `STORAGES`, or "weight": bf16 for bf16 weights as in torch, otherwise fp32.
    - rounding: how weights in bf16 are rounded, a name in `ops.optimizer.ROUNDINGS`.
    - fp32_state: indices within the group of parameters whose state is fp32, such as embeddings.
    - min_quantized: parameters with fewer elements have fp32 state in place of a quantized one.
    - offload: whether the state is in pinned host memory; see `offload`. A CUDA graph cannot hold such a step.

    Keywords of torch's optimizers that do not change a step's numbers (`foreach`, `fused`) are ignored.

    Args:
        params: parameters or groups of them, as in torch.
        defaults: numbers of the rule, for groups without their own.
        options: the other options of groups.

    Raises:
        ConfigError: an option has an unknown name or is out of range, a parameter is in two places, the weights are not
            fp32, bf16 or fp16, or LAMB offloads its state.

    Attributes:
        rule: a name in `ops.optimizer.RULES`.
        trust: a name in `ops.optimizer.TRUSTS`, with which a step has two launches more, and a second pass; or None.
        all_parameters: the parameters and their launches, for steps outside of the backward.
        backward: updates the parameters in the backward; None: `step` does.
        clipping: result of `clip` for the next step.
        shard_groups: parameter → the process groups over which its elements are divided, for trust ratios of full
            parameters: each step sums their squares over these groups. Default: those of a DTensor.
    """

    rule: ClassVar[str]
    trust: ClassVar[str | None] = None
    all_parameters: ParameterSet
    backward: BackwardUpdates | None
    clipping: Clipping
    shard_groups: Callable[[Tensor], tuple[Any, ...]]
    _windows: dict[torch.device, Windows]
    _earlier_versions: int  # of parameter sets before `all_parameters`
    _number: int  # names the optimizer in compiled graphs
    _groups: list[dict[str, Any]]  # `param_groups` for torch.compile, which makes all numbers of that name constants
    _step_supports_amp_scaling = True  # torch.amp.GradScaler passes `found_inf` and does not block

    def __init__(self, params: Any, defaults: dict[str, Any], **options: Any):
        for name, value in options.items():
            if name in UNSUPPORTED and value:
                raise unsupported(self, name, value)
            if name not in (*COMMON, *WITHOUT_EFFECT, *UNSUPPORTED):
                names = ", ".join((*defaults, *COMMON))
                raise ConfigError(f"{type(self).__name__} has no option {name}", f"its options: {names}")
        options = {name: value for name, value in options.items() if name in COMMON}
        self._initialize()
        super().__init__(params, COMMON | defaults | options)

    def _initialize(self) -> None:
        """Set the attributes that pickling leaves out."""
        self.all_parameters = ParameterSet(self)
        self.backward = None
        self.clipping = Clipping()
        self.shard_groups = shard_groups
        self._windows = {}
        self._earlier_versions = 0
        self._number = register(self)

    def __getstate__(self) -> dict[str, Any]:
        for windows in self._windows.values():
            windows.synchronize()
        in_backward = None if self.backward is None else self.backward.parameter_lists
        return {**super().__getstate__(), "in_backward": in_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        in_backward = state.pop("in_backward")
        self._initialize()
        super().__setstate__(state)
        self._groups = self.param_groups
        if in_backward is not None:
            self.update_in_backward(in_backward)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.backward is not None:
            raise TrainingError(
                "a parameter group is added to an optimizer that updates in the backward",
                "add it before update_in_backward, and divide its parameters there too",
            )
        parameters = param_group["params"]
        if not isinstance(parameters, set):  # which torch refuses, since it has no order
            param_group["params"] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        check_unique(self.param_groups, param_group["params"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except ConfigError:
            self.param_groups.pop()
            raise
        for key in WITHOUT_EFFECT:
            group.pop(key, None)
        group["capturable"] = not group["offload"]
        self._reset()

    def _check(self, group: dict[str, Any]) -> None:
        """Raise a ConfigError that names an option or a dtype which the group cannot have."""
        for key in UNSUPPORTED:
            if group.get(key) and key not in self.defaults:
                raise unsupported(self, key, group[key])
        rate = group["lr"]
        if isinstance(rate, Tensor) and rate.numel() != 1:
            raise ConfigError(f"lr is a tensor of shape {[*rate.shape]}", "pass a float or a tensor of one element")
        for key in ("lr", "weight_decay", "eps", "momentum"):
            value = group.get(key, 0.0)
            if not (isinstance(value, Tensor) or value >= 0):
                raise ConfigError(f"{key} is {value}", "pass a number from 0")
        count = 3 if self.rule == "ademamix" else 2
        if "betas" in group and len(group["betas"]) != count:
            raise ConfigError(f"betas are {group['betas']}", f"pass {count} numbers")
        for number, beta in enumerate(group.get("betas", ())):
            if not (0 <= beta < 1 or (number == 2 and beta == 1)):
                raise ConfigError(f"betas[{number}] is {beta}", "pass a number from 0 to below 1")
        for key, choices in (("storage", ("weight", *RULES[self.rule].storages)), ("rounding", ROUNDINGS)):
            if group[key] not in choices:
                raise ConfigError(
                    f"{key}: unknown {group[key]!r}", f"with rule {self.rule} choose one of: {', '.join(choices)}"
                )
        dtypes = {weight.dtype for weight in group["params"]}
        if unknown := dtypes - {torch.float32, torch.bfloat16, torch.float16}:
            raise ConfigError(
                f"an optimizer cannot update weights in {unknown.pop()}", "train fp32, bf16 or fp16 weights"
            )
        if group["rounding"] != "nearest" and torch.float16 in dtypes:
            raise ConfigError(f"rounding: {group['rounding']!r} does not take fp16 weights", "train bf16 weights")
        if self.trust is not None and group["offload"] and TRUSTS[self.trust].reads_states:
            wrong = f"offload: {type(self).__name__} reads the state twice in a step, so it is not streamed"
            raise ConfigError(wrong, "leave the state on the device, or take another optimizer")
        self._reset()

    def _reset(self) -> None:
        """Divide the parameters into launches again in the next step."""
        for windows in self._windows.values():
            windows.synchronize()
        self._clip_in_place()
        self._windows = {}
        self._groups = self.param_groups
        self._earlier_versions += self.all_parameters.version
        self.all_parameters = ParameterSet(self)
        if self.backward is not None:
            self.backward.reset()

    def windows(self, device: torch.device) -> Windows:
        """The windows on a device that all offloaded states share."""
        if device not in self._windows:
            self._windows[device] = Windows(device)
        return self._windows[device]

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group's numbers by the names of `ops.optimizer.SETTINGS`; absent ones are 0."""
        beta1, beta2 = group["betas"][:2]
        return {"beta1": beta1, "beta2": beta2, "eps": group.get("eps", 0.0)}

    def options_of(self, number: int, index: int) -> dict[str, Any] | None:
        """Return the options of parameter `index` of a group, if it has other options than the group, or None."""
        return None

    def on_squared_norms(self, parameters: DeviceParameters, squares: Tensor) -> None:
        """Hook that receives the squared norms fp32 [n, 2] of parameters, from `scale_by_trust`."""

    def _peer_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Options of a saved group that torch's and bitsandbytes' optimizers of this rule need to load it."""
        return {"betas": (0.0, 0.0), "eps": 0.0, "alpha": 0.0, "t_alpha": None, "t_beta3": None}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; after `update_in_backward`, those not updated in the backward.

        Raises:
            TrainingError: a gradient is sparse, or of another shape or device than its parameter; a parameter has
                changed its shape, dtype or device so that its state does not fit it; or host memory for the state is
                not free.
        """
        loss = closure_loss(closure)
        if self.backward is not None:
            if getattr(self, "grad_scale", None) is not None:
                raise TrainingError("the backward has updated with scaled gradients", "train without a GradScaler")
            self.backward.finish()
            self._opt_called = True
            return loss
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if on_compiler():
            opaque_step(self._number, *self._traced(), self.clipping.factor, scale, found_inf)
        else:
            self.update(self.clipping.factor, scale, found_inf)
        self.clipping.factor = None
        return loss

    # torch's learning rate schedulers replace a `step` without this mark by a function that sets `_opt_called`, which
    # torch.compile refuses to trace.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _traced(self) -> StepTensors:
        """Weights and gradients as torch.compile traces them; the local shards of DTensors."""
        weights = [weight for group in self._groups for weight in group["params"]]
        gradients = [None if weight.grad is None else local_of(weight.grad) for weight in weights]
        return StepTensors([*map(local_of, weights)], gradients)

    def update(
        self, factor: Tensor | None, scale: Tensor | None, found_inf: Tensor | None, tensors: StepTensors | None = None
    ) -> None:
        """Update all parameters; see `step`.

        Args:
            factor: of gradients that `clip` has read; others are not multiplied.
            scale: by which the gradients are divided.
            found_inf: a value other than 0 leaves everything unchanged.
            tensors: weights that are updated in place and gradients; default: the parameters' own.
        """
        self._opt_called = True
        is_compiled = tensors is not None
        clipped = self.clipping.gradients
        self.clipping.gradients = None
        tensors = tensors or self.all_parameters.current_tensors()
        if clipped is None:
            factor = None  # no clip, or its gradients are multiplied already
            self.all_parameters.read(tensors)
        elif not clipped.match(tensors):
            factor, tensors = clip_unchanged(clipped, factor, tensors, is_compiled)
            self.all_parameters.read(tensors)
        if scale is not None:
            factor = scale.reciprocal() if factor is None else factor / scale
        self.all_parameters.step(factor, found_inf)
        self.all_parameters.release()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Return the 2-norm of all gradients, fp32 []; the next `step` clips them to `max_norm` as it reads them.

        Gradients that take the place of others before `step`, and gradients that are changed in place, are not clipped;
        the remaining ones are. If step hooks are registered, or other gradients come, the clipped ones are multiplied
        in place, as by torch.nn.utils.clip_grad_norm_; otherwise the gradients themselves do not change.

        Raises:
            TrainingError: as `step`, or the backward updates the parameters.
        """
        if self.backward is not None:
            raise TrainingError(
                "gradients cannot be clipped to the norm of all of them, since the backward has freed them",
                "do not call clip, or do not update in the backward",
            )
        if on_compiler():
            norm, self.clipping.factor = opaque_clip(self._number, *self._traced(), max_norm).unbind()
        else:
            norm, self.clipping.factor = self.read_norm(max_norm)
            if self._optimizer_step_pre_hooks:  # they must see clipped gradients, which they may change
                self._clip_in_place()
        return norm

    def _clip_in_place(self) -> None:
        """Multiply the gradients that `clip` has read by their factor, except gradients that have changed since."""
        clipped, factor = self.clipping.gradients, self.clipping.factor
        self.clipping.gradients = self.clipping.factor = None
        if clipped is not None and factor is not None:
            gradients = self.all_parameters.current_tensors().gradients
            multiply([gradients[number] for number in clipped.unchanged(gradients)], factor)

    def read_norm(self, max_norm: float, tensors: StepTensors | None = None) -> tuple[Tensor, Tensor | None]:
        """Read the gradients; return their norm and the factor that clips them."""
        tensors = tensors or self.all_parameters.current_tensors()
        self.all_parameters.read(tensors)
        self.clipping.gradients = ClippedGradients(tensors.gradients, self.all_parameters.addresses)
        return self.all_parameters.norm(max_norm)

    def update_in_backward(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """From here on, update each part in the backward when its gradients are complete, and free these.

        There is no clipping and no accumulation of gradients. `step` ends a step. From the first gradient with NaN or
        Inf to the end of the step no part is changed; parts updated before it keep their update. If `found_inf`, fp32
        [] on a device, is not 0 when the backward begins, nothing is changed.

        Args:
            parts: all parameters, divided in the order in which their gradients are expected.

        Raises:
            TrainingError: the parts have other parameters than the optimizer. In a backward: it is the second one
                since the last `step`.
        """
        divided = [id(weight) for parameters in parts for weight in parameters]
        if sorted(divided) != sorted(id(weight) for group in self.param_groups for weight in group["params"]):
            raise TrainingError("the parts to update in the backward are not the optimizer's parameters")
        if self.backward is not None:
            self.backward.close()
        self.backward = BackwardUpdates(self, parts)
        for group in self.param_groups:
            group["capturable"] = False

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of this step's backward, fp32 []; see `BackwardUpdates.gradient_norm`."""
        return self.backward.gradient_norm() if self.backward is not None else torch.zeros(())

    def first_broken(self) -> Tensor | None:
        """Return the first weight whose gradient in this step's backward has NaN or Inf, or None; blocks the host."""
        return None if self.backward is None else self.backward.check.first_broken()

    @torch.no_grad()
    def prepare_replay(self) -> int | None:
        """Copy changed settings to the device, before a CUDA graph replays `clip` and `step`.

        Returns:
            a number that changes when a graph captured before is not valid any more, since weights, gradients or state
            are other tensors; None: no graph can be captured, since a tensor is not contiguous.
        """
        self.all_parameters.read()
        for device in self.all_parameters.devices:
            device.upload(self)
        version = self._earlier_versions + self.all_parameters.version
        return version if self.all_parameters.in_place else None

    def storage_of(self, group: dict[str, Any], index: int) -> Storage:
        """Storage of the state of a group's parameter."""
        weight = group["params"][index]
        if group["storage"] == "weight":
            return STORAGES["bf16" if weight.dtype == torch.bfloat16 else "fp32"]
        storage = STORAGES[group["storage"]]
        small = storage.block and getattr(weight, FULL_ELEMENTS, weight.numel()) < group["min_quantized"]
        return STORAGES["fp32"] if small or index in group["fp32_state"] else storage

    def _layout(self, group: dict[str, Any], weight: Tensor, storage: Storage, elements: int) -> StateLayout:
        """Layout of the state of a parameter, whose local shard is `weight`."""
        corrects = group["rounding"] in CORRECTIONS and weight.dtype == torch.bfloat16
        return StateLayout(
            self.rule,
            storage,
            elements,
            CORRECTIONS[group["rounding"]] if corrects else None,
            torch.device("cpu") if group["offload"] else weight.device,
        )

    def state_of(self, group: dict[str, Any], index: int) -> dict[str, Any]:
        """State of a parameter; created if it has none."""
        parameter = group["params"][index]
        state: dict[str, Any] = self.state[parameter]
        weight = local_of(parameter)
        layout = self._layout(group, weight, self.storage_of(group, index), weight.numel())
        if state:
            number = next((number for number, g in enumerate(self.param_groups) if g is group), 0)
            layout.check(state, weight, parameter_name(number, index))
        else:
            state.update(layout.zeros(weight))
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in bitsandbytes' layout for groups with storage dynamic8, otherwise in torch's."""
        for windows in self._windows.values():
            windows.synchronize()
        packed = super().state_dict()
        storages = [group["storage"] for group in self.param_groups for _ in group["params"]]
        for packed_group, group in zip(packed["param_groups"], self.param_groups, strict=True):
            del packed_group["capturable"]  # torch's is False on CPUs
            packed_group.update({key: value for key, value in self._peer_options(group).items() if key not in group})
            packed_group[RULE] = self.rule
        for number, state in packed["state"].items():
            if storages[number] == "dynamic8":
                packed["state"][number] = to_bitsandbytes(self.rule, state)
            else:
                packed["state"][number] = {**state, "step": state["step"].clone()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, of torch's of the same rule, bitsandbytes' or flashoptim's.

        Storages of the saved state and of this optimizer may differ only between fp32 and bf16.

        Raises:
            CheckpointError: the state is of other parameters, another rule or another storage.
        """
        check_saved_groups(state_dict, self.param_groups)
        saved_groups = copy.deepcopy(state_dict["param_groups"])
        for group in saved_groups:
            rule = "muon" if "ns_steps" in group else group.get(RULE, self.rule)
            if rule != self.rule:
                wrong = f"the optimizer state is of rule {rule}, and the optimizer has rule {self.rule}"
                raise CheckpointError(wrong, RESUME)
            for key in ("amsgrad", "maximize", "nesterov", "centered"):
                if group.get(key) and key not in self.defaults:
                    wrong = f"the optimizer state is of an optimizer with {key}={group[key]}"
                    raise CheckpointError(wrong, f"{type(self).__name__} has no {key}: {RESUME}")
        states = {}
        for saved_group, group in zip(saved_groups, self.param_groups, strict=True):
            for index, number in enumerate(saved_group["params"]):
                if number in state_dict["state"]:
                    saved = from_bitsandbytes(self.rule, state_dict["state"][number])
                    weight = local_of(group["params"][index])
                    layout = self._layout(group, weight, *self.saved_storage(saved, group, index))
                    states[group["params"][index]] = layout.restore(saved, weight, number)
        own_keys = {"params", *COMMON}
        is_bitsandbytes = any(WRAPPED in state for state in state_dict["state"].values())
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            loaded_keys = group.keys() - own_keys
            if is_bitsandbytes and "storage" not in saved_groups[0]:  # its groups have all keys, with other meanings
                loaded_keys &= {"lr", "initial_lr", "weight_decay", "betas", "eps"}
            group.update({key: value for key, value in saved_group.items() if key in loaded_keys})
        self.state.clear()
        self.state.update(states)
        self._reset()

    def saved_storage(self, saved: dict[str, Any], group: dict[str, Any], index: int) -> tuple[Storage, int]:
        """Storage and number of elements that the saved state of a group's parameter must have."""
        return self.storage_of(group, index), local_of(group["params"][index]).numel()


def unsupported(optimizer: Optimizer, key: str, value: Any) -> ConfigError:
    """Error for a keyword of torch's optimizer that this one does not have."""
    return ConfigError(
        f"{key}: {type(optimizer).__name__} does not support {value!r}", f"remove {key}, or take torch's optimizer"
    )


class AdamW(FusedOptimizer):
    """AdamW with decoupled weight decay (arXiv:1711.05101); equals torch.optim.AdamW up to rounding."""

    rule = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ):
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers, **options)


class LAMB(AdamW):
    """LAMB (arXiv:1904.00962): AdamW whose step, weight decay included, has the norm lr·‖weight‖ for each parameter."""

    trust = "lamb"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        **options: Any,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class AdEMAMix(FusedOptimizer):
    """AdEMAMix (arXiv:2409.03137): Adam with a second, slower first moment.

    `t_alpha` and `t_beta3` are the steps over which alpha and the third beta grow to their values; None: at once.
    """

    rule = "ademamix"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ):
        schedule = {"alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers | schedule, **options)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if group["t_beta3"] and 0 in (group["betas"][0], group["betas"][2]):
            wrong = f"t_beta3: {group['t_beta3']} with betas {group['betas']}, whose half-lives are compared"
            raise ConfigError(wrong, "pass betas[0] and betas[2] above 0, or remove t_beta3")

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        schedule = {key: group[key] or 0 for key in ("t_alpha", "t_beta3")}
        return super().settings(group) | {"beta3": group["betas"][2], "alpha": group["alpha"]} | schedule


class Lion(FusedOptimizer):
    """Lion (arXiv:2302.06675): the sign of an interpolated momentum, with decoupled weight decay."""

    rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Any,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)


class SGD(FusedOptimizer):
    """SGD with momentum; equals torch.optim.SGD without dampening up to rounding."""

    rule = "momentum"

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0, **options: Any
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, **options)

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"beta1": group["momentum"]}

    def _peer_options(self, group: dict[str, Any]) -> dict[str, Any]:
        momentum = {"dampening": 0.0, "nesterov": False, "betas": (group["momentum"], 0.0)}
        return super()._peer_options(group) | momentum


class LARS(SGD):
    """LARS (arXiv:1708.03888): SGD with momentum of gradients scaled to `trust_coefficient`·‖weight‖ per parameter."""

    trust = "lars"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        **options: Any,
    ):
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super(SGD, self).__init__(params, numbers | {"trust_coefficient": trust_coefficient}, **options)

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return super().settings(group) | {"alpha": group["trust_coefficient"]}


class RMSprop(FusedOptimizer):
    """RMSprop with smoothing constant `alpha`; equals torch.optim.RMSprop without momentum up to rounding."""

    rule = "rmsprop"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ):
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}, **options)

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"beta1": group["alpha"], "eps": group["eps"]}

    def _peer_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return super()._peer_options(group) | {"momentum": 0.0, "centered": False, "betas": (group["alpha"], 0.0)}


class Adagrad(FusedOptimizer):
    """Adagrad; equals torch.optim.Adagrad without a decay of the learning rate up to rounding."""

    rule = "adagrad"

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, **options: Any
    ):
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, **options)

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"eps": group["eps"]}

    def _peer_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return super()._peer_options(group) | {"lr_decay": 0.0, "initial_accumulator_value": 0.0}
