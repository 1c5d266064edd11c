"""Muon: matrices step along their orthogonalized momentum, all other parameters by AdamW.

With the momentum M of a matrix, the update is the polar factor U·Vᵀ of M = U·S·Vᵀ, approximated by a few iterations
X ← aX + (bA + cA²)X with A = XXᵀ, which need only matmuls. Matrices of one shape are iterated as one batch.

An iteration takes 4m²n + 2m³ FLOPs for an m×n matrix (m ≤ n). Tall matrices are multiplied from the right, without a
transposition. A and A² are symmetric, so that m²n + m³ of the FLOPs are redundant (`ops.muon.symmetric_product`).

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/) for Muon and its coefficients; Liu et al. 2025
(arXiv:2502.16982, section 2.2) for the scale `match_rms_adamw`; Amsel et al. 2025 (arXiv:2505.16932, algorithm 1) for
Polar Express; Gupta et al. 2025 (arXiv:2509.23106) for the momentum in 8 bits.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..adapter_kinds import LORA_B, LORA_EMBEDDING
from ..ops.muon import BLOCK, apply_directions, directions, symmetric_product
from ..ops.optimizer import Parameters
from ..utils.errors import CheckpointError, ModelError, TrainingError
from .groups import embedding_weights, trained_parameters
from .parameters import check_gradient, check_unique, closure_loss, parameter_name
from .state_dicts import check_saved_groups

Method = Literal["newton_schulz", "polar_express"]
Coefficients = tuple[float, float, float]

NEWTON_SCHULZ: Coefficients = (3.4445, -4.7750, 2.0315)
# Polar Express diverges from singular values above 1, which bf16 may round to: all polynomials but the last, which is
# repeated, are of x / SAFETY.
SAFETY = 1.01
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
BATCH_ELEMENTS = 2**25  # most elements of matrices that a CPU iterates together: 128 MiB per fp32 temporary
ACCELERATED = 4  # times `BATCH_ELEMENTS` on an accelerator, in bf16: few matrices would not occupy all of it
FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)  # unlike the others, it reads `found_inf` on the device
OWN_OPTIONS = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "method", "momentum_bits")

# Matrices that Muon leaves to AdamW besides nn.Embedding: heads, whose rows are tokens or labels, and adapters on them
OUTER = re.compile(rf"(?:^|\.)(?:lm_head|embed_out|output_embeddings|score|classifier)\.|{LORA_EMBEDDING}")
FUSED = re.compile(rf"(?:^|\.)(qkv_proj|gate_up_proj)(?:\.base_layer)?(?:\.{LORA_B}\.\w+)?(?:\.weight)?$")


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of the iteration: bf16 on an accelerator; on a CPU fp32, or fp64 for fp64 input."""
    return torch.bfloat16 if tensor.device.type != "cpu" else torch.promote_types(tensor.dtype, torch.float32)


def orthogonalize(
    matrices: Tensor,
    method: Method = "newton_schulz",
    steps: int = 5,
    coefficients: Coefficients = NEWTON_SCHULZ,
    eps: float = 1e-7,
) -> Tensor:
    """Approximate the polar factors of matrices by odd quintic polynomials.

    Newton-Schulz with Muon's coefficients does not converge: 5 steps map singular values from 0.003 to 1 of the
    Frobenius norm to 0.68 … 1.20. Polar Express has other coefficients in each step and converges: 5 steps map them to
    0.87 … 1.12, and 7 to within 5e-6 of 1.

    Args:
        matrices: [B, m, n], float.
        method: which polynomials.
        steps: number of polynomials.
        coefficients: a, b, c of the polynomial of "newton_schulz"; "polar_express" has its own.
        eps: smallest norm that a matrix is divided by.

    Returns:
        [B, m, n] in `product_dtype`.
    """
    exact = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=exact)
    norm = norm.clamp(min=eps) * (SAFETY if method == "polar_express" else 1.0)
    x = torch.empty(matrices.shape, dtype=product_dtype(matrices), device=matrices.device)
    torch.div(matrices, norm, out=x)
    tall = x.shape[1] > x.shape[2]
    for a, b, c in _polynomials(method, steps, coefficients):
        square = symmetric_product(x.mT if tall else x)
        square = symmetric_product(square, square, b, c)
        x = torch.baddbmm(x, x, square, beta=a) if tall else torch.baddbmm(x, square, x, beta=a)
    return x


def _polynomials(method: Method, steps: int, coefficients: Coefficients) -> list[Coefficients]:
    """Return the coefficients of each step's polynomial; see `orthogonalize`."""
    if method == "newton_schulz":
        return [coefficients] * steps
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]]
    return [*safe, *repeat(POLAR_EXPRESS[-1], steps)][:steps]


class Muon(torch.optim.Optimizer):
    """Muon for matrices and stacks of matrices, and another optimizer for all other parameters, in one `step()`.

    A parameter group may have the key `use_muon`: false for embeddings and heads, whose gradients are sparse rows.
    Without that key, Muon steps the group's matrices [m, n] and stacks [E, m, n], and the other optimizer the rest.
    `param_groups`, the state and the state dict have the groups of both, each with its own learning rate. State dicts
    of torch.optim.Muon load for 32-bit momentum.

    The step follows torch.amp.GradScaler's protocol for optimizers that unscale: attributes `grad_scale`, which
    divides the gradients, and `found_inf`, which leaves weights and state unchanged where it is 1, both on the device.
    The host reads none of them. The update is that of torch.optim.Muon with its options, with three differences: a CPU
    iterates in fp32, momentum is at least fp32, and the scale is `match_rms_adamw` by default.

    Args:
        params: parameters, or groups of these.
        lr: learning rate, a float or a 1-element tensor.
        weight_decay: decoupled weight decay, also of the other parameters.
        momentum: weight of the running mean of gradients.
        nesterov: orthogonalize the mean of momentum and gradient.
        ns_coefficients, eps, ns_steps: see `orthogonalize`.
        adjust_lr_fn: factor of an m×n update: "match_rms_adamw" (0.2·√max(m, n), so that learning rates of AdamW fit)
            or "original" (√max(1, m/n)).
        method: polynomials of the orthogonalization.
        momentum_bits: 32 (fp32), or 8 (`quantize_momentum`).
        splits: parameter → sizes along the rows of its matrices (q, k and v; gate and up), which are orthogonalized
            separately.
        auxiliary: constructor of the optimizer of the other parameters, from a list of groups. Its state dict must have
            torch's layout. `found_inf` reaches it; if it does not support that, GradScaler checks on the host.
        capturable: whether a CUDA graph may capture the step; sets the key of that name in the groups.

    Raises:
        ModelError: an unknown option, a parameter that is complex or, with `use_muon`, no matrix, or `splits` that do
            not add up to the rows.
        ConfigError: a parameter is in two places.
        TrainingError: in `step`, a gradient is sparse, or a gradient or momentum does not fit its parameter. Then no
            parameter has changed.
    """

    auxiliary: torch.optim.Optimizer | None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = NEWTON_SCHULZ,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        *,
        method: Method = "newton_schulz",
        momentum_bits: Literal[8, 32] = 32,
        splits: Mapping[Tensor, Sequence[int]] | None = None,
        auxiliary: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = FUSED_ADAMW,
        capturable: bool = False,
    ):
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "method": method}
        defaults |= {"adjust_lr_fn": adjust_lr_fn, "momentum_bits": momentum_bits, "capturable": capturable}
        self._splits = {parameter: list(sizes) for parameter, sizes in (splits or {}).items()}
        self._make_auxiliary, self.auxiliary = auxiliary, None
        self._held: dict[tuple[Any, ...], tuple[Parameters, list[int]]] = {}  # of the last step, with addresses
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        super().__init__(groups, {**defaults, "use_muon": True})
        self._step_supports_amp_scaling = True
        if self.auxiliary is not None:
            self._step_supports_amp_scaling = getattr(self.auxiliary, "_step_supports_amp_scaling", False)

    def __getstate__(self) -> dict[str, Any]:
        names = ("auxiliary", "_make_auxiliary", "_splits", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{key: vars(self)[key] for key in names}, "_held": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, or one for Muon and one for the rest; see the class."""
        members = param_group["params"]
        parameters = [members] if isinstance(members, Tensor) else list(members)
        check_unique(self.param_groups, parameters)
        if "use_muon" in param_group:
            routes = [(bool(param_group["use_muon"]), parameters)]
        else:
            matrices = [parameter for parameter in parameters if parameter.dim() in (2, 3)]
            vectors = [parameter for parameter in parameters if parameter.dim() not in (2, 3)]
            routes = [(True, matrices), (False, vectors)] if vectors else [(True, matrices)]
        for use_muon, chosen in routes:
            group = {**param_group, "params": chosen, "use_muon": use_muon}
            if use_muon:
                _check_options({**self.defaults, **group})
                for parameter in chosen:
                    self._check_parameter(parameter)
                super().add_param_group(group)
                continue
            shared = {key: self.defaults[key] for key in ("lr", "weight_decay")}
            shared |= {"capturable": True} if self.defaults["capturable"] else {}
            group = {**shared, **{key: value for key, value in group.items() if key not in OWN_OPTIONS}}
            if self.auxiliary is None:
                self.auxiliary = self._make_auxiliary([group])
                self.state.update(self.auxiliary.state)
                self.auxiliary.state = self.state
            else:
                self.auxiliary.add_param_group(group)
            self.param_groups.append(self.auxiliary.param_groups[-1])

    def _check_parameter(self, parameter: Tensor) -> None:
        if parameter.dim() not in (2, 3) or parameter.is_complex():
            raise ModelError(
                f"Muon: a parameter of shape {list(parameter.shape)} and dtype {parameter.dtype} is no real matrix",
                "set use_muon: false in its group",
            )
        sizes = self._splits.get(parameter)
        if sizes is not None and (sum(sizes) != parameter.shape[-2] or min(sizes, default=0) < 1):
            raise ModelError(f"Muon: splits {sizes} do not add up to the rows of a parameter {list(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the result of `closure`, if any."""
        loss = closure_loss(closure)
        scaling = {key: getattr(self, key, None) for key in ("found_inf", "grad_scale")}
        for number, group in enumerate(self.param_groups):  # before anything changes
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                name = parameter_name(number, index)
                check_gradient(parameter, parameter.grad, name)
                momentum = self.state.get(parameter, {}).get("momentum_buffer") if group["use_muon"] else None
                if momentum is not None and (momentum.shape, momentum.device) != (parameter.shape, parameter.device):
                    raise TrainingError(
                        f"{name} is now {[*parameter.shape]} on {parameter.device}, and its momentum"
                        f" {[*momentum.shape]} on {momentum.device}",
                        "change parameters before the first step, or make a new optimizer",
                    )
        last, self._held = self._held, {}
        for group, weights in self._batches():
            parameters = self._parameters(group, weights, last)
            self._step_batch(group, parameters, **scaling)
            parameters.gradients = []  # so that zero_grad frees them
        if self.auxiliary is not None:  # it has `found_inf` and `grad_scale` as attributes meanwhile
            attributes = {key: value for key, value in scaling.items() if value is not None}
            vars(self.auxiliary).update(attributes)
            try:
                self.auxiliary.step()
            finally:
                for key in attributes:
                    delattr(self.auxiliary, key)
        return loss

    def _batches(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Yield groups with parameters that are computed together: of one shape, dtype, device and split."""
        for group in self.param_groups:
            if not group["use_muon"]:
                continue
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                sizes = tuple(self._splits.get(parameter, ()))
                dtypes = parameter.dtype, parameter.grad.dtype, parameter.device
                by_shape[(parameter.shape, *dtypes, sizes)].append(parameter)
            for (shape, *_), weights in by_shape.items():
                limit = BATCH_ELEMENTS * (1 if weights[0].device.type == "cpu" else ACCELERATED)
                batches = -(-len(weights) // max(limit // shape.numel(), 1))
                count = -(-len(weights) // batches)
                yield from ((group, weights[at : at + count]) for at in range(0, len(weights), count))

    def _parameters(
        self, group: dict[str, Any], weights: list[Tensor], last: dict[tuple[Any, ...], tuple[Parameters, list[int]]]
    ) -> Parameters:
        """Return the launch of these weights: the last step's, if weights and momenta are the same tensors.

        Kernels read addresses from a table on the device, which is copied again only for another version.
        """
        momenta = [self._momentum(group, weight) for weight in weights]
        gradients = [weight.grad for weight in weights]
        key = weights[0].dtype, *map(id, weights), *(id(codes) for codes, _ in momenta)
        addresses = [*map(Tensor.data_ptr, weights), *map(Tensor.data_ptr, gradients)]  # type: ignore[arg-type]
        if key in last:
            parameters, last_addresses = last[key]
            parameters.version += addresses != last_addresses
        else:
            rows = torch.arange(len(weights), dtype=torch.int32)
            storage = f"{group['momentum_bits']} bits"
            states = [[momentum] for momentum in momenta]
            parameters = Parameters("muon", storage, "nearest", rows, weights, [], states)
        parameters.gradients = gradients  # type: ignore[assignment]
        self._held[key] = parameters, addresses
        return parameters

    def _momentum(self, group: dict[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the stored momentum of a parameter, which the first call creates, and its scales with 8 bits."""
        state, in_8_bits = self.state[parameter], group["momentum_bits"] == 8
        if not state:
            exact = torch.promote_types(parameter.dtype, torch.float32)
            state["momentum_buffer"] = torch.zeros(
                parameter.shape, dtype=torch.int8 if in_8_bits else exact, device=parameter.device
            )
            if in_8_bits:
                blocks = -(-parameter.numel() // BLOCK)
                state["momentum_scale"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state["momentum_buffer"], state.get("momentum_scale")

    def _step_batch(
        self, group: dict[str, Any], parameters: Parameters, found_inf: Tensor | None, grad_scale: Tensor | None
    ) -> None:
        """Step matrices of one shape: momenta, orthogonalization, weights."""
        weights = parameters.weights
        device, exact = weights[0].device, torch.promote_types(weights[0].dtype, torch.float32)
        grad_scale, found_inf = (t if t is None else t.to(device, non_blocking=True) for t in (grad_scale, found_inf))
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(device, exact, non_blocking=True)
        else:
            lr = torch.full((), lr, dtype=exact, device=device)
        update = torch.empty(len(weights), *weights[0].shape, dtype=product_dtype(weights[0]), device=device)
        directions(update, parameters, group["momentum"], group["nesterov"], grad_scale, found_inf)
        update, scale = self._orthogonal(group, weights[0], update)
        apply_directions(update, parameters, lr, group["weight_decay"], scale, found_inf)

    def _orthogonal(self, group: dict[str, Any], weight: Tensor, update: Tensor) -> tuple[Tensor, float]:
        """Orthogonalize updates [n, *] of weights like `weight`; the parts of a split separately.

        Returns:
            The result, contiguous, and the factor of the learning rate. `update` may be overwritten.
        """
        options = {key: group[key] for key in ("method", "eps")}
        options |= {"steps": group["ns_steps"], "coefficients": group["ns_coefficients"]}
        matrices = update.flatten(0, -3)
        sizes = self._splits.get(weight, [matrices.shape[1]])
        scales = {size: _scale(group["adjust_lr_fn"], size, matrices.shape[2]) for size in sizes}
        largest = max(scales.values())
        if len(sizes) == 1:
            return orthogonalize(matrices, **options).view(update.shape), largest
        split = matrices.split(sizes, dim=1)
        for size, scale in scales.items():
            same = [matrix for matrix in split if matrix.shape[1] == size]
            orthogonal = orthogonalize(torch.cat(same), **options) * (scale / largest)
            torch._foreach_copy_(same, orthogonal.split(len(matrices)))
        return update, largest

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of an optimizer with the same groups, of this class or torch.optim.Muon.

        Raises:
            CheckpointError: its groups, the bits or blocks of its momentum or their shapes differ from this
                optimizer's, or it is of another rule.
        """
        check_saved_groups(state_dict, self.param_groups)
        saved_groups = copy.deepcopy(state_dict["param_groups"])
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        auxiliary: dict[str, Any] = {"state": {}, "param_groups": []}
        loaded = []
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            options = {**group, **saved, "params": group["params"], "use_muon": group["use_muon"]}
            loaded.append(options)
            pairs = [(p, n) for p, n in zip(group["params"], saved["params"], strict=True) if n in state_dict["state"]]
            if group["use_muon"]:
                bits = saved.get("momentum_bits", 32)
                if "momentum" not in saved or bits != group["momentum_bits"]:
                    origin = f"Muon's with {bits}-bit momentum" if "momentum" in saved else "not Muon's"
                    raise CheckpointError(
                        f"the optimizer state is {origin}, and the optimizer has {group['momentum_bits']}-bit momentum",
                        "resume with the optimizer of the checkpoint",
                    )
                state.update((p, _load_momentum(group, p, state_dict["state"][number])) for p, number in pairs)
            else:
                auxiliary["state"].update((number, state_dict["state"][number]) for _, number in pairs)
                auxiliary["param_groups"].append({**options, "params": saved["params"]})
        if self.auxiliary is not None:
            held, self.auxiliary.state = self.auxiliary.state, defaultdict(dict)
            try:
                self.auxiliary.load_state_dict(auxiliary)
            except BaseException:
                self.auxiliary.state = held
                raise
            state.update(self.auxiliary.state)
            auxiliary_groups = iter(self.auxiliary.param_groups)
            loaded = [group if group["use_muon"] else next(auxiliary_groups) for group in loaded]
            self.auxiliary.state = state
        self.state, self.param_groups = state, loaded


def _check_options(options: dict[str, Any]) -> None:
    """Raise a ModelError that names an option which is out of range."""
    allowed: dict[str, tuple[Any, ...]] = {
        "method": ("newton_schulz", "polar_express"),
        "adjust_lr_fn": ("match_rms_adamw", "original"),
        "momentum_bits": (8, 32),
    }
    for key, values in allowed.items():
        if options[key] not in values:
            raise ModelError(f"Muon: {key} is {options[key]!r}", f"choose from {', '.join(map(str, values))}")
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ModelError(f"Muon: lr is a tensor of shape {list(lr.shape)}", "pass a float or a 1-element tensor")
    minima = {"weight_decay": 0.0, "momentum": 0.0, "ns_steps": 1, "eps": 0.0}
    minima |= {} if isinstance(lr, Tensor) else {"lr": 0.0}
    for key, value in minima.items():
        if not options[key] >= value:
            raise ModelError(f"Muon: {key} is {options[key]}", f"pass {value} or more")


def _load_momentum(group: dict[str, Any], parameter: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Copy a parameter's saved state to its device.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype.
    """
    blocks = torch.Size([-(-parameter.numel() // BLOCK)])
    expected = {"momentum_buffer": (parameter.shape, torch.promote_types(parameter.dtype, torch.float32))}
    if group["momentum_bits"] == 8:
        expected = {"momentum_buffer": (parameter.shape, torch.int8), "momentum_scale": (blocks, torch.float32)}
    loaded = {}
    for key, (shape, dtype) in expected.items():
        value = saved.get(key)
        if value is None or value.shape != shape or value.is_floating_point() != dtype.is_floating_point:
            actual = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
            raise CheckpointError(
                f"the optimizer state's {key} of a parameter {list(parameter.shape)} is {actual}, not {dtype}"
                f" {list(shape)} (blocks of {BLOCK})",
                "resume with the optimizer and the model of the checkpoint",
            )
        loaded[key] = value.to(device=parameter.device, dtype=dtype, copy=True)
    return loaded


def _scale(adjust: str, rows: int, columns: int) -> float:
    """Factor of the learning rate for a matrix of this shape."""
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


def ids_outside_muon(model: nn.Module) -> set[int]:
    """Ids of the trained parameters that are no matrices or stacks of these, or belong to embeddings or heads."""
    embeddings = {id(parameter) for parameter in embedding_weights(model)}
    return {
        id(parameter)
        for name, parameter in trained_parameters(model).items()
        if parameter.dim() not in (2, 3) or id(parameter) in embeddings or OUTER.search(name)
    }


def fused_projections(model: nn.Module) -> dict[Tensor, list[int]]:
    """Trained weight of a fused projection → the rows of each of its matrices, for those of known layout.

    These are `qkv_proj`, whose matrices follow from the config, and `gate_up_proj`; as weight of a linear, factor B of
    its adapter, or stack of experts [E, 2I, H].
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (heads or 1)
    kv = (getattr(config, "num_key_value_heads", None) or heads) * width
    row_sizes: dict[Tensor, list[int]] = {}
    for name, parameter in trained_parameters(model).items():
        projection = FUSED.search(name)
        if projection is None or parameter.dim() not in (2, 3):
            continue
        rows = parameter.shape[-2]
        sizes = [heads * width, kv, kv] if projection[1] == "qkv_proj" else [rows // 2] * 2
        stacked = parameter.dim() == 3 and parameter.shape[-1] != getattr(config, "hidden_size", None)
        if sum(sizes) == rows and not stacked:  # a stack [E, H, 2I] has its matrices in columns
            row_sizes[parameter] = sizes
    return row_sizes
