"""Adapters of any row of `adapter_kinds` through PEFT: add, load, save.

Adapters are PEFT's own modules, so `PeftModel.from_pretrained(base, folder)` reads a saved adapter without halfbyte.
In addition, this module raises on names that match nothing and makes dtypes explicit.

Dtypes: PEFT builds an adapter in the base's dtype, and its forward casts the input to the adapter's dtype. With float32
adapters on a bfloat16 base, that means float32 matmuls: slow everywhere, and 6-15 times slower on CPUs with AMX.
Therefore every forward of this package runs within `no_input_casts` and `compute_autocast`: PEFT does not cast, and
autocast rounds the small float32 factors to the compute dtype for the matmul. Gradients, optimizer state and saved
weights stay float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PeftConfig,
    PeftModel,
    PeftType,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from safetensors.torch import save_file
from torch import nn

from ..adapter_kinds import (
    PREFIX,
    adapter_kind,
    adapter_type_of,
    adapter_types,
    factor_of,
    find_adapter_kind,
)
from ..config import Adapter
from ..config.initialisations import read_by
from ..config.methods import SCORES
from ..config.peft_options import SELECTION_KEYS
from ..config.schema import RunKeys
from ..modeling.architectures import (
    ALL_LINEAR,
    expert_stacks,
    vision_part,
    vision_parts,
)
from ..modeling.rope_scaling import check_adapter_rope
from ..modeling.transformers_versions import quiet_peft
from ..qat.model import round_merged
from ..reading.boundary import answered
from ..reading.files import same_place
from ..reading.tensors import (
    ADAPTER,
    ADAPTER_AGAIN,
    ADAPTER_CONFIG,
    read_adapter_config,
    read_header,
    read_tensor,
    read_tensors,
)
from ..utils.errors import CheckpointError, ConfigError, ModelError
from ..utils.notices import notice
from ..utils.text import brief
from .expert_adapters import attach_adapter_forwards, parameter_wrappers, set_adapter_dropout
from .expert_targets import (
    adapted_experts,
    adapted_routers,
    parameter_targets,
    report_adapter_sizes,
    target_by_weight_name,
    weights_as_modules,
)
from .initial import RESIDUAL, AdapterInitialiser, InitialAdapter, mark_initialisation
from .module_names import check_names, matching, named_by, unknown
from .router_adapters import name_routers
from .targets import adapted_modules, is_selected, selected_modules
from .token_rows import grow_vocabulary, largest_index, token_modules, vocabulary_size

# Raised by PEFT's own checks, and by torch for sizes that PEFT does not check.
PEFT_ERRORS = (ArithmeticError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
PLAUSIBLE_RANK = 1024  # a larger rank in adapter_config.json must be the size of some tensor
SAVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
RESIZE_BASE = "resize the base with transformers (resize_token_embeddings), save it, and name that folder as its base"
WRONG_BASE = "the adapter was made for another model: name its own base"
SAME_ADAPTER = f"copy {ADAPTER_CONFIG} and {ADAPTER} of the same adapter there again"
ROUNDING_OF_COPIES = 2**-7  # relative difference of a weight in bfloat16 and its copy in another dtype


def add_adapter(
    model: nn.Module,
    config: RunKeys | Adapter,
    *,
    scores: str | None = None,
    labels: int | None = None,
    initial: AdapterInitialiser | InitialAdapter | None = None,
) -> PeftModel:
    """Freeze `model` and put trainable adapters on its linear layers.

    Args:
        model: any Hugging Face causal LM, 16-bit or with 4-bit linears.
        config: a run's config or its adapter section: `r`, `lora_alpha`, `target_modules`, ... With `adapter_path`, the
            saved adapter's own rank, alpha and targets are used.
        scores: task type of a model that generates no text; also train a new head `score`, the one transformers uses
            for it, if the task has one.
        labels: outputs of that head; default: those of a reward model.
        initial: the object that `load_model` got, if `init_lora_weights` reads the base's weights. It is not needed on
            the meta device.

    Returns:
        The PeftModel around `model`; trainable weights are `config.adapter_dtype`.

    Raises:
        ModelError: `target_modules`, `modules_to_save`, `rank_pattern` or `alpha_pattern` names a module that the model
            does not have; or quantization-aware training cannot merge the adapter; or `initial` is missing.
        ConfigError: `target_modules` is not a valid regular expression, or `config` describes no adapter.
        CheckpointError: `adapter_path` is missing, truncated, or made for a model of other shapes.
    """
    adapter = config if isinstance(config, Adapter) else config.adapter
    if adapter is None:
        raise ConfigError("use_peft: false describes no adapter", "set use_peft: true")
    grow_vocabulary(model, largest_index(adapter.trainable_token_indices) + 1)
    wide = getattr(torch, adapter.adapter_dtype)
    if isinstance(initial, InitialAdapter):
        peft_model = load_adapter(model, initial.folder, adapter.origin.name, trainable=wide, initial=initial)
    elif adapter.adapter_path:
        saved_type = adapter_type_of(vars(saved_adapter_config(Path(adapter.adapter_path)))).lower()
        if saved_type != adapter.peft_type.lower():
            wrong = f"peft_type: {adapter.peft_type}, but {adapter.adapter_path} has an adapter of type {saved_type}"
            raise ConfigError(wrong, f"set peft_type: {saved_type}, or name another adapter_path")
        peft_model = load_adapter(model, Path(adapter.adapter_path), adapter.origin.name, trainable=wide)
        _report_saved_settings(peft_model.peft_config["default"], adapter)
    else:
        try:
            with quiet_peft():
                peft_config = _peft_config(model, adapter)
                if scores:
                    add_score_head(model, scores, SCORES[scores][0] if labels is None else labels)
                    peft_config.task_type = scores
                with weights_as_modules(peft_config, model):
                    peft_model = get_peft_model(model, peft_config, autocast_adapter_dtype=False)
        except torch.OutOfMemoryError:
            raise
        except PEFT_ERRORS as error:  # types and sizes of modules, values of options, packages
            fix = "name other layers in target_modules, or change the adapter's options"
            raise ModelError(f"peft_type: {adapter.peft_type}: {error}", fix) from error
    # PEFT takes the name from the model object, which may have been built in memory.
    peft_model.peft_config["default"].base_model_name_or_path = adapter.origin.name
    round_merged(peft_model)
    attach_adapter_forwards(peft_model)
    if read_by(adapter) != "nothing":
        if isinstance(initial, AdapterInitialiser):
            initial.fill(peft_model)
        elif initial is None and not any(parameter.is_meta for parameter in model.parameters()):
            wrong = f"init_lora_weights: {adapter.init_lora_weights} reads the weights before they are quantized"
            raise ModelError(wrong, "give the same AdapterInitialiser as initial= to load_model and to add_adapter")
    if adapter.lora_dropout and any(parameter_wrappers(peft_model)):
        set_adapter_dropout(peft_model, adapter.lora_dropout)
    dtype = getattr(torch, adapter.adapter_dtype)
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:  # copies of full modules keep at least the model's precision
            full = ".modules_to_save." in name and dtype.itemsize < parameter.dtype.itemsize
            parameter.data = parameter.data.to(parameter.dtype if full else dtype)
        if adapter.lora_fa and factor_of(name) == "A":
            parameter.requires_grad_(False)
    if read_by(adapter) != "nothing":
        mark_initialisation(peft_model, adapter)
    _check_magnitudes(peft_model)
    _check_vision(peft_model, adapter)
    report_adapter_sizes(peft_model)
    return peft_model


def _check_magnitudes(model: PeftModel) -> None:
    """Check that no magnitude of DoRA is 0, the norm of a row of zeros: PEFT's forward divides by it.

    Raises:
        ModelError: one is.
    """
    for name, magnitude in model.named_parameters():
        if ".lora_magnitude_vector." in name and not magnitude.is_meta and (zero := magnitude.detach() == 0).any():
            module = name.removeprefix(PREFIX).partition(".lora_magnitude_vector.")[0]
            wrong = f"use_dora: {int(zero.sum())} rows of {module}.weight are zeros (first: {int(zero.int().argmax())})"
            fix = f"leave {module.rpartition('.')[2]} out of target_modules, or set use_dora: false"
            raise ModelError(f"{wrong}, which have no direction", fix)


def _check_vision(model: PeftModel, adapter: Adapter) -> None:
    """Check that vision tower and projector have trained parameters if they are not frozen.

    Raises:
        ModelError: one has none.
    """
    parts = vision_parts(model.get_base_model())
    names = (name.removeprefix(PREFIX) for name, parameter in model.named_parameters() if parameter.requires_grad)
    trained = {vision_part(name, parts) for name in names}
    for key, modules in parts.items():
        if getattr(adapter, key) or key in trained:
            continue
        if not modules:
            raise ModelError(f"{key}: false, but {adapter.origin.name} has no such module", f"remove {key}")
        if adapter.adapter_path:
            wrong = f"{key}: false, but the adapter in {adapter.adapter_path} has no tensor of {modules[0]}"
            raise ModelError(wrong, f"remove {key}, or start a new adapter")
        wrong = f"{key}: false, but no linear layer of {', '.join(modules)} gets an adapter"
        raise ModelError(wrong, f"set target_modules: all-linear; if {modules[0]} has no linear layer, remove {key}")


def add_score_head(model: nn.Module, scores: str, labels: int) -> None:
    """Give `model` a newly initialised head `score` with `labels` outputs, the one transformers uses for this task type
    of `SCORES`; none for 0.

    The weights are drawn on the CPU, as PEFT draws adapters, so a seed gives the same head and the same adapters on
    every device.
    """
    if not labels:
        return
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    device = next(model.parameters()).device
    tokens = scores == "TOKEN_CLS" and getattr(config, "token_classification_bias", True)
    head = nn.Linear(config.hidden_size, labels, bias=tokens, device="cpu")
    nn.init.normal_(head.weight, std=getattr(config, "initializer_range", 0.02))
    if tokens:
        nn.init.zeros_(head.bias)
    model.score = head.to(device)


def _peft_config(model: nn.Module, adapter: Adapter) -> PeftConfig:
    row = adapter_kind(adapter)
    experts = adapted_experts(model, adapter)
    if adapter.target_parameters is None:
        experts = {name for name in experts if is_selected(adapter, name, [name.rpartition(".")[2]])}
    targets, named = (None, set()) if row.adapts_norms else adapted_modules(model, adapter)
    linears = selected_modules(model, adapter, targets, named)
    routers = adapted_routers(model, adapter, linears)
    of_routers = {name.removesuffix(".weight") for name in routers}
    adapted = linears | of_routers | experts | routers
    linears -= of_routers
    names = {name for name, _ in model.named_modules() if name} | experts | routers
    check_names("modules_to_save", adapter.modules_to_save or (), names)
    _check_trainable(model, adapter.modules_to_save or ())
    for module_name, parameter_name in itertools.product(adapter.modules_to_save or (), sorted(experts | routers)):
        if named_by(parameter_name.rpartition(".")[0], module_name):
            wrong = f"modules_to_save: {brief(module_name)} would train all of {parameter_name}, which gets an adapter"
            raise ModelError(wrong, f"remove it, or exclude {parameter_name} from the adapters (target_parameters: [])")
    saved = {name for name in names for suffix in adapter.modules_to_save or () if named_by(name, suffix)}
    if overlap := linears & saved:
        wrong = f"{brief(min(overlap))} is in target_modules and in modules_to_save"
        raise ModelError(wrong, "train it by an adapter or in full: remove it from one of the two")
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(adapter, key):
            matched = matching(key, pattern, names, rf"(.*\.)?({pattern})")
            if not matched:
                raise ModelError(*unknown(key, pattern, adapted))
            if not matched & adapted:
                raise ModelError(
                    f"{key}: {pattern!r} matches only modules without an adapter ({brief(min(matched))})",
                    "add the module to target_modules, or remove the pattern",
                )
    _check_ends(model, adapter, linears, saved)
    if adapter.lora_bias and (experts or routers):
        wrong = f"lora_bias: PEFT does not support it on stacked experts and routers ({min(experts | routers)})"
        raise ModelError(wrong, "set lora_bias: false, or leave them out (target_parameters: [])")
    options = row.options(adapter)
    if read_by(adapter) != "nothing":
        options[row.init_key] = True  # `adapters.initial` computes the factors
    if row.adapts_norms and adapter.target_modules != ALL_LINEAR:
        targets = adapter.target_modules
    peft_config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(row.peft_type)](
        task_type="CAUSAL_LM",
        revision=adapter.origin.revision,
        target_modules=targets,
        modules_to_save=_exact_names(adapter.modules_to_save, names),
        **{key: value for key in SELECTION_KEYS if (value := getattr(adapter, key)) is not None},
        **options,
    )
    if adapter.trainable_token_indices:
        peft_config.trainable_token_indices = token_modules(model, adapter.trainable_token_indices)
    if "target_parameters" not in row.refused:
        if experts:
            left_out = adapter.target_parameters is None and experts != set(expert_stacks(model, []))
            peft_config.target_parameters = sorted(experts) if left_out else parameter_targets(model, adapter)
        if experts | routers:
            peft_config.lora_dropout = 0.0  # `set_adapter_dropout` applies it instead
        name_routers(peft_config, model, linears, routers)
        target_by_weight_name(peft_config, model, linears)
    return peft_config


def _check_ends(model: Any, adapter: Adapter, adapted: Collection[str], saved: Collection[str]) -> None:
    """Check the adapters of embedding and head, and report a tie that merging would dissolve.

    Args:
        adapted: names of the modules that get adapters.
        saved: names of the modules that are trained in full.

    Raises:
        ModelError: a row of one is trained by itself as well, or `ensure_weight_tying` cannot tie them.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {name for name, module in model.named_modules() if module is embedding or module is head}
    adapted, saved = sorted(ends.intersection(adapted)), sorted(ends.intersection(saved))
    if adapter.trainable_token_indices and (changed := [*adapted, *saved]):
        wrong = f"trainable_token_indices, add_tokens: {changed[0]} is adapted or trained in full as well"
        raise ModelError(wrong, f"remove {changed[0]} from target_modules and modules_to_save")
    is_tied = head is not None and head.weight is embedding.weight
    if not adapter.ensure_weight_tying:
        if is_tied and (changed := [*adapted, *saved]):
            notice("untied", f"{' and '.join(sorted(ends))} share a weight, and {' and '.join(changed)} will differ:"
                   " merged models store both, with tie_word_embeddings: false")  # fmt: skip
        return
    if not is_tied:
        wrong = f"ensure_weight_tying: embedding and head of {type(model).__name__} have weights of their own"
        raise ModelError(wrong, "remove ensure_weight_tying")
    if adapted:  # PEFT makes two parameters on the same memory, which an optimizer would step twice
        wrong = f"ensure_weight_tying: {adapted[0]} has an adapter, whose factors are not shared with the tied module"
        raise ModelError(wrong, f"name {adapted[0]} in modules_to_save instead, or remove ensure_weight_tying")
    if not saved:
        wrong = f"ensure_weight_tying: modules_to_save names neither {' nor '.join(sorted(ends))}"
        raise ModelError(wrong, "name one of them, or remove ensure_weight_tying")


def _exact_names(requested: list[str] | None, names: Collection[str]) -> list[str] | None:
    """Lengthen names of `modules_to_save` until PEFT, which compares name suffixes, matches the intended modules only.

    For example, `gate` would also match shared_expert_gate.
    """
    if requested is None:
        return None
    exact_names: list[str] = []
    for suffix in requested:
        meant = sorted(name for name in names if named_by(name, suffix))
        exact = all(name in meant for name in names if name.endswith(suffix))
        exact_names += [suffix] if exact else [".".join(name.split(".")[-2 - suffix.count(".") :]) for name in meant]
    return list(dict.fromkeys(exact_names))


def reads_base_weights(adapter: Adapter) -> bool:
    """Return whether adding the adapter reads base weights: for its initialisation, or to copy `modules_to_save`.

    Raises:
        CheckpointError: the adapter at `adapter_path` cannot be read.
    """
    config = read_adapter_config(Path(adapter.adapter_path)) if adapter.adapter_path else vars(adapter)
    row = find_adapter_kind(config)
    reads_weights = not adapter.adapter_path and read_by(adapter) != "nothing"
    return row is None or row.reads_base or reads_weights or bool(config.get("modules_to_save"))


def _sorted_names(value: Any) -> Any:
    """Return names as a sorted list, and an empty collection as None."""
    names = sorted(value) if isinstance(value, set | list | tuple) else value
    return None if isinstance(names, list | dict) and not names else names


def _report_saved_settings(saved: PeftConfig, adapter: Adapter) -> None:
    row = adapter_kind(saved)
    common = ("target_modules", "target_parameters", "modules_to_save")
    requested = row.options(adapter) | {key: getattr(adapter, key) for key in common}
    defaults = {key: field.get_default(call_default_factory=True) for key, field in type(adapter).model_fields.items()}
    differing = [
        f"{key} {brief(_sorted_names(getattr(saved, key, None)))} (not {brief(_sorted_names(value))})"
        for key, value in requested.items()
        if _sorted_names(getattr(saved, key, None)) != _sorted_names(value)
        and (key in row.reported or key not in defaults or value != defaults[key])
    ]
    if differing:
        notice(
            "adapter_shape",
            f"continuing from {adapter.adapter_path}: settings of the saved adapter apply: {', '.join(differing)}",
        )


# --- names -----------------------------------------------------------------------------------------------------------


def _check_trainable(model: nn.Module, targets: Collection[str]) -> None:
    """Raise if a module of `modules_to_save` has weights that cannot be trained: packed codes, not floating point."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets or name in targets:
            for parameter_name, parameter in module.named_parameters():
                if type(parameter.data) is not torch.Tensor or not parameter.is_floating_point():
                    raise ModelError(
                        f"modules_to_save: {name}.{parameter_name} is stored quantized and cannot be trained",
                        "name it in target_modules instead, or set load_in_4bit: false",
                    )


# --- saved weights ---------------------------------------------------------------------------------------------------


def load_adapter(
    model: Any,
    folder: Path,
    base: str,
    name: str = "default",
    *,
    trainable: torch.dtype | None = None,
    initial: InitialAdapter | None = None,
    converted: bool = False,
) -> PeftModel:
    """Load a saved adapter into a model, or another adapter into a model that has some.

    All adapters from files are loaded here. Only merging on the meta device calls the two steps, `create_adapter` and
    `load_adapter_weights`, itself. Nothing is looked up on the hub.

    Args:
        folder: a folder that PEFT saved, with adapter_config.json and adapter_model.safetensors.
        base: name of the model as it was loaded; if the adapter was trained on another one, this is logged.
        name: PEFT's name for the adapter.
        trainable: the dtype to train in. Default: the adapter is frozen, in PEFT's dtype.
        initial: the adapter of the run before the first step; see `adapters.initial`. The model is stored without it.
        converted: the model is the original base instead.

    Raises:
        CheckpointError: a file is missing, cannot be read, or belongs to another model; a tensor is missing,
            unexpected, misshapen, NaN or infinite.
    """
    lora: Any = saved_adapter_config(folder)
    check_adapter_rope(folder, model.config)
    convert = None
    if initial is not None:
        lora = initial.converted_config() if converted else initial.residual_config()
        convert = initial.converted if converted else initial.trained_part
    trained_on = lora.base_model_name_or_path
    if trained_on and not same_place(str(trained_on), base):
        notice(f"adapter_base {folder}", f"the adapter in {folder} was trained on {trained_on}, and is now on {base}")
    indices = getattr(lora, "trainable_token_indices", None)
    if indices or not trainable:
        resize_vocabulary(model, folder, largest_index(indices) + 1)
    lora.inference_mode = not trainable
    peft_model = create_adapter(model, lora, folder, name, autocast=not trainable)
    for parameter in peft_model.parameters() if trainable else ():  # PEFT builds adapters in the base's dtype
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trainable)
    load_adapter_weights(peft_model, folder, name, convert=convert)
    return peft_model if trainable else peft_model.eval()


def saved_adapter_config(folder: Path) -> PeftConfig:
    """Read adapter_config.json of a local folder.

    Raises:
        CheckpointError: the file is missing, or PEFT cannot read it.
    """
    entry = read_adapter_config(folder)
    row = find_adapter_kind(entry) if "peft_type" in entry else None
    if row is None:
        wrong = f"{folder / ADAPTER_CONFIG} has the peft_type {brief(entry.get('peft_type'))}"
        raise CheckpointError(wrong, f"give an adapter of the type {' or '.join(adapter_types()).upper()}")
    rank = max([entry.get("r") or 0, *(entry.get("rank_pattern") or {}).values()])
    header = read_header(folder / ADAPTER, ADAPTER_AGAIN)
    shapes = (tensor["shape"] for name, tensor in header.items() if row.tensors.fullmatch(name))
    if rank > max([PLAUSIBLE_RANK, *(min(shape, default=0) for shape in shapes)]):  # PEFT would allocate this rank
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} has a rank of {rank}, and no tensor in {ADAPTER} of it", ADAPTER_AGAIN
        )
    with answered(f"cannot read {folder / ADAPTER_CONFIG}", ADAPTER_AGAIN):
        peft_config = PeftConfig.from_pretrained(str(folder))
    targets: Any = peft_config.target_modules
    named = None if getattr(peft_config, "target_parameters", None) or isinstance(targets, str) else targets
    for key in header:
        match = row.tensors.fullmatch(key)
        if match is None or row.file_problem is None:
            continue
        reason = row.file_problem(peft_config, match, header)
        module = match["module"].removeprefix(PREFIX)
        if reason is None and named and not any(named_by(module, target) for target in named):
            reason = f"target_modules names {brief(sorted(named))}"
        if reason is not None:
            raise CheckpointError(f"{folder / ADAPTER}: {key} contradicts {ADAPTER_CONFIG}: {reason}", SAME_ADAPTER)
    return peft_config


def create_adapter(model: Any, lora: PeftConfig, folder: Path, name: str = "default", *, autocast: bool) -> PeftModel:
    """Create the modules of the adapter in `folder`; `load_adapter_weights` fills them.

    Raises:
        CheckpointError: the model lacks a module that the adapter targets.
    """
    trained_on, lora.base_model_name_or_path = lora.base_model_name_or_path, None  # PEFT warns if the names differ
    with answered(str(folder / ADAPTER_CONFIG), WRONG_BASE), quiet_peft(), weights_as_modules(lora, model):
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        if lora.task_type in SCORES and not hasattr(base, "score"):
            head = read_header(folder / ADAPTER, ADAPTER_AGAIN).get(f"{PREFIX}score.weight")
            add_score_head(base, str(lora.task_type), head["shape"][0] if head else SCORES[lora.task_type][0])
        if not isinstance(model, PeftModel):
            model = get_peft_model(model, lora, name, autocast_adapter_dtype=autocast)
        else:
            model.add_adapter(name, lora, autocast_adapter_dtype=autocast)
    lora.base_model_name_or_path = trained_on
    attach_adapter_forwards(model)
    return model


def load_adapter_weights(
    model: PeftModel,
    folder: Path,
    name: str = "default",
    skip: Callable[[str], bool] | None = None,
    convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
) -> dict[str, torch.Tensor]:
    """Read `adapter_model.safetensors` in `folder` into an adapter of `model`, in the adapter's own dtype.

    For an adapter on the meta device, only names and shapes are compared.

    Args:
        skip: returns whether a tensor, named as in the file, belongs to a layer of another process.
        convert: returns the tensors to load for those of the file, by the same names.

    Returns:
        The base weights that the file has in addition, by the names of the base's parameters.

    Raises:
        CheckpointError: the file is missing or truncated, or a tensor is missing, unexpected, misshapen, NaN or
            infinite; or a base weight in it differs from the model's.
    """
    path = folder / ADAPTER
    expected = get_peft_model_state_dict(model, _state(model), adapter_name=name, save_embedding_layers=False)
    with torch.device("cpu"):
        tensors = _read_tensors(path)
    if backbone := _backbone_prefix(model, name):
        # Tensors that layers share, such as VeRA's, have no module's name.
        tensors = {key.replace(PREFIX, backbone, 1): tensor for key, tensor in tensors.items()}
    if convert is not None:
        tensors = convert(tensors)
    if skip is not None:
        tensors = {key: tensor for key, tensor in tensors.items() if not skip(key)}
    tensors, copies = _split_base_weights(model, tensors, expected, path)
    held = tensors
    if tensors.keys() != expected.keys():
        with answered(f"{path}: its tensors cannot be given this model's names", WRONG_BASE):
            # older versions of transformers had other module names, and a name for each expert's factors
            converted = convert_peft_adapter_state_dict_for_transformers(
                model, model.peft_config[name], dict(tensors), name
            )
        held, renamed = _split_base_weights(model, converted, expected, path)
        copies |= renamed
    pattern = adapter_kind(model.peft_config[name]).tensors
    # The file must hold the names and shapes that the model needs.
    for key, tensor in expected.items():
        if key not in held:
            suffix = ".".join(key.removeprefix(PREFIX).split(".")[-3:])  # v_proj.lora_A.weight
            if any(name.endswith(suffix) for name in held):  # of other layers
                raise CheckpointError(f"{path} lacks the tensor {key}", WRONG_BASE)
            raise CheckpointError(f"{path} has no {suffix}, which {ADAPTER_CONFIG} asks for", SAME_ADAPTER)
        if held[key].shape != tensor.shape:
            vocabulary = pattern.fullmatch(key) is None
            raise _wrong_shape(model, key, held[key].shape, tensor.shape, path, vocabulary=vocabulary)
    for key in sorted(held.keys() - expected.keys()):
        match = pattern.fullmatch(key)
        module = (match["module"] if match else None) or key
        if any(name.startswith(f"{module}.") for name, _ in model.named_parameters(remove_duplicate=False)):
            raise CheckpointError(f"{path} holds {key}, which {ADAPTER_CONFIG} does not ask for", SAME_ADAPTER)
        raise CheckpointError(f"{path} holds {key}, which this model has no place for", WRONG_BASE)
    if not all(tensor.is_meta for tensor in expected.values()):
        set_peft_model_state_dict(model, tensors, name)
    return copies


def _wrong_shape(
    model: PeftModel, key: str, saved: torch.Size, needed: torch.Size, path: Path, *, vocabulary: bool = True
) -> CheckpointError:
    """Return the error about a tensor whose shape in an adapter's file is not the model's.

    Args:
        vocabulary: whether it may have a row for each token.
    """
    grown = saved[:1] > needed[:1] and saved[1:] == needed[1:]
    vocabulary = vocabulary and grown and needed[0] == vocabulary_size(model)
    added = f"the adapter adds {saved[0] - needed[0]} tokens: {RESIZE_BASE}" if vocabulary else WRONG_BASE
    return CheckpointError(f"{path}: {key} has shape {tuple(saved)}, this model needs {tuple(needed)}", added)


def resize_vocabulary(model: Any, folder: Path, trained_rows: int = 0) -> None:
    """Resize the base model's embeddings to the size saved with an adapter whose tokenizer has additional tokens.

    Loading the adapter then fills the new rows: PEFT saves resized embeddings in full, or the new rows as trained ones.

    Args:
        trained_rows: rows up to the last one that is trained by itself.
    """
    rows = vocabulary_size(model)
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    embedding = base.get_input_embeddings()
    names = [name.rpartition(".")[2] for name, module in base.named_modules() if module is embedding]
    header = read_header(folder / ADAPTER, ADAPTER_AGAIN)
    saved = (
        entry["shape"][0]
        for key, entry in header.items()
        if any(key.replace(".base_layer.", ".").endswith(f".{name}.weight") for name in names)
    )
    needed_rows = max(saved, default=0)
    if not grow_vocabulary(model, max(needed_rows, trained_rows)):
        return
    for name, parameter in base.named_parameters(remove_duplicate=False):
        for key in (f"{PREFIX}{name}", f"{PREFIX}{name.removesuffix('.weight')}.base_layer.weight"):
            if key in header and parameter.shape[0] == needed_rows and type(parameter.data) is torch.Tensor:
                parameter.data[rows:] = read_tensor(folder / ADAPTER, key)[rows:].to(parameter)
    added = vocabulary_size(model) - rows
    notice(f"grown {folder}", f"the adapter in {folder} adds {added} tokens: resizing the base's embeddings")


def check_base_unchanged(folder: Path, *, quantized: bool) -> None:
    """Check that an adapter fits a base whose weights are quantized.

    Args:
        folder: folder of the saved adapter.
        quantized: whether the base's weights are stored in fewer than 16 bits.

    Raises:
        CheckpointError: the adapter's initialisation changed the base weights, so the quantized weights do not match.
    """
    entry = read_adapter_config(folder)
    row = find_adapter_kind(entry)
    if row is None or row.keeps_base(entry):
        return
    residual = str(entry[row.init_key]).startswith(RESIDUAL)
    if quantized or residual:
        fix = "set load_in_4bit: false, or convert the adapter to a plain one with PEFT"
        fix += " (path_initial_model_for_weight_conversion)"
        if residual:
            fix = "name the adapter/ folder of its run, which fits the original base"
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: {row.init_key} {entry[row.init_key]!r} changed the base weights while it"
            " trained, so they differ from those of this base",
            fix,
        )


def check_adapter_files(folder: Path) -> None:
    """Check a saved adapter before the model is loaded.

    Raises:
        CheckpointError: a file is missing or cannot be read, or a tensor is NaN or infinite.
    """
    saved_adapter_config(folder)
    _read_tensors(folder / ADAPTER)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors = read_tensors(path, ADAPTER_AGAIN)
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in SAVED_DTYPES:
            wrong = f"{path}: {name} holds {str(tensor.dtype).removeprefix('torch.')}"
            raise CheckpointError(wrong, f"save it in {', '.join(map(str, SAVED_DTYPES)).replace('torch.', '')}")
    if broken := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        fix = "take an earlier checkpoint, or train with a lower learning rate"
        raise CheckpointError(f"{path}: {min(broken)} has NaN or Inf", fix)
    return tensors


def _split_base_weights(
    model: PeftModel, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split the tensors of an adapter's file into the adapter and base weights that PEFT saves next to some adapters.

    PEFT adds the embedding and the head if they have an adapter, or if the vocabulary has grown. Of a module of
    `modules_to_save` it then also saves the parts of its wrapper.

    Args:
        expected: the adapter's tensors, by their names in the file.

    Returns:
        The adapter's tensors by their names in the file, and the base weights by the names of the base's parameters.

    Raises:
        CheckpointError: a base weight in the file differs from the model's own. On the meta device only shapes are
            compared.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    adapter, copies = dict(tensors), {}
    for key in sorted(tensors.keys() - expected.keys()):
        full = key.replace(".modules_to_save.", ".").replace(".original_module.", ".")
        if full != key and full in expected:
            del adapter[key]
        elif key in parameters:
            if parameters[key].shape != tensors[key].shape:
                raise _wrong_shape(model, key, tensors[key].shape, parameters[key].shape, path)
            check_base_weight(parameters[key], tensors[key], f"{path}: {key}")
            copies[key.removeprefix(PREFIX).replace(".base_layer.", ".")] = adapter.pop(key)
    return adapter, copies


def check_base_weight(base: torch.Tensor, copy: torch.Tensor, name: str) -> None:
    """Check that the copy of a base weight that an adapter's file has is the base's, up to rounding to 16 bits.

    A base without plain values passes: on the meta device, quantized, or sharded.

    Raises:
        CheckpointError: it is not.
    """
    if base.is_meta or type(base.data) is not torch.Tensor:
        return
    values = base.detach().float()
    if not (copy.to(base.device).float() - values).norm() <= ROUNDING_OF_COPIES * values.norm():
        wrong = f"{name} differs from the weight of this base, and modules_to_save of {ADAPTER_CONFIG} does not name it"
        raise CheckpointError(wrong, f"name the adapter's own base, or {SAME_ADAPTER}")


def save_adapter(model: PeftModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter "default" as PEFT does: adapter_config.json and adapter_model.safetensors.

    Embeddings are never resized here, so PEFT's look-up of the base's vocabulary (a network request) is skipped.

    Args:
        weights: weights of the full adapter, from `adapter_weights`, if `model` holds only a part of it.
    """
    state = _state(model)
    model.save_pretrained(str(folder), selected_adapters=["default"], state_dict=state, save_embedding_layers=False)
    backbone = _backbone_prefix(model)
    if weights is None and backbone:
        # Layers can share a tensor, which safetensors refuses; PEFT writes copies, too.
        weights = {key.replace(backbone, PREFIX, 1): tensor.clone() for key, tensor in adapter_weights(model).items()}
    if weights is not None:
        save_file(dict(weights), folder / ADAPTER, metadata={"format": "pt"})  # as PEFT does


def _backbone_prefix(model: PeftModel, name: str = "default") -> str:
    """Return the start of the names of a model's adapted tensors that the file of an embedding model's adapter lacks.

    Such an adapter is saved for the backbone without a head, which AutoModel loads. Empty for other adapters.
    """
    if model.peft_config[name].task_type != "FEATURE_EXTRACTION":
        return ""
    return f"{PREFIX}{model.get_base_model().base_model_prefix}."


def adapter_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_adapter` writes, by their names in the file, on the CPU."""
    weights = get_peft_model_state_dict(model, _state(model), save_embedding_layers=False)
    return {name: tensor.cpu() for name, tensor in weights.items()}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, from which PEFT selects an adapter's.

    A state dict would have the base's tensors gathered: reading it makes FSDP2 reshard them.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    return parameters | dict(model.named_buffers(remove_duplicate=False))
