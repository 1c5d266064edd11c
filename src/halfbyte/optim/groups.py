"""Trained parameters of a model and their groups: weight decay, LoRA+, and the learning rate of embeddings."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..adapter_kinds import factor_of

if TYPE_CHECKING:
    from torch import Tensor, nn

# Parameters without weight decay, matched against lower-case names, as in transformers' Trainer.
WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
LORA_PLUS_EMBEDDING = 1e-6  # default learning rate of embedding adapters with LoRA+, as in PEFT
ALL_LINEAR = "all-linear"
LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")  # a parameter's name up to the number of its layer


class Settings(Protocol):
    """The settings of a run that optimizers read."""

    @property
    def optim(self) -> str: ...
    @property
    def optim_args(self) -> Mapping[str, Any] | None: ...
    @property
    def optim_bits(self) -> int | Mapping[str, int] | None: ...
    @property
    def optim_in_backward(self) -> bool | Literal["auto"]: ...
    @property
    def optim_offload(self) -> bool | Literal["auto"]: ...
    @property
    def optim_target_modules(self) -> str | list[str] | None: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def embedding_learning_rate(self) -> float | None: ...
    @property
    def loraplus_lr_ratio(self) -> float | None: ...
    @property
    def loraplus_lr_embedding(self) -> float | None: ...
    @property
    def lora_preconditioner(self) -> str | None: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...
    @property
    def adam_epsilon(self) -> float: ...
    @property
    def lr_scheduler_type(self) -> str: ...
    @property
    def lr_scheduler_kwargs(self) -> Mapping[str, Any] | None: ...
    @property
    def warmup_steps(self) -> float: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def max_grad_norm(self) -> float: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def use_peft(self) -> bool: ...


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter that requires a gradient; tied parameters appear once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """The trained parameters in groups for an optimizer.

    - Default: with `weight_decay`, and norms and biases without it, as in transformers' Trainer.
    - With `loraplus_lr_ratio` (Hayou et al. 2024, arXiv:2402.12354), the four groups of PEFT's
      `create_loraplus_optimizer`: A, embedding adapters, B with weight decay, B without.
    - With `embedding_learning_rate`, a last group of the input and output embeddings that are trained in full.
    """
    trained = trained_parameters(model)
    special = []
    if (rate := settings.embedding_learning_rate) is not None:
        embeddings = {id(weight) for weight in embedding_weights(model)}
        find_head = getattr(model, "get_output_embeddings", None)
        if (head := find_head() if find_head else None) is not None:
            embeddings |= {id(p) for name, p in head.named_parameters() if "lora_" not in name}
        special = [name for name, parameter in trained.items() if id(parameter) in embeddings]
    ordinary = {name: parameter for name, parameter in trained.items() if name not in special}
    if settings.loraplus_lr_ratio is None:
        norms = _norm_parameters(model)
        by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in ordinary.items():
            by_decay[id(parameter) not in norms and WITHOUT_DECAY.search(name.lower()) is None].append(parameter)
        groups = [
            {"params": by_decay[True], "weight_decay": settings.weight_decay},
            {"params": by_decay[False], "weight_decay": 0.0},
        ]
    else:
        groups = _lora_plus_groups(model, ordinary, settings)
    if special:
        special_parameters = [trained[name] for name in special]
        groups.append({"params": special_parameters, "weight_decay": settings.weight_decay, "lr": rate})
    return groups


def _norm_parameters(model: nn.Module) -> set[int]:
    from torch import nn

    return {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}


def _lora_plus_groups(
    model: nn.Module, trained: Mapping[str, nn.Parameter], settings: Settings
) -> list[dict[str, Any]]:
    norms = _norm_parameters(model)
    members: dict[str, list[nn.Parameter]] = {"A": [], "embedding": [], "B": [], "bare_B": []}
    for name, parameter in trained.items():
        factor = factor_of(name)
        if factor == "embedding":
            members["embedding"].append(parameter)
        elif factor == "B" or parameter.ndim == 1:
            members["bare_B" if "bias" in name or id(parameter) in norms else "B"].append(parameter)
        else:
            members["A"].append(parameter)
    rate, embedding = settings.learning_rate, settings.loraplus_lr_embedding
    fast, decay = rate * (settings.loraplus_lr_ratio or 1.0), settings.weight_decay
    rates = {"A": rate, "embedding": LORA_PLUS_EMBEDDING if embedding is None else embedding, "B": fast, "bare_B": fast}
    return [
        {"params": members[name], "weight_decay": 0.0 if name == "bare_B" else decay, "lr": rates[name]}
        for name in members
    ]


def backward_parts(model: nn.Module) -> list[list[nn.Parameter]]:
    """The trained parameters by decoder layer, in the order in which a backward completes their gradients.

    Other parameters are parts of their own.
    """
    by_layer: dict[str, list[nn.Parameter]] = {}
    for name, parameter in trained_parameters(model).items():
        layer = LAYER.match(name)
        by_layer.setdefault(layer[0] if layer else name, []).append(parameter)
    return [*by_layer.values()][::-1]


def backward_gradient_bytes(model: nn.Module) -> int:
    """Largest bytes of gradients during a backward that updates `backward_parts`.

    The gradient of a weight that is both head and embedding is held from the start of the backward to its end.
    """
    heads, tables = (getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("output", "input"))
    tied = None
    if heads is not None and tables is not None and heads.weight is tables.weight and heads.weight.requires_grad:
        tied = heads.weight
    layer_bytes = (
        sum(parameter.nbytes for parameter in parameters if parameter is not tied)
        for parameters in backward_parts(model)
    )
    return max(layer_bytes, default=0) + (tied.nbytes if tied is not None else 0)


def matched(name: str, patterns: Mapping[str, str]) -> str | None:
    """Return the value of the last pattern (`*`, `?`, as in a shell) that matches a parameter's name, or None."""
    return next((patterns[pattern] for pattern in reversed([*patterns]) if fnmatch.fnmatchcase(name, pattern)), None)


def matched_groups(model: nn.Module, groups: list[dict[str, Any]], patterns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Divide each group by the storage that the last matching pattern gives a parameter.

    Each group becomes one without the key `storage`, and one for each storage in `patterns`. Groups may be empty, so
    that all stages of a pipeline have the same number.
    """
    names = {id(parameter): name for name, parameter in trained_parameters(model).items()}
    divided = []
    for storage in (None, *dict.fromkeys(patterns.values())):
        for group in groups:
            members = [parameter for parameter in group["params"] if matched(names[id(parameter)], patterns) == storage]
            divided.append({**group, "params": members} | ({} if storage is None else {"storage": storage}))
    return divided


def embedding_weights(model: nn.Module) -> list[Tensor]:
    """Weights of all embedding modules."""
    from torch import nn

    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def selects(targets: str | list[str], name: str) -> bool:
    """Return whether `optim_target_modules` selects the linear layer called `name`, as in transformers.

    Args:
        targets: "all-linear", one regular expression for full names, or a list of parts of names and expressions.
    """
    if isinstance(targets, str):
        return targets.replace("_", "-") == ALL_LINEAR or re.fullmatch(targets, name) is not None
    return any(target in name or re.fullmatch(target, name) for target in targets)


def target_matrices(model: nn.Module, targets: str | list[str] | None) -> dict[str, nn.Parameter]:
    """Name → trained weight of each linear layer that `targets` selects. None selects all of them."""
    from torch import nn

    chosen = ALL_LINEAR if targets is None else targets
    linear = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and selects(chosen, name)
    }
    return {name: p for name, p in trained_parameters(model).items() if p.ndim == 2 and id(p) in linear}
