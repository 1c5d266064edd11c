"""Low-rank optimizers for full fine-tuning: GaLore, Q-GaLore, APOLLO and APOLLO-Mini.

Each selected matrix W [m, n] has a virtual parameter of rank r, whose gradient R is the projected gradient of W:
[r, n] for a left projection R = PᵀG, [m, r] for a right projection R = GP. An inner optimizer (AdamW) steps the virtual
parameters and all other parameters together. With a learning rate of 1 and a start at zero, a virtual parameter becomes
-N, where N is the inner optimizer's normalized update of R. Then, with learning rate η and weight decay λ,

    GaLore          W ← (1 - ηλ) W - η · scale · P N                   Zhao et al. 2024, arXiv:2403.03507, Algorithm 2
    APOLLO          W ← (1 - ηλ) W - η · √scale · limit(G diag(s))     Zhu et al. 2024, arXiv:2412.05270, Algorithm 1
                    s_j = ‖N_j‖ / ‖R_j‖ by channel j of the longer side
    APOLLO-Mini     the same with r = 1 and one s for the matrix

`limit` keeps the norm of APOLLO's scaled gradient from growing by more than 1% a step. GaLore's P holds singular
vectors of G. Instead of an SVD, a refresh runs randomized subspace iteration (Halko et al. 2011, arXiv:0909.4061,
section 4.5) from the last P. The first refresh is computed for all matrices of a shape at once; later refreshes of
different matrices fall on different steps. APOLLO's P is Gaussian with variance 1/r, and is generated from a seed in
each step, not stored. Q-GaLore (Zhang et al. 2024, arXiv:2407.08296) stores P in 4 or 8 bits, and refreshes P less
often while it stays similar. Q-GaLore's int8 weights are not implemented.

Matrices of one shape share their projected gradients, virtual parameters and norms as stacks, and the inner optimizer
steps all virtual parameters at once. The full gradients are not stacked: copying them takes longer than the matmuls
with r columns, whose time is that of reading the gradients. On an accelerator, matmuls of bf16 weights run in bf16 and
sum in fp32.

Between steps a virtual parameter occupies no memory. State per matrix: the inner optimizer's for r · max(m, n)
elements; GaLore: P with r · min(m, n) elements; Q-GaLore: P quantized.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ops.low_rank import dequantize_basis, gaussian, quantize_basis, refresh_basis
from ..utils.errors import CheckpointError, ConfigError, TrainingError
from .backward import BackwardCheck, second_backward, weak_hook
from .parameters import check_gradient, check_unique, closure_loss
from .state_dicts import check_saved_groups

MakeInner = Callable[[list[dict[str, Any]]], Optimizer]  # parameter groups → the optimizer that steps them

FIRST_SWEEPS = 3  # iterations from a random start; later refreshes start from the last basis and need one
OVERSAMPLED = 8  # columns of a random start beyond the rank, as Halko et al. advise
GROWTH = 1.01  # APOLLO's largest ratio of the norms of successive scaled gradients
TINY = 1e-8  # added to the norms that APOLLO divides by
REFRESH_ELEMENTS = 2**26  # most elements of gradients whose bases are computed together: 256 MiB in fp32
STATE = "low_rank"  # key of this module's part of a parameter's state in a state dict
SHAPE = "shape"  # key in that part: shape of the virtual parameter


@dataclass(frozen=True)
class LowRank:
    """Options of the projected parameters.

    Attributes:
        rank: columns of P; at most the shorter side of a matrix.
        update_proj_gap: steps between refreshes of P.
        scale: factor of the update; APOLLO multiplies by its square root.
        proj_type: side of the projection. std: the shorter side is projected; reverse_std: the longer one; right; left;
            full: both sides.
        scaling: "" for GaLore; "channel" or "tensor" for APOLLO's scaling of the full gradient.
        random: whether P is Gaussian; otherwise it holds singular vectors.
        bits: bits of a stored P: 4 or 8; 0: P has the dtype of the weight.
        group: elements of P with one scale.
        cos_threshold, gamma_proj, queue_size: Q-GaLore multiplies the gap of a matrix by `gamma_proj` when the mean
            cosine similarity of its last `queue_size` pairs of successive P reaches `cos_threshold`.
    """

    rank: int = 128
    update_proj_gap: int = 200
    scale: float = 0.25
    proj_type: str = "std"
    scaling: str = ""
    random: bool = False
    bits: int = 0
    group: int = 256
    cos_threshold: float = 0.4
    gamma_proj: float = 2.0
    queue_size: int = 5

    def sides(self, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the projected sides of a matrix of this shape: left, right or both."""
        rows, columns = shape
        shorter, longer = ("right", "left") if rows >= columns else ("left", "right")
        named = {"std": (shorter,), "reverse_std": (longer,), "full": ("left", "right")}
        return named.get(self.proj_type) or (self.proj_type,)

    def rank_of(self, shape: Sequence[int]) -> int:
        """Return the columns of P for a matrix of this shape."""
        return min(self.rank, *shape)

    def virtual_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the virtual parameter of a matrix."""
        sides, rank = self.sides(shape), self.rank_of(shape)
        return rank if "left" in sides else shape[0], rank if "right" in sides else shape[1]

    def basis_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Return the bytes of a matrix's stored bases, for weights of `itemsize` bytes an element."""
        if self.random:
            return 0
        total, rank = 0, self.rank_of(shape)
        for side in self.sides(shape):
            elements = rank * shape[side == "right"]
            if self.bits:
                total += math.ceil(elements * self.bits / 8) + 8 * math.ceil(elements / self.group)
            else:
                total += elements * itemsize
        return total


def _wide(tensor: Tensor) -> Tensor:
    """Return `tensor` in fp32; fp64 is kept."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of matmuls with the gradient: bf16 for bf16 weights on an accelerator, else at least fp32."""
    if weight.dtype == torch.bfloat16 and weight.device.type != "cpu":
        return torch.bfloat16
    return torch.promote_types(weight.dtype, torch.float32)


# --- matrices --------------------------------------------------------------------------------------------------------


@dataclass
class _Matrix:
    """A projected weight, its virtual parameter and its state.

    Attributes:
        index: number among the optimizer's projected matrices.
        phase: steps by which the second refresh comes before a full gap, so that matrices refresh at different steps.
    """

    weight: nn.Parameter
    options: LowRank
    index: int
    phase: int
    seed: int
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape = self.weight.shape
        self.virtual = nn.Parameter(self._placeholder())
        self.sides = self.options.sides(self.weight.shape)
        self.rank = self.options.rank_of(self.weight.shape)

    def _placeholder(self) -> Tensor:
        """Return one element, expanded to the virtual parameter's shape: it takes no memory."""
        return self.weight.new_zeros(()).expand(self.options.virtual_shape(self.weight.shape))

    @property
    def has_bases(self) -> bool:
        """Whether there are bases to project with; random ones are always there."""
        return self.options.random or "next" in self.state

    @property
    def stack_key(self) -> tuple[Any, ...]:
        """Shape, dtype, device and options, which all matrices of a stack share."""
        return self.weight.shape, self.weight.dtype, self.weight.device, self.options

    def check_weight(self, name: str) -> None:
        """Raise a TrainingError if the weight, called `name`, has another shape than when the optimizer was made."""
        if self.weight.shape != self.shape:
            wrong = f"{name} is now {[*self.weight.shape]}, and its projection is of {[*self.shape]}"
            raise TrainingError(wrong, "make a new optimizer after changing parameters")

    def free(self) -> None:
        """Free the virtual parameter and its gradient."""
        self.virtual.data, self.virtual.grad = self._placeholder(), None

    def stored(self, side: str, dtype: torch.dtype) -> Tensor:
        """Return the basis of a side [length of the side, r]."""
        basis, options = self.state[side], self.options
        if options.bits:
            shape = self.weight.shape[side == "right"], self.rank
            basis = dequantize_basis(basis, options.bits, options.group, shape)
        return basis.to(dtype)

    def store(self, side: str, basis: Tensor) -> None:
        """Store the basis [length of the side, r] of a side, quantized if the options say so."""
        bits, group = self.options.bits, self.options.group
        # a copy, since `basis` is a view of a stack
        self.state[side] = quantize_basis(basis, bits, group) if bits else basis.to(self.weight.dtype, copy=True)

    def check(self, state: Mapping[str, Any], number: int) -> None:
        """Raise a CheckpointError if `state`, saved for parameter `number`, is not of these options and this shape."""
        options, expected = self.options, dict[str, Any]()
        for side in () if options.random else self.sides:
            elements = self.rank * self.shape[side == "right"]
            if options.bits:
                expected[f"{side}.codes"] = [math.ceil(elements * options.bits / 8)]
                expected[f"{side}.scales"] = [2, math.ceil(elements / options.group)]
            else:
                expected[side] = [self.shape[side == "right"], self.rank]
        if options.scaling:
            expected["norm"] = []
        shapes: dict[str, Any] = {}
        for key, value in state.items():
            tensors = (
                {f"{key}.{suffix}": tensor for suffix, tensor in value.items()}
                if isinstance(value, Mapping)
                else {key: value}
            )
            shapes.update({name: [*tensor.shape] for name, tensor in tensors.items() if isinstance(tensor, Tensor)})
        shapes[SHAPE], expected[SHAPE] = state.get(SHAPE), [*self.virtual.shape]
        plan = set() if options.random else {"next", "gap"}
        if state and (shapes != expected or not plan <= state.keys()):
            raise CheckpointError(
                f"the saved low-rank state of parameter {number} has {shapes}, and its options need {expected}",
                "resume with the optimizer and the optim_args that saved it",
            )

    def plan_refresh(self, step: int, similarity: float | None) -> None:
        """Set the step of the next refresh; `similarity`: mean cosine of the new bases and the last ones, if any."""
        gap = self.state.setdefault("gap", self.options.update_proj_gap)
        if similarity is not None:
            queue = [*self.state.get("similarities", []), similarity][-self.options.queue_size :]
            if len(queue) == self.options.queue_size and sum(queue) / len(queue) >= self.options.cos_threshold:
                gap = self.state["gap"] = int(gap * self.options.gamma_proj)
            self.state["similarities"] = queue
        self.state["next"] = step + gap - (0 if "next" in self.state else self.phase)


class _Stack:
    """Matrices of one shape, dtype, device and `LowRank`, which step together.

    Args:
        matrices: all of them; a step takes those that have a gradient.

    Attributes:
        present: indices in `matrices` of the ones that a step takes, from `begin` to `end`.
        used: for each of `matrices`, side → basis that the step projects with.
        projected, moved: gradients and values of the virtual parameters of `present`, stacked.
    """

    def __init__(self, matrices: list[_Matrix]):
        self.matrices = matrices
        first = matrices[0]
        self.options = first.options
        self.sides = first.sides
        self.rank = first.rank
        self.shape = first.weight.shape
        self.dtype = product_dtype(first.weight)

    def bases(self, step: int) -> list[dict[str, Tensor]]:
        """Return, for each matrix that has them, side → basis [length of the side, r] in the dtype of products."""
        if not self.options.random:
            return [
                {side: matrix.stored(side, self.dtype) for side in self.sides} if matrix.has_bases else {}
                for matrix in self.matrices
            ]
        first, bases = self.matrices[0], [dict[str, Tensor]() for _ in self.matrices]
        for side in self.sides:
            key = first.seed, first.index, side == "right", step // self.options.update_proj_gap
            length = self.shape[side == "right"]
            drawn = gaussian(length, self.rank, first.weight, *key, count=len(self.matrices)) / math.sqrt(self.rank)
            for by_side, basis in zip(bases, drawn.to(self.dtype).unbind(), strict=True):
                by_side[side] = basis
        return bases

    def begin(self, step: int, skipped: Tensor | None) -> None:
        """Refresh the bases that are due, and give the virtual parameters the projected gradients."""
        self.present = [
            index
            for index, matrix in enumerate(self.matrices)
            if matrix.weight.grad is not None and matrix.weight.numel()
        ]
        if not self.present:
            return
        if not self.options.random:
            due = [
                self.matrices[index] for index in self.present if step >= self.matrices[index].state.get("next", step)
            ]
            old, new = ([matrix for matrix in due if matrix.has_bases is has] for has in (True, False))
            count = max(REFRESH_ELEMENTS // self.shape.numel(), 1)
            for matrices in (old, new):
                for index in range(0, len(matrices), count):
                    self._refresh(matrices[index : index + count], step, skipped, first=matrices is new)
        self.used = self.bases(step)
        like = self.matrices[0].weight
        shape = len(self.present), *self.options.virtual_shape(self.shape)
        self.projected, self.moved = like.new_empty(shape), like.new_zeros(shape)
        for index, projected, moved in zip(self.present, self.projected, self.moved, strict=True):
            matrix = self.matrices[index]
            product = self._gradient(matrix).to(self.dtype)
            for side, basis in self.used[index].items():
                product = basis.T @ product if side == "left" else product @ basis
            projected.copy_(product)
            matrix.virtual.data, matrix.virtual.grad = moved, projected

    @staticmethod
    def _gradient(matrix: _Matrix) -> Tensor:
        assert matrix.weight.grad is not None
        return matrix.weight.grad

    def _refresh(self, matrices: list[_Matrix], step: int, skipped: Tensor | None, first: bool) -> None:
        """Compute new bases of matrices, which have none yet if `first`, and else all have some."""
        gradients = torch.stack([_wide(self._gradient(matrix)) for matrix in matrices])
        if skipped is not None:
            gradients = gradients.masked_fill(skipped, 0.0)
        similarities = []
        for side in self.sides:
            oriented = gradients if side == "left" else gradients.mT
            if first:
                columns = min(self.rank + OVERSAMPLED, *self.shape)
                keys = ((matrix.seed, matrix.index, side == "right", step) for matrix in matrices)
                start = torch.stack([gaussian(oriented.shape[1], columns, oriented, *key) for key in keys])
                basis = refresh_basis(oriented, start, self.rank, FIRST_SWEEPS)
            else:
                start = torch.stack([matrix.stored(side, gradients.dtype) for matrix in matrices])
                basis = refresh_basis(oriented, start, self.rank, sweeps=1, align=True)
                if skipped is not None:
                    basis = torch.where(skipped, start, basis)
                if self.options.bits:
                    similarities.append(nn.functional.cosine_similarity(basis, start, dim=1).mean(1))
            for matrix, matrix_basis in zip(matrices, basis, strict=True):
                matrix.store(side, matrix_basis)
        means: list[Any] = torch.stack(similarities).mean(0).tolist() if similarities else [None] * len(matrices)
        for matrix, similarity in zip(matrices, means, strict=True):
            matrix.plan_refresh(step, similarity)

    def end(self, group_of: Mapping[int, dict[str, Any]], skipped: Tensor | None) -> None:
        """Update the weights from the stepped virtual parameters, and free these.

        Args:
            group_of: id of a weight → its parameter group.
        """
        if not self.present:
            return
        factors = self._factors(skipped) if self.options.scaling else self.moved.to(self.dtype)
        for index, factor in zip(self.present, factors, strict=True):
            matrix = self.matrices[index]
            group = group_of[id(matrix.weight)]
            rate, weight_decay = group["lr"], group["weight_decay"]
            if weight_decay:
                applied = 1.0 if skipped is None else 1.0 - skipped.float()
                matrix.weight.mul_(1.0 - rate * weight_decay * applied)
            if isinstance(rate, Tensor):
                factor, rate = factor * rate, 1.0
            if self.options.scaling:
                gradient = self._gradient(matrix)
                gradient = gradient if skipped is None else gradient.masked_fill(skipped, 0.0)  # 0·NaN is NaN
                matrix.weight.addcmul_(gradient, factor, value=-rate * math.sqrt(self.options.scale))
            else:
                self._add_product(matrix.weight, self.used[index], factor, rate * self.options.scale)
            matrix.free()
        del self.projected, self.moved, self.used

    def _add_product(self, weight: Tensor, bases: dict[str, Tensor], moved: Tensor, alpha: float) -> None:
        """Add alpha · (left · moved · rightᵀ) to a weight, without the basis of a side that is not projected.

        A weight that is narrower than the product is rounded once.
        """
        left, right = bases.get("left"), bases.get("right")
        if right is None:
            assert left is not None
            first, second = left, moved
        else:
            first, second = moved if left is None else left @ moved, right.T
        if weight.dtype == self.dtype:
            weight.addmm_(first, second, alpha=alpha)
        else:
            weight.add_(first @ second, alpha=alpha)

    def _factors(self, skipped: Tensor | None) -> Tensor:
        """Return APOLLO's limited factors of the gradients: [B, 1, n], [B, m, 1] or [B, 1, 1], at least fp32."""
        moved, projected = _wide(self.moved), _wide(self.projected)
        rows, columns = projected.shape[1:]
        dims = (1, 2) if self.options.scaling == "tensor" else (2,) if rows >= columns else (1,)
        of_moved, of_projected = (torch.linalg.vector_norm(t, dim=dims, keepdim=True) for t in (moved, projected))
        factors = of_moved / (of_projected + TINY)
        present, matrix_dims = [self.matrices[index] for index in self.present], tuple(dim - 1 for dim in dims)
        norms = torch.stack(
            [
                torch.linalg.vector_norm(self._gradient(matrix), dim=matrix_dims, keepdim=True, dtype=factors.dtype)
                for matrix in present
            ]
        )
        norm = torch.linalg.vector_norm(factors * norms, dim=(1, 2))
        previous = torch.stack([matrix.state.get("norm", norm.new_zeros(())) for matrix in present])
        limited = torch.where(previous > 0, (GROWTH * previous / (norm + TINY)).clamp(max=1.0), 1.0)
        factors, norm = factors * limited[:, None, None], norm * limited
        if skipped is not None:
            factors, norm = factors.masked_fill(skipped, 0.0), torch.where(skipped, previous, norm)
        for matrix, matrix_norm in zip(present, norm, strict=True):
            matrix.state["norm"] = matrix_norm.clone()
        return factors


# --- the optimizer ---------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A parameter of the optimizer.

    Attributes:
        number: in a state dict.
        group: index of its group.
        matrix: its projection; None: the inner optimizer steps it as it is.
    """

    number: int
    group: int
    parameter: nn.Parameter
    matrix: _Matrix | None


@dataclass
class _Unit:
    """Parameters that step together, and their inner optimizer, whose groups parallel the outer ones."""

    inner: Optimizer
    outer: list[int]  # for each of the inner optimizer's groups, the index of the outer group
    projected: list[bool]  # for each of the inner optimizer's groups, whether its parameters are virtual
    numbers: list[int]  # for each of the inner optimizer's parameters, the number of the parameter in a state dict
    parameters: list[nn.Parameter]
    matrices: dict[int, _Matrix]

    def __post_init__(self) -> None:
        alike: dict[tuple[Any, ...], list[_Matrix]] = {}
        for matrix in self.matrices.values():
            alike.setdefault(matrix.stack_key, []).append(matrix)
        self.stacks = [_Stack(matrices) for matrices in alike.values()]


class LowRankOptimizer(Optimizer):
    """GaLore, Q-GaLore, APOLLO or APOLLO-Mini over an inner optimizer; see the module's docstring.

    Honours `found_inf` and `grad_scale` of torch.amp.GradScaler if the inner optimizer does: a step whose `found_inf`
    is 1 changes no weight, moment, basis or norm. While a matrix has no basis, the host reads `found_inf`.

    Args:
        groups: parameter groups with `lr` and `weight_decay`. A group with a `low_rank` entry (`LowRank`) has matrices
            [m, n] only, which are projected; the inner optimizer steps the others as they are.
        make_inner: makes the inner optimizer from groups; its update must start at the parameter and be proportional to
            the group's learning rate.
        lr: learning rate of groups without their own.
        layerwise: whether each parameter is stepped as soon as its gradient is complete in the backward, and the
            gradient freed. Then `step` updates nothing. From the first gradient with NaN or Inf to the end of the step
            no parameter is changed; see `BackwardCheck`.
        seed: of random projections and of the start of subspace iterations.

    Raises:
        ConfigError: a parameter is in two places, or a group is added later.
        TrainingError: a projected parameter is not a matrix. In a step: a gradient is sparse, or a parameter has
            changed its shape. In a backward, with `layerwise`: it is the second one since the last `step`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], make_inner: MakeInner, *, lr: float, layerwise: bool = False, seed: int = 0
    ):
        self.units: list[_Unit] = []
        super().__init__([{key: value for key, value in group.items() if key != "low_rank"} for group in groups],
                         {"lr": lr, "weight_decay": 0.0})  # fmt: skip
        self.layerwise = layerwise
        self.steps = 0
        self._make_inner = make_inner
        self.seed = seed
        self._updated: set[int] = set()  # ids of the parameters that the backward has updated in this step
        self._check = BackwardCheck(self)  # of the gradients that the backward frees
        self._options = options = [group.get("low_rank") for group in groups]
        count = sum(
            len(g["params"]) for g, low_rank in zip(self.param_groups, options, strict=True) if low_rank is not None
        )
        members: list[_Member] = []
        index = 0
        for number, (group, low_rank) in enumerate(zip(self.param_groups, options, strict=True)):
            for parameter in group["params"]:
                matrix = None
                if low_rank is not None:
                    if parameter.ndim != 2:
                        raise TrainingError(
                            f"a parameter of shape {[*parameter.shape]} cannot be projected", "select matrices only"
                        )
                    matrix = _Matrix(parameter, low_rank, index, index * low_rank.update_proj_gap // count, seed)
                    index += 1
                members.append(_Member(len(members), number, parameter, matrix))
        units = [[member] for member in members] if layerwise else [members]
        self.units = [self._unit(unit_members, make_inner) for unit_members in units]
        self._step_supports_amp_scaling = not layerwise and all(
            getattr(unit.inner, "_step_supports_amp_scaling", False) for unit in self.units
        )
        if layerwise:
            update = weak_hook(self._step_in_backward)
            for number, unit in enumerate(self.units):
                unit.parameters[0].register_post_accumulate_grad_hook(partial(update, number))

    def __getstate__(self) -> dict[str, Any]:
        groups = [
            group | {"low_rank": low_rank} for group, low_rank in zip(self.param_groups, self._options, strict=True)
        ]
        arguments = {"make_inner": self._make_inner, "layerwise": self.layerwise, "seed": self.seed}
        return {"groups": groups, "lr": self.defaults["lr"], **arguments, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        LowRankOptimizer.__init__(self, **state)
        self.load_state_dict(saved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.units:
            raise ConfigError(
                "a parameter group is added to a low-rank optimizer, whose matrices are stacked when it is made",
                "make a new optimizer with all groups",
            )
        param_group["params"] = [*param_group["params"]]
        check_unique(self.param_groups, param_group["params"])
        super().add_param_group(param_group)

    def _unit(self, members: Sequence[_Member], make_inner: MakeInner) -> _Unit:
        """Make the inner optimizer of some parameters, with a group for each outer group that has any of them."""
        outer = sorted({member.group for member in members})
        groups, projected = list[dict[str, Any]](), list[bool]()
        for number in outer:
            group_members = [member for member in members if member.group == number]
            params = [member.parameter if member.matrix is None else member.matrix.virtual for member in group_members]
            projected.append(group_members[0].matrix is not None)
            options = {"lr": 1.0, "weight_decay": 0.0} if projected[-1] else self.param_groups[number]
            groups.append({"params": params, "lr": options["lr"], "weight_decay": options["weight_decay"]})
        return _Unit(
            make_inner(groups),
            outer,
            projected,
            [member.number for member in members],
            [member.parameter for member in members],
            {id(member.parameter): member.matrix for member in members if member.matrix is not None},
        )

    def _step_in_backward(self, number: int, parameter: Tensor) -> None:
        """Step a unit of one parameter, whose gradient the backward has completed, and free the gradient."""
        if id(parameter) in self._updated:
            raise second_backward(parameter)
        check_gradient(parameter, parameter.grad, f"parameter {self.units[number].numbers[0]}")
        self._updated.add(id(parameter))
        self._step_unit(self.units[number], self._check.add(number, [parameter]))
        parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradients that the last backward has freed, fp32 []; layerwise only.

        A second call returns 0.
        """
        return self._check.gradient_norm()

    def first_broken(self) -> Tensor | None:
        """Return the first weight whose gradient in this step's backward has NaN or Inf, or None; blocks the host."""
        return self._check.first_broken()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; layerwise: only count the step."""
        loss = closure_loss(closure)
        if self.layerwise:
            self._updated.clear()
            self._check.end_step()
            self.steps += 1
            return loss
        found_inf = getattr(self, "found_inf", None)
        if (scale := getattr(self, "grad_scale", None)) is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.device))
        if self._step_unit(self.units[0], found_inf):
            self.steps += 1
        return loss

    @torch.no_grad()
    def _step_unit(self, unit: _Unit, found_inf: Tensor | None) -> bool:
        """Step the parameters of a unit; returns False if `found_inf` skipped the step on the host."""
        matrices = []
        for number, parameter in zip(unit.numbers, unit.parameters, strict=True):
            if parameter.grad is None:
                continue
            check_gradient(parameter, parameter.grad, name := f"parameter {number}")
            if (matrix := unit.matrices.get(id(parameter))) is not None and parameter.numel():
                matrix.check_weight(name)
                matrices.append(matrix)
        skips_on_device = getattr(unit.inner, "_step_supports_amp_scaling", False)
        if found_inf is not None and not (skips_on_device and all(matrix.has_bases for matrix in matrices)):
            if bool(found_inf):
                return False
            found_inf = None
        if skips_on_device:
            unit.inner.found_inf = found_inf  # type: ignore[attr-defined]
        skipped = None if found_inf is None else found_inf.bool()
        for stack in unit.stacks:
            stack.begin(self.steps, _on(skipped, stack.matrices[0].weight))
        group_of = {}
        for group, number, projected in zip(unit.inner.param_groups, unit.outer, unit.projected, strict=True):
            outer = self.param_groups[number]
            group_of.update({id(parameter): outer for parameter in outer["params"]})
            if not projected:
                group["lr"], group["weight_decay"] = outer["lr"], outer["weight_decay"]
        unit.inner.step()
        for stack in unit.stacks:
            stack.end(group_of, _on(skipped, stack.matrices[0].weight))
        return True

    # --- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state by parameter, with the projection's part under `STATE`, and the step."""
        packed = super().state_dict()
        states: dict[int, dict[str, Any]] = {}
        for unit in self.units:
            inner = unit.inner.state_dict()["state"]
            for position, (number, parameter) in enumerate(zip(unit.numbers, unit.parameters, strict=True)):
                matrix, state = unit.matrices.get(id(parameter)), dict(inner.get(position, {}))
                if matrix is not None and matrix.state:
                    state[STATE] = {**_copied(matrix.state), SHAPE: [*matrix.virtual.shape]}
                if state:
                    states[number] = state
        return {**packed, "state": states, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned for parameters of the same shapes in the same order.

        Raises:
            CheckpointError: the state is of other groups, another optimizer or other options of the projection.
        """
        check_saved_groups(state_dict, self.param_groups)
        if "steps" not in state_dict:
            raise CheckpointError("the optimizer state has no low-rank part", "resume with the optimizer that saved it")
        loaded: list[tuple[_Matrix, dict[str, Any]]] = []
        inner: list[dict[int, Any]] = []
        for unit in self.units:
            inner.append({})
            for position, (number, parameter) in enumerate(zip(unit.numbers, unit.parameters, strict=True)):
                saved = dict(state_dict["state"].get(number, {}))
                projection, matrix = saved.pop(STATE, {}), unit.matrices.get(id(parameter))
                if matrix is not None:
                    matrix.check(projection, number)
                    copied = _copied(projection, parameter.device)
                    copied.pop(SHAPE, None)
                    loaded.append((matrix, copied))
                if saved:
                    inner[-1][position] = saved
        for unit, states in zip(self.units, inner, strict=True):
            unit.inner.load_state_dict({"state": states, "param_groups": unit.inner.state_dict()["param_groups"]})
        for matrix, projection in loaded:
            matrix.state = projection
        for group, saved_group in zip(self.param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        self.steps = state_dict["steps"]


def _on(skipped: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Return `skipped` on the device of `tensor`."""
    return None if skipped is None else skipped.to(tensor.device)


def _copied(state: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Copy a nested state, its tensors to `device`."""
    return {
        key: _copied(value, device) if isinstance(value, Mapping)
        else value.to(device or value.device, copy=True) if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }  # fmt: skip


def low_rank_groups(
    groups: list[dict[str, Any]], chosen: Mapping[str, nn.Parameter], options: LowRank
) -> list[dict[str, Any]]:
    """Split parameter groups: first the parameters that are stepped as they are, then the `chosen` matrices.

    Args:
        chosen: name → matrix to project.
    """
    projected = {id(parameter) for parameter in chosen.values()}
    plain, low = [], []
    for group in groups:
        by_projection = {
            inside: [p for p in group["params"] if (id(p) in projected) is inside] for inside in (False, True)
        }
        plain.append({**group, "params": by_projection[False]})
        if by_projection[True]:
            low.append({**group, "params": by_projection[True], "low_rank": options})
    return [*plain, *low]


def low_rank_bytes(
    trained: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    options: LowRank,
    moment_bytes: Callable[[int, Tensor, bool], int],
) -> int:
    """Return the bytes of state of a low-rank optimizer, excluding step counts and norms (one number a matrix).

    Args:
        trained, chosen: name → trained parameter, and those that are projected; may be on the meta device.
        moment_bytes: (elements, weight, whether it is projected) → bytes of the inner optimizer's state.
    """
    total = 0
    for name, parameter in trained.items():
        if name in chosen:
            elements = math.prod(options.virtual_shape(parameter.shape))
            total += moment_bytes(elements, parameter, True) + options.basis_bytes(parameter.shape, parameter.itemsize)
        else:
            total += moment_bytes(parameter.numel(), parameter, False)
    return total
