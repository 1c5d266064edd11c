"""bitsandbytes' base classes of optimizers and its manager of overrides, over `optim.fused`.

State, arguments and state dicts are bitsandbytes'; the step is halfbyte's: all parameters in two launches, on the
current stream, without blocking. Weight decay is applied before the update, as in torch; bitsandbytes applies it after.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...formats.codebooks import dynamic_map
from ...ops.optimizer import RULES, TRUSTS
from ...ops.optimizer_state import STORAGES, Storage
from ...optim.fused import FusedOptimizer
from ...optim.launches import DeviceParameters, ParameterSet
from ...optim.state_dicts import CORRECTION, WRAPPED, to_bitsandbytes
from ...utils.errors import TrainingError
from ..updates import RULE_OF

# Options of a parameter: NUMBERS come from its group, ARGS from the optimizer's `args`.
NUMBERS = ("betas", "eps", "weight_decay", "lr", "alpha", "t_alpha", "t_beta3")
ARGS = ("optim_bits", "min_8bit_size", "max_unorm", "skip_zeros")
TENSORS = ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2")  # bitsandbytes' names in a parameter's state


class MockArgs(SimpleNamespace):
    """Options as attributes; made from a mapping."""

    def __init__(self, initial_data: dict[str, Any]):
        super().__init__(**initial_data)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (vars(self),)


class GlobalOptimManager:
    """Overrides of options for single parameters: `override_config(module.weight, "optim_bits", 32)`.

    Options are `NUMBERS` and `ARGS`. Numbers act from the next step on; `optim_bits` and `min_8bit_size` act where a
    parameter has no state yet.
    """

    _instance: ClassVar[GlobalOptimManager | None] = None

    def __init__(self) -> None:
        raise RuntimeError("Call get_instance() instead")

    def initialize(self) -> None:
        """Forget all overrides."""
        self.pid2config: dict[int, dict[str, Any]] = {}
        self.index2config: dict[tuple[int, int], dict[str, Any]] = {}
        self.module_weight_config_triple: list[tuple[nn.Module, str, dict[str, Any]]] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}  # the parameter of each number, which another may get later

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        """Return the manager of this process."""
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.initialize()
        return cls._instance

    def register_parameters(self, params: Iterable[Any]) -> None:
        """Remember the places of parameters, or of groups of them, so that overrides survive a move to a device."""
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for number, group in enumerate(groups):
            for index, parameter in enumerate(group["params"]):
                if (config := self.config_of(parameter)) is not None:
                    self.index2config[number, index] = config
                self._remember(parameter)
                self._places[id(parameter)] = number, index

    def override_config(
        self,
        parameters: Any,
        key: str | None = None,
        value: Any = None,
        key_value_dict: dict[str, Any] | None = None,
    ) -> None:
        """Override options of one parameter or several.

        Raises:
            ValueError: there is no such option, or its value is out of range.
            NotImplementedError: `skip_zeros`.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        options = check_options(dict(key_value_dict or {}) | ({} if key is None or value is None else {key: value}))
        for parameter in chosen:
            self._remember(parameter)
            config = self.pid2config.setdefault(id(parameter), {})
            config.update(options)
            if id(parameter) in self._places:
                self.index2config[self._places[id(parameter)]] = config

    def _remember(self, parameter: Tensor) -> None:
        """Hold a weak reference to `parameter`, and drop the overrides of a freed tensor with the same `id`."""
        reference = self._alive.get(id(parameter))
        if reference is None or reference() is not parameter:
            self._alive[id(parameter)] = weakref.ref(parameter)
            self.pid2config.pop(id(parameter), None)
            self._places.pop(id(parameter), None)

    def config_of(self, parameter: Tensor) -> dict[str, Any] | None:
        """Return the overrides of this very tensor, or None."""
        reference = self._alive.get(id(parameter))
        return self.pid2config.get(id(parameter)) if reference is not None and reference() is parameter else None

    def register_module_override(self, module: nn.Module, param_name: str, config: dict[str, Any]) -> None:
        """Override options of a module's parameter, which need not be the final one yet.

        Raises: as `override_config`.
        """
        self.module_weight_config_triple.append((module, param_name, check_options(config)))

    def overrides(self, groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the overrides of the parameters in these groups, by id.

        If several name one parameter, an override of the tensor wins over one of its module, and this over one of its
        place in the groups.
        """
        if not (self.pid2config or self.index2config or self.module_weight_config_triple):
            return {}
        by_module: dict[int, dict[str, Any]] = {}
        for module, name, config in self.module_weight_config_triple:
            by_module.setdefault(id(getattr(module, name, None)), {}).update(config)
        merged = {}
        for number, group in enumerate(groups):
            for index, weight in enumerate(group["params"]):
                by_place, of_module = self.index2config.get((number, index)), by_module.get(id(weight))
                of_weight = self.config_of(weight)
                if by_place or of_module or of_weight:
                    merged[id(weight)] = {**(by_place or {}), **(of_module or {}), **(of_weight or {})}
        return merged


class _State(dict[str, Any]):
    """State of a parameter that also answers bitsandbytes' names: state1, qmap1, absmax1, …

    These are on the parameter's device: copies, if the state is in host memory.
    """

    def __init__(self, rule: str, device: torch.device, values: dict[str, Any] | None = None):
        super().__init__(values or {})
        self.rule, self.device = rule, device

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key) or key not in TENSORS:
            return super().__contains__(key)
        names = RULES[self.rule].states
        quantized = super().__contains__(f"{names[0]}::quantized")
        has_kind = quantized or (str(key).startswith("state") and super().__contains__(names[0]))
        return has_kind and int(str(key)[-1]) <= len(names)

    def __missing__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a stream may be copying the state to the host
        return _stacked(self.rule, to_bitsandbytes(self.rule, self)[WRAPPED])[key].to(self.device)


def _added(rule: str, state: dict[str, Any]) -> dict[str, Any]:
    """Entries of a parameter's state that a subclass has added."""
    keys = ("step", "unorm_vec", WRAPPED, CORRECTION, *TENSORS)
    names = RULES[rule].states
    return {key: value for key, value in state.items() if key not in keys and key.partition("::")[0] not in names}


def _codes(rule: str, state: dict[str, Any]) -> Tensor | None:
    """The first state of a parameter, or its codes; None before the state is created."""
    name = RULES[rule].states[0]
    return state.get(name, state.get(f"{name}::quantized"))


def _stacked(rule: str, wrapped: dict[str, Any]) -> dict[str, Any]:
    """bitsandbytes' tensors of a parameter; AdEMAMix's two first moments are stacked."""
    if rule != "ademamix":
        return wrapped
    tensors = {"state1": torch.stack([wrapped["state1"], wrapped["state2"]]), "state2": wrapped["state3"]}
    if "absmax1" in wrapped:
        tensors |= {"absmax1": torch.stack([wrapped["absmax1"], wrapped["absmax2"]]), "absmax2": wrapped["absmax3"]}
        tensors |= {"qmap1": wrapped["qmap1"], "qmap2": wrapped["qmap3"]}
    return tensors


def _with_fixed(init: Callable[..., None], fixed: dict[str, Any]) -> Callable[..., None]:
    """Return `init` with these arguments fixed, and `optim_bits`, if it is one of them, removed from its signature."""
    signature = inspect.signature(init)
    dropped = fixed.keys() & {"optim_bits"}
    signature = signature.replace(parameters=[p for name, p in signature.parameters.items() if name not in dropped])

    @functools.wraps(init)
    def fixed_init(*arguments: Any, **options: Any) -> None:
        init(**signature.bind(*arguments, **options).arguments | fixed)

    fixed_init.__signature__ = signature  # type: ignore[attr-defined]
    return fixed_init


class Optimizer8bit(FusedOptimizer):
    """Base of bitsandbytes' optimizers. Use one of the classes that name a rule.

    Args:
        params: parameters or groups of them.
        defaults: options of groups.
        optim_bits: 8 or 32, of the state.
        is_paged: whether the state is in pinned host memory and streamed; ignored for parameters on a CPU.
    """

    def __init_subclass__(cls, bits: int | None = None, paged: bool = False, **options: Any) -> None:
        """Fix the state of a subclass: with `bits` it has no argument `optim_bits`, `paged` sets `is_paged`."""
        super().__init_subclass__(**options)
        if bits is not None or paged:
            fixed = ({} if bits is None else {"optim_bits": bits}) | ({"is_paged": True} if paged else {})
            cls.__init__ = _with_fixed(cls.__init__, fixed)  # type: ignore[method-assign]

    def __init__(self, params: Any, defaults: dict[str, Any], optim_bits: int = 32, is_paged: bool = False):
        self.is_paged, self.optim_bits = is_paged, optim_bits
        self.mng = GlobalOptimManager.get_instance()
        self._overrides: dict[int, dict[str, Any]] = {}  # by the id of the parameter, as `_limits`
        self._limits: dict[int, float] = {}
        if not hasattr(self, "rule"):
            self.rule = "adamw"  # type: ignore[misc]
        params = list(params)
        first = params[0]["params"] if params and isinstance(params[0], dict) else params
        tensors = [first] if isinstance(first, Tensor) else list(first)
        on_gpu = bool(tensors) and tensors[0].device.type != "cpu"
        super().__init__(params, defaults | {"offload": is_paged and on_gpu})

    def __getstate__(self) -> dict[str, Any]:
        attributes = ("is_paged", "optim_bits", "rule", "trust", "args", "optimizer_name")
        return {**super().__getstate__(), **{key: value for key, value in vars(self).items() if key in attributes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.mng = GlobalOptimManager.get_instance()
        self._overrides = {}
        self._limits = {}
        self.initialized = False
        super().__setstate__(state)

    @property
    def name2qmap(self) -> dict[str, Tensor]:
        """The maps of signed ("dynamic") and unsigned ("udynamic") states."""
        return {"dynamic": dynamic_map(signed=True), "udynamic": dynamic_map(signed=False)}

    def check_overrides(self) -> None:
        """Read the overrides of the manager, for the launches of the next step.

        Raises:
            NotImplementedError: `max_unorm` does not limit this optimizer, or its state is paged.
        """
        overrides = self.mng.overrides(self.param_groups)
        if self.initialized and overrides == self._overrides:
            return
        for config in overrides.values():
            check_betas(self.rule, config.get("betas", self.defaults["betas"]))
        self._overrides = overrides
        self.trust = self._trust()  # type: ignore[misc]
        self._reset()
        self.initialized = True

    def _trust(self) -> str | None:
        """Return "clip" if the norm of a parameter's update is limited, or None."""
        indices = [(group, index) for group in self.param_groups for index in range(len(group["params"]))]
        self._limits = {id(group["params"][index]): self._limit(group, index) for group, index in indices}
        if not any(self._limits.values()):
            return None
        if self.rule not in TRUSTS["clip"].rules:
            raise NotImplementedError(
                f"max_unorm does not limit {self.optimizer_name}: pass 0, or use adam, momentum, lamb or lars"
            )
        if any(group["offload"] for group in self.param_groups):
            raise NotImplementedError("max_unorm does not limit a paged optimizer: pass 0, or is_paged=False")
        return "clip"

    def _limit(self, group: dict[str, Any], index: int) -> float:
        """Return the `max_unorm` of a parameter; 0: none, as with 8-bit state."""
        max_norm: float = self._config(group, group["params"][index])["max_unorm"]
        return max_norm if max_norm > 0 and not self.storage_of(group, index).block else 0.0

    def _config(self, group: dict[str, Any], weight: Tensor) -> dict[str, Any]:
        config = {key: group[key] for key in NUMBERS} | {key: getattr(self.args, key) for key in ARGS}
        return config | self._overrides.get(id(weight), {})

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a parameter: its group's, the optimizer's and its overrides."""
        self.check_overrides()
        return self._config(group, group["params"][pindex])

    def options_of(self, number: int, index: int) -> dict[str, Any] | None:
        group = self.param_groups[number]
        weight = group["params"][index]
        limit = self._limits[id(weight)] if self.trust == "clip" else self.args.max_unorm
        if id(weight) not in self._overrides and limit == self.args.max_unorm:
            return None
        return group | self._config(group, weight) | {"max_unorm": limit}

    def update_in_backward(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self.check_overrides()
        super().update_in_backward(parts)

    def update(self, *arguments: Any) -> None:
        self.check_overrides()
        super().update(*arguments)

    def read_norm(self, *arguments: Any) -> Any:
        self.check_overrides()
        return super().read_norm(*arguments)

    def prepare_replay(self) -> int | None:
        self.check_overrides()
        return super().prepare_replay()

    def storage_of(self, group: dict[str, Any], index: int) -> Storage:
        weight = group["params"][index]
        if (codes := _codes(self.rule, self.state.get(weight, {}))) is not None:
            return STORAGES["dynamic8" if codes.dtype == torch.uint8 else "fp32"]
        config = self._config(group, weight)
        is_small = weight.numel() < config["min_8bit_size"]
        return STORAGES["fp32" if config["optim_bits"] == 32 or is_small else "dynamic8"]

    def _reset(self) -> None:
        super()._reset()
        self.initialized = False  # whether `check_overrides` has read the overrides of these parameters
        self._single: dict[int, ParameterSet] = {}  # by the id of the parameter

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Create the state of a parameter for its current size; entries that a subclass has added are kept."""
        self.check_overrides()
        added = _added(self.rule, self.state[p])
        self._single.pop(id(p), None)
        self.state[p] = {}
        self.state_of(group, pindex).update(added)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter, for subclasses whose `step` changes weights and gradients one by one (Q-GaLore).

        `step` of this class updates all parameters at once.

        Raises:
            TrainingError: the state is of another size, or the gradient of another shape or device.
        """
        self.check_overrides()
        codes = _codes(self.rule, self.state[p])
        if codes is None or codes.numel() != p.numel():
            elements = 0 if codes is None else codes.numel()
            raise TrainingError(
                f"a parameter of {p.numel()} elements has a state of {elements}", "call init_state for its current size"
            )
        single = self._single.setdefault(id(p), ParameterSet(self, {id(p)}))
        single.read()
        single.step(None, None)
        single.release()

    def saved_storage(self, saved: dict[str, Any], group: dict[str, Any], index: int) -> tuple[Storage, int]:
        """Return the layout of the saved state, as bitsandbytes reads it.

        Its size must be the parameter's, except for a subclass with a `step` of its own (Q-GaLore).
        """
        codes = _codes(self.rule, saved)
        if codes is None:
            return super().saved_storage(saved, group, index)
        steps_itself = inspect.unwrap(type(self).step) is not inspect.unwrap(Optimizer8bit.step)
        elements = codes.numel() if steps_itself else group["params"][index].numel()
        return STORAGES["dynamic8" if codes.dtype == torch.uint8 else "fp32"], elements

    def prefetch_state(self, p: Tensor) -> None:
        """Do nothing: `update_step` copies a paged state to the device."""

    def state_of(self, group: dict[str, Any], index: int) -> dict[str, Any]:
        weight = group["params"][index]
        if not isinstance(self.state[weight], _State):
            self.state[weight] = _State(self.rule, weight.device, self.state[weight])
        state = super().state_of(group, index)
        if self._config(group, weight)["max_unorm"] > 0:
            state.setdefault("unorm_vec", torch.zeros(1, device=weight.device))
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state in bitsandbytes' layout."""
        packed = super().state_dict()
        for number, state in packed["state"].items():
            saved = state if WRAPPED in state else to_bitsandbytes(self.rule, state)
            packed["state"][number] = saved | _added(self.rule, state) | {WRAPPED: _stacked(self.rule, saved[WRAPPED])}
        for number, weight in enumerate(self._weights()):
            if "unorm_vec" in self.state.get(weight, {}):
                packed["state"][number][WRAPPED]["unorm_vec"] = self.state[weight]["unorm_vec"]
        return packed

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, weight in zip(numbers, self._weights(), strict=True):
            if weight in self.state:
                saved = state_dict["state"][number]
                self.state[weight] = _State(self.rule, weight.device, self.state[weight] | _added(self.rule, saved))
                norm = saved.get(WRAPPED, {}).get("unorm_vec")
                if norm is not None:
                    self.state[weight]["unorm_vec"] = norm.to(weight.device)

    def to_gpu(self) -> None:
        """Nothing: state is created where its parameter is."""

    def on_squared_norms(self, parameters: DeviceParameters, squares: Tensor) -> None:
        for state, row in zip(parameters.states, squares, strict=True):
            if "unorm_vec" in state:
                state["unorm_vec"] = row[1:]

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        betas = group["betas"]
        numbers = {"beta1": betas[0], "beta2": betas[1], "eps": group["eps"]}
        if self.rule == "ademamix":
            schedule = {key: group[key] or 0 for key in ("t_alpha", "t_beta3")}
            numbers |= {"beta3": betas[2], "alpha": group["alpha"]} | schedule
        if self.trust == "clip":
            numbers["alpha"] = group.get("max_unorm", self.args.max_unorm) or math.inf
        return numbers

    def _peer_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {}

    args: Any
    optimizer_name: str


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of groups or parameters, `betas` as a tuple.

    Raises:
        ValueError: there is no such option, or its value is out of range.
        NotImplementedError: `skip_zeros`, or `optim_bits` other than 8 and 32.
    """
    if unknown := options.keys() - {*NUMBERS, *ARGS}:
        raise ValueError(f"there is no option {min(unknown)!r}: use one of {', '.join((*NUMBERS, *ARGS))}")
    for key in ("lr", "eps", "weight_decay", "max_unorm", "min_8bit_size"):
        if not options.get(key, 0) >= 0:
            raise ValueError(f"{key} is {options[key]}: pass a number from 0")
    if options.get("optim_bits", 32) not in (8, 32):
        raise NotImplementedError(f"optim_bits is {options['optim_bits']}: pass 8 or 32")
    if options.get("skip_zeros"):
        raise NotImplementedError("skip_zeros is not supported: zero gradients update the state. Leave it out")
    betas = options.get("betas", ())
    if isinstance(betas, str):
        betas = [float(number_text) for number_text in betas.strip("()[] ").split(",")]
    for number, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{number}] is {beta}: pass a number from 0 to below 1")
    return options | ({"betas": tuple(betas)} if "betas" in options else {})


def refuse(optimizer: str, **options: bool) -> None:
    """Raise a ValueError that names an option which is set, and which bitsandbytes' optimizer accepts and ignores."""
    for name, is_set in options.items():
        if is_set:
            raise ValueError(f"{optimizer} does not support this value of {name}: leave it at its default")


def check_betas(rule: str, betas: tuple[float, ...]) -> None:
    """Raise a ValueError unless a rule has this number of betas."""
    count = 3 if rule == "ademamix" else 2
    if len(betas) != count:
        raise ValueError(f"betas are {betas}: pass {count} numbers")


class Optimizer2State(Optimizer8bit):
    """Base of Adam, AdamW, AdEMAMix and LAMB; arguments as in bitsandbytes."""

    def __init__(
        self,
        optimizer_name: str,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        max_unorm: float = 0.0,
        skip_zeros: bool = False,
        is_paged: bool = False,
        alpha: float = 0.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
    ):
        defaults = check_options({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        common = {"optim_bits": optim_bits, "min_8bit_size": min_8bit_size, "max_unorm": max_unorm}
        self.args = args if args is not None else MockArgs(common | {"skip_zeros": skip_zeros})
        check_options({key: getattr(self.args, key) for key in ARGS})
        self.optimizer_name = optimizer_name
        self.rule = RULE_OF[optimizer_name]  # type: ignore[misc]
        defaults |= {"alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}
        super().__init__(params, defaults, optim_bits, is_paged)


class Optimizer1State(Optimizer2State):
    """Base of Lion, SGD, RMSprop, Adagrad and LARS; arguments as in bitsandbytes."""

    def __init__(
        self,
        optimizer_name: str,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.0),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        max_unorm: float = 0.0,
        skip_zeros: bool = False,
        is_paged: bool = False,
    ):
        super().__init__(
            optimizer_name, params, lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size, max_unorm,
            skip_zeros, is_paged,
        )  # fmt: skip
