"""Parts of a transformers model: language model and vision tower, linear layers, stacked experts, tied heads."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..config.methods import SCORES
from ..utils.errors import ModelError
from ..utils.notices import notice

ALL_LINEAR = "all-linear"
MIN_INPUTS = 16  # linears with fewer inputs stay in 16 bits: half of the smallest quantization block
FREEZE_TOWER, FREEZE_PROJECTOR = "freeze_vision_tower", "freeze_multi_modal_projector"  # keys of a run
PROJECTORS = {"multi_modal_projector", "merger", "deepstack_merger_list", "connector", "embed_vision"}  # their modules
MAMBA_LINEARS = ("x_proj", "dt_proj", "out_proj")  # Mamba kernels read their weights directly


SUFFIXES = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}  # of names of classes


def stored_task(architectures: Sequence[str] | None) -> str | None:
    """Return the task type, a key of `SCORES`, of a checkpoint whose `architectures` name a classifier, or None."""
    name = str(architectures[0]) if architectures else ""
    return next((task for suffix, task in SUFFIXES.items() if name.endswith(suffix)), None)


def auto_class(config: Any) -> Any:
    """Return the Auto class of transformers that builds and loads a model of `config`.

    This is the class for causal LMs if there is one, including a class of the model's own code; otherwise, or if the
    checkpoint holds a model that takes images and text, the class for those. For a classifier that `merge` wrote, it is
    the class for its task.
    """
    import transformers
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    stored = getattr(config, "architectures", None)
    if (task := stored_task(stored)) is not None:
        return getattr(transformers, SCORES[task][1])
    if "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return AutoModelForCausalLM
    text = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if text is None or (images is not None and images is not text and images.__name__ in (stored or ())):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def text_model(model: Any) -> Any:
    """Return the text model inside a model that takes images, or the backbone of a text model; None if it has none."""
    backbone: Any = getattr(model, "base_model", None)
    return getattr(backbone, "language_model", None) or getattr(backbone, "text_model", backbone)


def non_text_modules(model: Any) -> list[str]:
    """Return the names of a multimodal model's vision tower and projector; empty for a text model.

    Raises:
        ModelError: the model takes images, and its language model has no name of its own.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    backbone: Any = getattr(model, "base_model", None)
    text = text_model(model)
    if text is backbone:
        config = type(getattr(model, "config", None))
        if config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config not in MODEL_FOR_CAUSAL_LM_MAPPING:
            wrong = f"{type(model).__name__} does not hold its language model apart from what reads images"
            raise ModelError(wrong, "use another model")
        return []
    prefix = "" if backbone is model else f"{model.base_model_prefix}."
    return [f"{prefix}{name}" for name, child in backbone.named_children() if child is not text]


def vision_parts(model: Any) -> dict[str, list[str]]:
    """Return `FREEZE_TOWER` and `FREEZE_PROJECTOR`, each with the names of the outermost modules that the key freezes.

    The projector may be inside the tower's module (Qwen's `visual.merger`), whose name is then in the first list, too.
    """
    towers = [name for name in non_text_modules(model) if "audio" not in name and not PROJECTORS & {*name.split(".")}]
    inside = [f"{tower}." for tower in towers]
    names = [name for name in non_text_modules(model) if name not in towers and "audio" not in name]
    names += [
        name
        for name, _ in model.named_modules()
        if name.startswith(tuple(inside)) and PROJECTORS & {name.rpartition(".")[2]}
    ]
    return {FREEZE_TOWER: towers, FREEZE_PROJECTOR: names}


def vision_part(name: str, parts: Mapping[str, Sequence[str]]) -> str | None:
    """Return the key of `vision_parts` that freezes a module or parameter; None outside of tower and projector."""
    for key in (FREEZE_PROJECTOR, FREEZE_TOWER):
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in parts[key]):
            return key
    return None


def train_vision(model: Any, trained: Collection[str]) -> None:
    """Let all weights of vision tower or projector be trained, for full fine-tuning; `load_model` freezes them.

    Args:
        trained: keys of `vision_parts`.

    Raises:
        ModelError: the model has no such part.
    """
    parts = vision_parts(model)
    for key in trained:
        if not parts[key]:
            raise ModelError(f"{key}: false, but {type(model).__name__} has no such module", f"remove {key}")
    for name, parameter in model.named_parameters():
        if vision_part(name, parts) in trained:
            parameter.requires_grad_(True)


def all_linear(model: Any, trained: Collection[str] = ()) -> list[str]:
    """Return the names of all `nn.Linear` modules except the output head: short names (q_proj, ...) if unambiguous.

    For a model with a vision tower, only its language model counts, and those parts that `trained` names. Excluded are
    linears that do not return x·Wᵀ (routers), and linears of Mamba layers whose kernels read the weight directly and
    would skip an adapter.

    PEFT's own all-linear lists every full name, which ties the saved adapter to the number of layers.

    Args:
        trained: keys of `vision_parts`.
    """
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = {name: module for name, module in model.named_modules() if name}
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    parts, non_text = vision_parts(model), tuple(f"{name}." for name in non_text_modules(model))
    inside = {name for name in linears if f"{name}.".startswith(non_text)}  # a projector may be a linear
    frozen = {name for name in inside if vision_part(name, parts) not in trained}
    linears -= {"lm_head", *frozen}
    linears -= {name for name in linears if not is_linear(modules[name])}
    past = set()
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        # a Mamba layer has A and a skip D; a gated delta net has no D
        if leaf in MAMBA_LINEARS and hasattr(modules.get(parent), "A_log") and hasattr(modules.get(parent), "D"):
            past.add(name)
    if past:
        skipped = ", ".join(sorted({name.rpartition(".")[2] for name in past}))
        notice("all-linear-mamba", f"all-linear excludes {skipped} of Mamba layers: kernels read only their weights")
    linears -= past
    if not linears:
        conv1d_names = sorted({name.rpartition(".")[2] for name in conv1d_layers(model)})
        named = f": its layers are Conv1D, e.g. target_modules: [{', '.join(conv1d_names)}]" if conv1d_names else ""
        raise ModelError(
            "target_modules: all-linear finds no nn.Linear in this model", f"name the modules to adapt{named}"
        )
    leaves = {name.rpartition(".")[2] for name in linears}
    ambiguous = any(name.rpartition(".")[2] in leaves for name in modules.keys() - linears)
    return sorted(linears if ambiguous else leaves)


def is_router(module: Any) -> bool:
    """Return whether a module selects experts by a matrix of its own and is not an `nn.Linear`."""
    from torch import nn

    weight = getattr(module, "_parameters", {}).get("weight")
    return "Router" in type(module).__name__ and not isinstance(module, nn.Linear) and getattr(weight, "ndim", 0) == 2


def is_linear(module: Any) -> bool:
    """Return whether a linear returns x·Wᵀ for rows x. Subclasses may not: some route, others work on groups."""
    import torch
    from torch import nn

    layer_class = type(module)
    if not isinstance(module, nn.Linear) or layer_class.forward is nn.Linear.forward:
        return True
    if not layer_class.__module__.startswith("transformers"):  # true also for code of the hub (transformers_modules)
        return True
    weights: dict[str, torch.Tensor] = {}
    if getattr(module.weight, "template", None) is not None:  # a shard (`parallel.shard.placement`): use its full shape
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        weights = {name: getattr(tensor, "template", tensor).to("meta") for name, tensor in tensors.items()}
    try:
        with torch.no_grad():
            rows = weights.get("weight", module.weight).new_zeros(2, module.in_features)
            output = torch.func.functional_call(module, weights, (rows,))
    except RuntimeError:  # the forward does not accept rows
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, module.out_features)


def is_plain_linear(module: Any) -> bool:
    """Return whether a module is an `nn.Linear` or computes the same, x·Wᵀ + b, in a class of its own (FalconLinear).

    Subclasses are run on small numbers, since the module may be on the meta device.
    """
    from torch import nn

    from ..formats.base import is_quantized

    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return isinstance(module, nn.Linear)
    held = {name for name, parameter in module.named_parameters() if parameter is not None}
    plain = held <= {"weight", "bias"} and not any(True for _ in module.buffers())
    if not plain or not module.weight.is_floating_point() or is_quantized(module.weight):
        return False
    return all(_computes_linear(module, training) for training in (True, False))


def _computes_linear(module: Any, training: bool) -> bool:
    """Return whether a small copy of a linear computes x·Wᵀ + b for rows and for batches of rows."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    numbers = torch.linspace(-1, 1, 48, dtype=torch.float64, device="cpu").sin()  # callers build models on meta
    weight = nn.Parameter(numbers[:15].view(3, 5), requires_grad=False)
    bias = None if module.bias is None else nn.Parameter(numbers[15:18], requires_grad=False)
    small = copy.copy(module)
    small.__dict__ |= {"_parameters": {"weight": weight, "bias": bias}, "training": training}
    small.in_features, small.out_features = 5, 3
    try:
        with torch.no_grad():
            for x in (numbers[18:28].view(2, 5), numbers[18:].view(2, 3, 5)):
                if not torch.allclose(type(module).forward(small, x), F.linear(x, weight, bias), rtol=1e-9):
                    return False
    except Exception:  # the forward is code of a model and may raise anything on another shape
        return False
    return True


def unquantized_modules(
    model: Any, skip_modules: list[str] | None = None, non_text: bool = True, vision: bool = False
) -> list[str]:
    """Return the names of modules that are not quantized: `skip_modules` and modules the model keeps in fp32.

    By default, `skip_modules` are the output head and modules tied to it and, with `non_text`, everything except the
    language model (vision tower, projector) and, with `vision`, the tower.

    Raises:
        ModelError: `vision`, but the model has no vision tower.
    """
    from transformers.quantizers.base import HfQuantizer

    skip = HfQuantizer.get_modules_to_not_convert(model, skip_modules, model._keep_in_fp32_modules)
    head = model.get_output_embeddings() if skip_modules is None else None
    if head is not None:  # transformers also adds the last parameter, which is not the head if the head is tied
        last = list(model.named_parameters())[-1][0].removesuffix(".weight")
        tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
        named = {name for name, module in model.named_modules() if module is head}
        skip = [name for name in skip if name != last or name in tied | named | set(model._keep_in_fp32_modules or ())]
    if skip_modules is not None or not non_text:
        return skip
    if not vision:
        return [*skip, *non_text_modules(model)]
    towers, projectors = vision_parts(model).values()
    if not towers:
        raise ModelError(f"quantize_vision_tower: {type(model).__name__} has no vision tower", "remove it")
    return [*skip, *({*non_text_modules(model)} - {*towers, *projectors}), *projectors]


def quantizable(model: Any, skip_modules: list[str] | None = None, vision: bool = False) -> dict[str, Any]:
    """Return name → module of the linear layers that may be quantized: all except `unquantized_modules`.

    Linears with fewer than `MIN_INPUTS` inputs are excluded; some models also read or change their weights outside of
    the forward (Gemma 3n's AltUp coefficients).

    Args:
        vision: whether to include the vision tower's, unless `skip_modules` are given.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = unquantized_modules(model, skip_modules, vision=vision)
    return {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and module.in_features >= MIN_INPUTS and should_convert_module(name, skip)
    }


def conv1d_layers(model: Any, skip_modules: list[str] | None = None) -> dict[str, Any]:
    """Return name → module of GPT-2's `Conv1D` layers, linears with a weight [in, out], except `skip_modules`."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = unquantized_modules(model, skip_modules)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is Conv1D and should_convert_module(name, skip)
    }


def refuse_conv1d(model: Any, layers: Collection[str]) -> None:
    """Raise a ModelError if a model to quantize has `Conv1D` layers: runs cannot train or merge them in 4 bits."""
    if layers:
        leaves = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        raise ModelError(
            f"{type(model).__name__} has {len(layers)} Conv1D layers ({leaves}), which halfbyte's runs do not quantize",
            "set load_in_4bit: false; or, without halfbyte's commands, load it by transformers:"
            " from_pretrained(name, quantization_config=HalfbyteConfig())",
        )


def per_layer_tables(model: Any, skip_modules: list[str] | None = None, stored: Any = None) -> dict[str, Any]:
    """Return name → module of the per-layer embeddings (Gemma 3n and 4), which may be quantized, except `skip_modules`.

    Args:
        stored: names of the modules that a pre-quantized checkpoint stores quantized; other tables stay as they are.
    """
    from torch import nn

    text = model.config.get_text_config()
    width = (getattr(text, "hidden_size_per_layer_input", None) or 0) * text.num_hidden_layers
    return {
        name: module
        for name, module in model.named_modules()
        if width and isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
        if module.embedding_dim == width and (stored is None or name in stored)
        # a skipped module is named in full or by its last parts, or lies inside a named one
        if not any(f"{name}.".startswith(f"{skip}.") or name.endswith(f".{skip}") for skip in skip_modules or ())
    }


def expert_stacks(model: Any, skip_modules: list[str] | None = None) -> dict[str, Any]:
    """Return parameter name → module of the stacked experts that may be quantized and adapted, except `skip_modules`.

    These are 3-D weights of modules with transformers' ExpertsInterface; `skip_modules` as in `unquantized_modules`.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = unquantized_modules(model, skip_modules)
    return {
        f"{name}.{leaf}": module
        for name, module in model.named_modules()
        if runs_experts(module)
        for leaf in (("gate_up_proj" if module.has_gate else "up_proj"), "down_proj")
        if should_convert_module(f"{name}.{leaf}", skip)
    }


def expert_targets(model: Any) -> list[str]:
    """Return unambiguous names of the stacks of routed experts, which `all-linear` adapts in addition to linears."""
    non_text = tuple(non_text_modules(model))
    stacks = [name for name in expert_stacks(model, []) if not name.startswith(non_text)]
    return sorted({".".join(name.split(".")[-2:]) for name in stacks})


def runs_experts(module: Any) -> bool:
    """Return whether a module has the layout of transformers' `use_experts_implementation`, without expert norms."""
    decorated = hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")
    return decorated and not getattr(module, "has_post_expert_norm", False)


def count_unquantized_stacks(model: Any, stacked: Any = ()) -> int:
    """Count the language model's weights in parameters of 3 dimensions, except `stacked` names and convolutions."""
    non_text = tuple(non_text_modules(model))
    return sum(
        parameter.numel()
        for name, module in model.named_modules()
        if not name.startswith(non_text) and not type(module).__name__.startswith("Conv")
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 2 and f"{name}.{leaf}" not in stacked
    )


def check_token_ids(model: Any, largest: Mapping[str, int | None]) -> None:
    """Check that `model` has an embedding for each token id; `model` may be on the meta device.

    Args:
        largest: description of a group of tokens → its largest id, or None.

    Raises:
        ModelError: an id is beyond the embeddings.
    """
    count = model.get_input_embeddings().weight.shape[0]
    for tokens, index in largest.items():
        if index is not None and index >= count:
            raise ModelError(
                f"the tokenizer gives {tokens} the id {index}, but the model has embeddings for 0 to {count - 1} only",
                "put the tokenizer that the model was trained with into the model's folder",
            )
