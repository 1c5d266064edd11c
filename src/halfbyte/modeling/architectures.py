"""Language models alone and beside a vision tower: which class of transformers they are, and which part is which."""

from __future__ import annotations

from typing import Any

from ..utils.errors import ModelError
from ..utils.notices import notice

ALL_LINEAR = "all-linear"
FEW = 16  # inputs of a linear that is not worth quantizing below: half of the smallest block
READ_BY_SCAN = ("x_proj", "dt_proj", "out_proj")  # of a Mamba layer


def auto_class(config: Any) -> Any:
    """The Auto class of transformers that builds and loads a model of `config`: of causal LMs where it has one (a
    class of the model's own code included), else of models that take images and text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    own_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    return (
        AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or own_code else AutoModelForImageTextToText
    )


def beside_text(model: Any) -> list[str]:
    """Names of what a multimodal model holds beside its language model: vision tower and projector; none in others."""
    backbone: Any = getattr(model, "base_model", None)
    text = getattr(backbone, "language_model", None)
    if text is None:
        return []
    prefix = model.base_model_prefix
    return [f"{prefix}.{name}" for name, child in backbone.named_children() if child is not text]


def all_linear(model: Any) -> list[str]:
    """Names of every `nn.Linear` but the output head: short ones (q_proj, ...) where they mean nothing else. Of a model
    with a vision tower, those of its language model. Left out are linears that return something else than x·Wᵀ
    (routers), and those of Mamba layers whose weights are read past their forward, and so past an adapter.

    PEFT's own all-linear lists every full name, which ties the saved adapter to the number of layers.
    """
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = {name: module for name, module in model.named_modules() if name}
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    linears -= {"lm_head", *(name for name in linears if name.startswith(tuple(beside_text(model))))}
    linears -= {name for name in linears if not is_linear(modules[name])}
    past = {name for name in linears if name.rpartition(".")[2] in READ_BY_SCAN and _scans(modules, name)}
    if past:
        said = ", ".join(sorted({name.rpartition(".")[2] for name in past}))
        notice("all-linear-mamba", f"all-linear leaves out {said} of Mamba layers: their kernels read only the weights")
    linears -= past
    if not linears:
        raise ModelError("target_modules: all-linear finds no nn.Linear in this model", "name the modules to adapt")
    leaves = {name.rpartition(".")[2] for name in linears}
    ambiguous = any(name.rpartition(".")[2] in leaves for name in modules.keys() - linears)
    return sorted(linears if ambiguous else leaves)


def is_router(module: Any) -> bool:
    """Whether a module chooses experts by a matrix of its own: a router that is no linear layer."""
    from torch import nn

    weight = getattr(module, "_parameters", {}).get("weight")
    return "Router" in type(module).__name__ and not isinstance(module, nn.Linear) and getattr(weight, "ndim", 0) == 2


def is_linear(module: Any) -> bool:
    """Whether a linear, of a class of its own too, gives x·Wᵀ for rows x: routers may choose, others work by groups."""
    import torch
    from torch import nn

    own = type(module)
    if not isinstance(module, nn.Linear) or own.forward is nn.Linear.forward:
        return True
    if not own.__module__.startswith("transformers"):  # its models' own code and that of the hub
        return True
    weights: dict[str, torch.Tensor] = {}
    if getattr(module.weight, "template", None) is not None:  # a piece (`parallel.shard.placement`): shapes say it, too
        held = dict(module.named_parameters()) | dict(module.named_buffers())
        weights = {name: getattr(tensor, "template", tensor).to("meta") for name, tensor in held.items()}
    try:
        with torch.no_grad():
            rows = weights.get("weight", module.weight).new_zeros(2, module.in_features)
            found = torch.func.functional_call(module, weights, (rows,))
    except RuntimeError:  # it takes no rows
        return False
    return isinstance(found, torch.Tensor) and found.shape == (2, module.out_features)


def _scans(modules: dict[str, Any], name: str) -> bool:
    """Whether a linear is a part of a Mamba layer, which has A and a skip D; a gated delta net has no D."""
    parent = modules.get(name.rpartition(".")[0])
    return hasattr(parent, "A_log") and hasattr(parent, "D")


def kept_whole(model: Any, skip_modules: list[str] | None = None, beside: bool = True) -> list[str]:
    """Names of what is not quantized: `skip_modules` and what the model keeps in fp32. By default that is the output
    head and what is tied to it, and with `beside` all that is not the language model (vision tower, projector)."""
    from transformers.quantizers.base import HfQuantizer

    skip = HfQuantizer.get_modules_to_not_convert(model, skip_modules, model._keep_in_fp32_modules)
    head = model.get_output_embeddings() if skip_modules is None else None
    if head is not None:  # transformers adds the last parameter, too: the head's, or any other where that one is tied
        last = list(model.named_parameters())[-1][0].removesuffix(".weight")
        tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
        named = {name for name, module in model.named_modules() if module is head}
        skip = [name for name in skip if name != last or name in tied | named | set(model._keep_in_fp32_modules or ())]
    return [*skip, *beside_text(model)] if skip_modules is None and beside else skip


def quantizable(model: Any, skip_modules: list[str] | None = None) -> dict[str, Any]:
    """Name → module of the linear layers that may be quantized: all but `skip_modules`, as in `kept_whole`, and those
    of a few inputs, which a model may also read or change past their forward (Gemma 3n's mixing of its streams)."""
    from torch import nn
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = kept_whole(model, skip_modules)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.in_features >= FEW and should_convert_module(name, skip)
    }


def conv1d_layers(model: Any, skip_modules: list[str] | None = None) -> dict[str, Any]:
    """Name → module of GPT-2's `Conv1D` layers, which are linear layers with a weight [in, out], but `skip_modules`."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = kept_whole(model, skip_modules)
    found = {name: module for name, module in model.named_modules() if type(module) is Conv1D}
    return {name: module for name, module in found.items() if should_convert_module(name, skip)}


def per_layer_tables(model: Any, skip_modules: list[str] | None = None, stored: Any = None) -> dict[str, Any]:
    """Name → module of the embeddings that give every layer a vector of its own for each token (Gemma 3n and 4), which
    may be quantized: all but `skip_modules`.

    Args:
        stored: names of what a checkpoint stores quantized, where it was quantized before: the others stay as they are.
    """
    from torch import nn

    text = model.config.get_text_config()
    width = (getattr(text, "hidden_size_per_layer_input", None) or 0) * text.num_hidden_layers
    found = {
        name: module
        for name, module in model.named_modules()
        if width and isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
        if module.embedding_dim == width and (stored is None or name in stored)
    }
    return {name: module for name, module in found.items() if not _is_named(name, skip_modules or ())}


def _is_named(name: str, kept: Any) -> bool:
    """Whether a module is one of these, or within one: by whole names, or their ends."""
    return any(f"{name}.".startswith(f"{each}.") or name.endswith(f".{each}") for each in kept)


def expert_stacks(model: Any, skip_modules: list[str] | None = None) -> dict[str, Any]:
    """Name of a parameter → its module, of the stacked experts that may be quantized and adapted: weights of three
    dimensions of a module that transformers gives its ExpertsInterface, but for `skip_modules`, as in `kept_whole`."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = kept_whole(model, skip_modules)
    return {
        f"{name}.{leaf}": module
        for name, module in model.named_modules()
        if runs_experts(module)
        for leaf in (("gate_up_proj" if module.has_gate else "up_proj"), "down_proj")
        if should_convert_module(f"{name}.{leaf}", skip)
    }


def expert_targets(model: Any) -> list[str]:
    """What `all-linear` adapts beside linears: the stacks of a model's routed experts, by names of nothing else."""
    beside = tuple(beside_text(model))
    stacks = [name for name in expert_stacks(model, []) if not name.startswith(beside)]
    return sorted({".".join(name.split(".")[-2:]) for name in stacks})


def runs_experts(module: Any) -> bool:
    """Whether a module is a layer's experts as transformers' `use_experts_implementation` makes them, without norms of
    its own after each."""
    decorated = hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")
    return decorated and not getattr(module, "has_post_expert_norm", False)


def stays_whole(model: Any, stacked: Any = ()) -> int:
    """Weights of the language model's parameters of three dimensions that are none of `stacked`, by their names;
    convolutions' are no experts."""
    beside = tuple(beside_text(model))
    text = ((name, part) for name, part in model.named_modules() if not name.startswith(beside))
    holders = ((name, part) for name, part in text if not type(part).__name__.startswith("Conv"))
    own = ((f"{name}.{leaf}", each) for name, part in holders for leaf, each in part.named_parameters(recurse=False))
    return sum(parameter.numel() for name, parameter in own if parameter.dim() > 2 and name not in stacked)
