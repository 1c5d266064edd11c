"""A saved adapter on a model without weights, to merge one weight at a time in fp32 with PEFT's own layers.

The model is on torch's meta device, so only the adapter takes memory. A layer gets its base weight for one merge (LoRA,
rsLoRA, DoRA, rank and alpha patterns, embeddings) and drops it afterwards. Experts are merged one tensor of the
checkpoint at a time, so a stack never exists in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..adapter_kinds import Factors, adapter_kind
from ..adapters.expert_adapters import expert_factors, expert_wrappers
from ..adapters.initial import InitialAdapter
from ..adapters.lora import check_base_weight, create_adapter, load_adapter_weights, saved_adapter_config
from ..adapters.router_adapters import folded_weight, router_wrappers
from ..adapters.token_rows import grow_vocabulary, largest_index, vocabulary_size
from ..config.methods import SCORES
from ..config.schema import RunKeys
from ..layers.plain import read_adapters
from ..loading.completeness import meta_model
from ..loading.expert_stacks import only_stacks
from ..loading.find import load_model_config
from ..loading.quantizer import assigned_formats
from ..modeling.architectures import expert_stacks
from ..modeling.task_models import check_task_model
from ..reading.tensors import read_adapter_config
from ..runs.saved import find, initial_adapter
from ..utils.errors import CheckpointError, ConfigError

SCORE_HEAD = "score"  # name of the module of a classifier's head
UNREAD = (".original_module.", ".token_adapter.")  # modules with tensors that a merge does not read
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor that holds some rows of one expert.

    Attributes:
        expert: index of the expert.
        index: which of `count` equal row ranges it holds, in the order gate, up.
    """

    expert: int
    index: int
    count: int

    @classmethod
    def of(cls, key: str, pattern: str, sources: Sequence[str]) -> Piece | None:
        """Return the piece for tensor `key`, which matched `pattern` among `sources`; None if it names no expert."""
        match = EXPERT.search(key)
        return cls(int(match[1]), list(sources).index(pattern), len(sources)) if match else None

    def rows(self, expert_rows: int) -> slice:
        """Return the piece's rows among the rows of its expert."""
        size = expert_rows // self.count
        return slice(self.index * size, (self.index + 1) * size)

    def shape(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, given the stack's shape [E, N, K]."""
        return (stack[1] // self.count, stack[2])


@torch.no_grad()
def add_delta(wrapper: Any, weight: Tensor, piece: Piece | None) -> Tensor:
    """Add the adapter's update to `weight` in place, fp32; the weight is a stack in the model's layout, or a piece."""
    a, b = expert_factors(wrapper)
    scaling = wrapper.scaling["default"]
    if piece is not None:
        rows = piece.rows(b.shape[1])
        return weight.addmm_(b[piece.expert, rows], a[piece.expert], alpha=scaling)
    transposed = wrapper.get_base_layer().is_transposed
    for at, matrix in enumerate(weight):
        (matrix.mT if transposed else matrix).add_(b[at] @ a[at], alpha=scaling)
    return weight


def check_unmerged(run: RunKeys) -> None:
    """Check that the adapter of a run may be used without merging it.

    Raises:
        ConfigError: the run rounded the sum of weights and adapter.
    """
    if run.storage.merge_aware:
        wrong = "merge_aware: the adapter was trained to be merged, and computes something else beside the base"
        raise ConfigError(wrong, "merge it, and use the merged model")


class AdapterLayers:
    """The layers of an adapter, ready to merge base weights; empty without a folder, for a model without an adapter.

    Args:
        folder: of a saved adapter.
        trained: a model with its adapter, instead of a folder; its layers cannot merge here.

    Attributes:
        folder: of the saved adapter, or None.
        layers: parameter name → PEFT's layer around it.
        experts: stack name → PEFT's wrapper around the stacked experts.
        routers: parameter name → PEFT's wrapper around the router.
        shared: heads that are tied to an embedding that is trained in full or by rows, and stay tied.
        replaced: parameter name → the trained tensor that replaces it (modules_to_save).
        task: task type of a model that scores or embeds texts, a key of `SCORES`, or None.
        head: parameter name → tensor of the head that a classifier has in place of the head of tokens.
        dropped: parameters of the head of tokens, which a classifier does not have.
        quantized: parameter name → the format that `load_model` stores it in.
        stacks: stack name → the format that `load_model` stores its experts in.
        shapes: parameter name → shape.
        rows: the vocabulary's rows if the adapter adds some, or None.
        is_full_model: whether there is no adapter.
        kind: the adapter's row of the table; None for a full model.
        initial: the run's adapter before the first step, if training stored the base without it.
        transposed: names of stacks in [E, K, N] layout.
        tied: parameter name → name of the parameter it shares its weight with.

    Raises:
        CheckpointError: the adapter is damaged, made for another model, or of a kind that cannot be merged.
    """

    def __init__(self, run: RunKeys, folder: Path | None, device: torch.device, *, trained: PeftModel | None = None):
        self.device, self.is_full_model = device, folder is None and trained is None
        model = meta_model(run.origin, load_model_config(run.origin))
        stored_rows = vocabulary_size(model)
        if folder is not None:
            grow_vocabulary(model, largest_index(read_adapter_config(folder).get("trainable_token_indices")) + 1)
        rows = vocabulary_size(model)
        self.rows = rows if rows > stored_rows else None
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        self.transposed = {name for name, module in expert_stacks(model, []).items() if module.is_transposed}
        self._prefix = model.base_model_prefix
        transforms = get_model_conversion_mapping(model)
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self.quantized, self.stacks = assigned_formats(run.origin, run.storage) if run.storage.quantized else ({}, {})
        with_adapter, self._base_weights = trained, dict[str, Tensor]()
        self.initial = None if folder is None else initial_adapter(find(str(folder)).run_dir, run)
        if folder is not None:
            with_adapter, self._base_weights = _with_adapter(model, folder, device, self.initial)
        self.kind = None if with_adapter is None else adapter_kind(with_adapter.peft_config["default"])
        self.folder = folder
        task = None if with_adapter is None else with_adapter.peft_config["default"].task_type
        self.task = str(task) if task in SCORES else None
        if self.task is not None:
            check_task_model(self.task, model, f"adapter of {folder}")
        root = model if with_adapter is None else with_adapter.get_base_model()
        self.layers: dict[str, BaseTunerLayer] = {}
        self.replaced: dict[str, Tensor] = {}
        self.head: dict[str, Tensor] = {}
        self.shared: set[str] = set()
        copies: list[Tensor] = []
        self.experts: dict[str, Any] = dict(expert_wrappers(root))
        self.routers: dict[str, Any] = dict(router_wrappers(root))
        for name, module in root.named_modules():
            if isinstance(module, ParamWrapper):
                adapted = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
                if adapted not in self.experts.keys() | self.routers.keys():
                    message = f"{folder}: the adapter changes {adapted}, neither a stack of experts nor a router"
                    raise CheckpointError(message, "merge it with PEFT (merge_and_unload)")
            elif isinstance(module, TrainableTokensWrapper):
                if module.token_adapter.tied_adapter:
                    self.shared.add(f"{name}.weight")
                else:
                    self.layers[f"{name}.weight"] = module.token_adapter
            elif isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
                if self.kind is not None and self.kind.merges_bias and module.bias is not None:
                    message = f"{folder}: {self.kind.name} changes the bias of {name}, which merge does not support"
                    raise CheckpointError(message, "merge it with PEFT (merge_and_unload)")
                self.layers[f"{name}.weight"] = module
            elif isinstance(module, ModulesToSaveWrapper):
                replaced = self.head if self.task in SCORES and name == SCORE_HEAD else self.replaced
                for key, parameter in module.modules_to_save["default"].named_parameters():
                    if any(parameter is held for held in copies):  # ensure_weight_tying
                        self.shared.add(f"{name}.{key}")
                    else:
                        replaced[f"{name}.{key}"] = parameter.detach()
                        copies.append(parameter)
        of_tokens = model.get_output_embeddings() if self.head else None
        names = [name for name, module in model.named_modules() if module is of_tokens]
        self.dropped = {f"{name}.{key}" for name in names for key in ("weight", "bias")}

    @property
    def changed(self) -> set[str]:
        """Names of the parameters that the adapter changes."""
        changed = self.layers.keys() | self.replaced.keys() | self.experts.keys() | self.routers.keys()
        return changed | self._base_weights.keys()  # `merged` compares these

    def factors(self, layer: BaseTunerLayer) -> Factors | str:
        """Return the update of one of `layers` as two fp32 matrices and their scale, or the kind that has none."""
        assert self.kind is not None
        if isinstance(layer, TrainableTokensLayer):
            return "trained rows of tokens"
        if self.kind.factors is None:
            return self.kind.name
        factors = self.kind.factors(layer)
        return factors if isinstance(factors, str) else factors._replace(a=factors.a.float(), b=factors.b.float())

    def parameter_of(self, key: str) -> tuple[str, bool, Piece | None]:
        """Return the parameter that a checkpoint tensor becomes, as transformers' loader names it.

        Returns:
            The parameter's name; whether the tensor is all of it; otherwise the piece of a stack, if it is one.
        """
        shapes: Any = self.shapes
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, shapes)
        if name not in shapes and key in shapes:
            name, pattern = key, None
        if pattern is None:
            return name, True, None
        converter = next((c for c in self._converters if pattern in c.source_patterns and only_stacks(c)), None)
        return name, False, Piece.of(key, pattern, converter.source_patterns) if converter else None

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor, piece: Piece | None = None) -> Tensor:
        """Return the parameter `name`, or a piece of it, with the adapter merged, in fp32.

        Args:
            weight: the base's values, fp32; may be overwritten.

        Raises:
            CheckpointError: the adapter's file holds other values for this weight of its base.
        """
        if name in self.replaced:
            return self.replaced[name]
        if name in self.experts:
            return add_delta(self.experts[name], weight, piece)
        if name in self.routers:
            active: Any = read_adapters(self.routers[name])
            return folded_weight(weight, active)
        if name in self._base_weights:
            check_base_weight(weight, self._base_weights[name], f"{self.folder}: {name}")
        if name not in self.layers:
            return weight
        layer: Any = self.layers[name]
        linear = layer.get_base_layer()
        without, linear.weight = linear.weight, nn.Parameter(weight, requires_grad=False)
        layer.merge()
        merged, linear.weight = linear.weight.data, without
        layer.merged_adapters.clear()
        return merged


def generating_layers(layers: AdapterLayers) -> AdapterLayers:
    """Return `layers` if they belong to a model that generates text.

    Raises:
        CheckpointError: they belong to a model that scores or embeds texts, which is written for transformers only.
    """
    if layers.task is not None:
        wrong = f"{layers.folder}: an adapter of task type {layers.task} is not written as GGUF"
        raise CheckpointError(wrong, "merge it (`halfbyte merge`), and load the merged model with transformers")
    return layers


def _with_adapter(
    model: nn.Module, folder: Path, device: torch.device, initial: InitialAdapter | None
) -> tuple[PeftModel, dict[str, Tensor]]:
    """Return the model with the adapter in `folder`, for the original base, and the base weights in its file."""
    lora: Any = saved_adapter_config(folder) if initial is None else initial.converted_config()
    _check_mergeable(lora, folder)
    lora.inference_mode = False
    if init_key := adapter_kind(lora).init_key:
        setattr(lora, init_key, False)
    base = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    peft_model = create_adapter(model, lora, folder, autocast=False)
    # Allocate memory for the adapter's tensors only, floats in fp32; their values are then read from its file.
    allocated: dict[int, Tensor] = {}
    for module in peft_model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in holders:
            for key, tensor in list(tensors.items()):
                if tensor is None or id(tensor) in base:
                    continue
                dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                empty = torch.empty(tensor.shape, dtype=dtype, device=device)
                trained = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
                tensors[key] = allocated.setdefault(id(tensor), trained)
    copies = load_adapter_weights(peft_model, folder, convert=None if initial is None else initial.converted)
    unset = {id(tensor) for tensor in allocated.values() if tensor._version == 0}
    # A copy of a module (modules_to_save) has the buffers of the base's, such as the numbers of a tower's positions.
    buffers = [(name, buffer) for name, buffer in peft_model.named_buffers() if ".modules_to_save." not in name]
    for name, tensor in (*peft_model.named_parameters(), *buffers):
        if id(tensor) in unset and not any(unread in name for unread in UNREAD):
            wrong = f"{folder}: its file has no {name}, which PEFT computes when it adds an adapter of this type"
            raise CheckpointError(wrong, "merge it with PEFT (merge_and_unload)")
    return peft_model, copies


def _check_mergeable(lora: Any, folder: Path) -> None:
    row = adapter_kind(lora)
    if row.unmergeable:
        wrong = f"{folder}: {row.name} cannot be merged: {row.unmergeable}"
        raise CheckpointError(wrong, "serve or export the adapter with its base")
    if not row.keeps_base(vars(lora)):
        raise CheckpointError(
            f"{folder}: {row.init_key} {getattr(lora, row.init_key)!r} changed the base weights while it trained",
            "convert the adapter to a plain one with PEFT (path_initial_model_for_weight_conversion)",
        )
    beyond = [key for key in row.unmerged if getattr(lora, key, None)]
    beyond += ["bias"] * (getattr(lora, "bias", "none") != "none")
    if beyond:
        wrong = f"{folder}: the adapter uses {beyond[0]}, which merge does not support"
        raise CheckpointError(wrong, "merge it with PEFT (merge_and_unload)")
