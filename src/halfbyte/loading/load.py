"""Load models and tokenizers by name or path, quantizing while they load."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ..adapters.initial import AdapterInitialiser, ResidualBase
from ..config import Origin, Storage, storage_of
from ..formats import of_checkpoint
from ..formats.base import FLOATS
from ..mesh.mesh import SINGLE_PROCESS, Mesh
from ..modeling.architectures import auto_class, non_text_modules, refuse_conv1d
from ..modeling.config_facts import default_attention, layer_sizes, max_layer_sizes
from ..modeling.tiny_model import tiny_config
from ..reading import open_bytes, read_text
from ..reading.boundary import answered
from ..reading.tensors import safetensors_files
from ..tensor import QuantizedTensor
from ..utils.errors import ConfigError, ModelError, first_line
from ..utils.hardware import chosen_device, compute_dtype
from ..utils.notices import notice
from ..utils.streams import no_loading_bars, quiet_transformers
from ..utils.text import counts
from ..utils.waiting import drawing_waits, waiting
from .assignment import skipped_modules
from .completeness import check_finite, check_loaded, meta_model
from .find import ModelFiles, explain_remote_code, find_model, local_origin
from .sharded import ModelShare, OtherStages, load_together

TOKENIZER_KINDS = {"chat_template": (str, dict, type(None)), "model_max_length": (int, float)}
TEMPLATE_FIX = "give the path of a Jinja file as chat_template_path"
LARGE_CHECKPOINT = 2**31  # bytes of weights from which loading shows a progress bar
FLEX = "flex_attention"
MIN_FLEX_HEAD = 16  # head width that torch's kernels need
TORCH_ATTENTION = ("eager", "sdpa", FLEX)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a name; "auto" selects one that is fast on the device, and logs it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        named = getattr(torch, dtype, None)
        if named not in FLOATS:
            raise ModelError(f"no model computes in dtype {dtype!r}", "use auto, bfloat16, float16 or float32")
        return named
    chosen = compute_dtype(device)
    notice(f"dtype-{device.type}", f"computing in {str(chosen.dtype).removeprefix('torch.')}: {chosen.reason}")
    return chosen.dtype


def check_attention(config: Any, name: str | None, device: torch.device, *, trains: bool = False) -> None:
    """Check that an attention implementation is available for a model of `config`.

    Builds a model without weights and, if the run needs gradients, runs a tiny model.

    Args:
        name: `attn_implementation`; None for transformers' default.
        trains: whether the run needs gradients.

    Raises:
        ConfigError: the implementation is not available.
    """
    if name is None:
        return
    fix = "remove attn_implementation (default: sdpa)"
    try:
        with torch.device("meta"):
            auto_class(config).from_config(copy.deepcopy(config), attn_implementation=name)
    except (ImportError, ValueError) as error:  # transformers names the missing package, or the known names
        raise ConfigError(f"attn_implementation: {name}: {first_line(error)}", fix) from error
    if name == FLEX and trains:
        size = min(sizes.head_dim for sizes in layer_sizes(config.get_text_config()))
        if device.type == "cpu":
            raise ConfigError(f"attn_implementation: {name} computes no gradients on a CPU", fix)
        if size < MIN_FLEX_HEAD:
            raise ConfigError(f"attn_implementation: {name} needs heads of at least {MIN_FLEX_HEAD}, not {size}", fix)
    if "flash" in name and device.type == "cpu":
        raise ConfigError(f"attn_implementation: {name} runs on GPUs only", fix)
    if trains and name not in TORCH_ATTENTION and (raised := _try_attention(config, name, device)):
        usual = _try_attention(config, "sdpa", device) and _try_attention(config, "eager", device)
        if usual is None:  # otherwise the tiny model itself fails
            reason = first_line(raised)
            raise ConfigError(f"attn_implementation: {name} does not train this model on {device}: {reason}", fix)


def _try_attention(config: Any, attention: str, device: torch.device) -> Exception | None:
    """Return the error that a tiny model of `config`, with its head width, raises in a training step, or None."""
    try:
        small = tiny_config(config)
        small.__dict__.pop("quantization_config", None)
        text, size = small.get_text_config(), max_layer_sizes(config.get_text_config()).head_dim
        if vars(text).get("head_dim"):
            text.head_dim = size
        else:
            text.hidden_size = size * text.num_attention_heads
        dtype = compute_dtype(device).dtype
        model = auto_class(small).from_config(small, attn_implementation=attention, dtype=dtype).to(device).train()
        tokens = torch.arange(10, 20, device=device)[None]
        model(input_ids=tokens, use_cache=False).logits.float().sum().backward()
    except Exception as error:  # the attention's library may raise anything
        return error
    return None


@waiting("loading the weights")
def load_model(
    name_or_path: str | ModelFiles,
    storage: Storage | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    mesh: Mesh = SINGLE_PROCESS,
    along: tuple[str, ...] = (),
    elsewhere: OtherStages | None = None,
    experts_on_host: Collection[int] = (),
    initial: ResidualBase | None = None,
    **keys: Any,
) -> Any:
    """Load a causal language model of transformers, and quantize its linear layers except the head.

    A vision tower and its projector are frozen and keep `dtype`; `quantize_vision_tower` quantizes the tower. Shards
    are streamed: each tensor is quantized on the target device and dropped. A pre-quantized checkpoint keeps its codes.
    Norms, the head and embeddings keep `dtype`, except per-layer embeddings (Gemma 3n and 4), which are quantized.

    Args:
        name_or_path: a folder with a Hugging Face checkpoint, a GGUF file, or a hub id; or a result of `find_model`.
        storage: storage formats of the linear layers; default: from `keys`.
        dtype: dtype of computation and unquantized weights; "auto" selects one that the hardware is fast in.
        device: default: the first accelerator, else the CPU.
        attn_implementation, revision, trust_remote_code: as in transformers.
        mesh, along, elsewhere: ranks that call this together, and what each keeps: see `sharded.ModelShare`.
        experts_on_host: decoder layers whose quantized experts stay in host memory, see `loading.expert_offload`.
        initial: changes the base's weights while they load, for an adapter whose `init_lora_weights` reads them; see
            `adapters.initial`.
        keys: `load_in_4bit`, `bnb_4bit_quant_type`, `bnb_4bit_blocksize`, `bnb_4bit_use_double_quant`, `quantization`,
            `quantize_vision_tower`, `skip_quant_first_layers`, `skip_quant_last_layers`, `qat_scheme`, as in a run's
            configuration.

    Raises:
        ModelError: the model or format does not exist, no layer can be quantized, or the initialisation does not fit.
        CheckpointError: a file or tensor is missing, truncated or misshapen.
        ConfigError: a key is unknown, keys contradict each other, `keep` finds no GGUF types, or the attention is not
            available.
    """
    from ..adapters.lora import add_adapter
    from ..qat.model import fake_quantize_linears, qat_format, round_sums

    storage = storage_of(storage, **keys)
    origin = Origin(str(name_or_path), revision, trust_remote_code, storage.keep)
    files = find_model(origin) if isinstance(name_or_path, str) else name_or_path
    target, config = chosen_device(device), copy.deepcopy(files.config)
    check_attention(config, attn_implementation, target)
    attn_implementation = attn_implementation or default_attention(config.get_text_config())
    if isinstance(initial, AdapterInitialiser):
        check_not_quantized(files)
        initial.prepare(add_adapter(meta_model(files.origin, config), initial.adapter))
    share = ModelShare(mesh, along, elsewhere)
    options = _quantization_options(config, files.name, storage, share.memory_degree, experts_on_host)
    quantization = options.get("quantization_config")
    if quantization is not None:
        quantization.initial = initial
    options |= {"revision": files.origin.revision, "trust_remote_code": files.origin.trust_remote_code}
    options |= {"attn_implementation": attn_implementation, "dtype": resolve_dtype(dtype, target)}
    load = functools.partial(_from_pretrained, files.origin.name, config=config, bars=mesh.is_main, **options)
    model = load(device=target) if mesh.size == 1 else load_together(files.origin, config, share, target, load)
    if initial is not None:
        if mesh.size > 1:
            initial.gather(mesh)
        initial.finish(model)
        if quantization is not None:
            quantization.initial = None
    if target.type == "cpu":  # copy views of a mapped file: one of them would keep all pages of the file in memory
        for tensor in (*model.parameters(), *model.buffers()):
            for stored in tensor.parts.values() if isinstance(tensor, QuantizedTensor) else (tensor,):
                if not stored.untyped_storage().resizable():
                    stored.data = stored.data.clone()
    refuse_conv1d(model, getattr(getattr(model, "hf_quantizer", None), "conv1d", ()))
    for name in non_text_modules(model):
        model.get_submodule(name).requires_grad_(False)
    if storage.qat_scheme is not None:
        fake_quantize_linears(model, qat_format(storage.qat_scheme))
    if storage.merge_aware:
        round_sums(model)
    return model.eval()


def mapped_model(files: ModelFiles) -> Any:
    """Return the model in the checkpoint's dtype on the CPU, its weights views of the mapped files.

    Raises:
        ModelError: the checkpoint is quantized.
        CheckpointError: as `load_model`.
    """
    config = copy.deepcopy(files.config)
    check_not_quantized(files)
    return _from_pretrained(
        files.origin.name,
        config=config,
        device=torch.device("cpu"),
        bars=True,
        revision=files.origin.revision,
        trust_remote_code=files.origin.trust_remote_code,
        attn_implementation=default_attention(config.get_text_config()),
        dtype="auto",
    ).eval()


def check_not_quantized(files: ModelFiles) -> None:
    """Check that a checkpoint has the 16-bit weights that an initialisation reads.

    Raises:
        ModelError: it stores them quantized.
    """
    if getattr(files.config, "quantization_config", None) is not None:
        raise ModelError(
            f"init_lora_weights reads 16-bit weights, and {files.name} stores them quantized",
            "name the 16-bit model, or set init_lora_weights: true",
        )


def check_stored(files: ModelFiles, storage: Storage) -> None:
    """Check that a model that was quantized before is stored in a format that loads.

    Raises:
        ModelError: the format is unsupported, or `storage` requests 16 bits.
        CheckpointError: its config does not describe the format.
    """
    message = f"quantization_config in the config of {files.name} cannot be read"
    with answered(message, "correct it, or use the 16-bit model"):
        _quantization_options(copy.deepcopy(files.config), files.name, storage)


def _quantization_options(
    config: Any, name: str, storage: Storage, ranks: int = 1, on_host: Collection[int] = ()
) -> dict[str, Any]:
    """Return from_pretrained's options that make `HalfbyteQuantizer` load the model.

    For a pre-quantized checkpoint they are written into its own `config`.
    """
    from .quantizer import HalfbyteConfig

    stored = getattr(config, "quantization_config", None)
    if stored is None:
        quantization = HalfbyteConfig(storage, ways=ranks, on_host=on_host) if storage.quantized else None
        return {"quantization_config": quantization} if quantization else {}
    entry = stored if isinstance(stored, dict) else stored.to_dict()
    if not storage.quantized:
        raise ModelError(f"{name} holds quantized weights", "set load_in_4bit: true, or use the 16-bit model")
    if storage.vision is not None:
        fix = "use the 16-bit model, or remove quantize_vision_tower"
        raise ModelError(f"quantize_vision_tower: {name} holds quantized weights", fix)
    if storage.merge_aware:
        raise ModelError(f"merge_aware: {name} holds quantized weights", "use the 16-bit model, or remove merge_aware")
    if "kept" in entry:
        decoded = f"; quantizing others by the bnb_4bit keys: {counts(entry['others'])}" if entry["others"] else ""
        notice(f"kept-{name}", f"{name}: keeping the file's values of linear layers: {counts(entry['kept'])}{decoded}")
        entry = entry | {"storage": storage}
    elif entry.get("quant_method") == "halfbyte":
        notice("prequantized", f"{name} is already quantized ({', '.join(entry['formats'])}): keeping its bytes")
    elif format_ := of_checkpoint(entry):
        notice("prequantized", f"{name} is already quantized ({format_.spec}): keeping its bytes")
        skipped = skipped_modules(entry)
        as_stored = Storage((("*", format_.spec),))
        entry = {"quant_method": "halfbyte", "storage": as_stored, "llm_int8_skip_modules": skipped}
    else:
        raise ModelError(
            f"{name} is stored as {entry.get('quant_method')}, which halfbyte does not load yet",
            "use the 16-bit model, or a bitsandbytes one",
        )
    config.quantization_config = entry | {"ways": ranks, "on_host": [*on_host]}
    return {}


def _from_pretrained(
    name_or_path: str,
    *,
    config: Any,
    device: torch.device,
    bars: bool,
    cls: Any = None,
    state_dict: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run transformers' loading, and name missing, misshapen or damaged tensors in errors.

    Args:
        bars: whether transformers may show progress bars.
        cls: the model's class; default: from `config`.
        state_dict: entry → slice to read it from; default: the checkpoint's files.
    """
    # from_pretrained takes a name or entries; with entries, only the concrete class accepts them
    source = {} if state_dict is None else {"state_dict": state_dict}
    with (
        explain_remote_code(name_or_path),
        answered(f"cannot load {name_or_path!r}", "check the checkpoint's files"),
        quiet_transformers(),
        drawing_waits() if bars and not _is_small(name_or_path) else no_loading_bars(),
    ):
        model, info = (cls or auto_class(config)).from_pretrained(
            None if source else name_or_path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            device_map={"": device},
            **source,
            **options,
        )
        if source:
            # transformers derives the name and the generation config from a checkpoint's name.
            model.name_or_path = model.config.name_or_path = name_or_path
            if model.can_generate() and hasattr(model, "adjust_generation_fn"):
                from transformers import GenerationConfig

                keys = {"revision": options["revision"]}
                try:
                    model.generation_config = GenerationConfig.from_pretrained(name_or_path, **keys)
                except OSError:  # no file: use the model's config
                    model.generation_config = GenerationConfig.from_pretrained(
                        name_or_path, config_file_name="config.json", _from_model_config=True, **keys
                    )
    check_loaded(info, name_or_path, config)
    check_finite(model, name_or_path)
    return model


def _is_small(name_or_path: str) -> bool:
    """Return whether a local checkpoint loads too fast for a progress bar to help; False for a hub id."""
    folder = Path(name_or_path)
    return folder.is_dir() and sum(file.stat().st_size for file in safetensors_files(folder)) < LARGE_CHECKPOINT


def load_tokenizer(
    name_or_path: str | Origin,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template_path: str | None = None,
) -> Any:
    """Load a model's tokenizer, with an EOS token, a pad token and, if given, another chat template.

    Args:
        name_or_path: as in `load_model`; or an `Origin`, which includes revision and trust.
        revision, trust_remote_code: as in transformers.
        chat_template_path: a Jinja file with the chat template.

    Raises:
        ModelError: there is no tokenizer, it has no EOS token, or the template file does not exist.
    """
    from transformers import AutoTokenizer

    if isinstance(name_or_path, str):
        name_or_path = Origin(name_or_path, revision, trust_remote_code)
    origin = local_origin(name_or_path)
    name = origin.name
    local = Path(name, "tokenizer.json").is_file()
    fix = "correct or re-download the tokenizer's files" if local else "add tokenizer.json to the model's folder"
    files = " (tokenizer.json, tokenizer_config.json)" if local else ""
    if local:
        with open_bytes(Path(name, "tokenizer.json"), ModelError, fix):
            pass  # raises an error that names the file if it cannot be read
    with explain_remote_code(name), answered(f"cannot load the tokenizer of {name!r}{files}", fix, ModelError):
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=origin.revision, trust_remote_code=origin.trust_remote_code
        )
    for key, types in TOKENIZER_KINDS.items():
        if not isinstance(value := getattr(tokenizer, key), types):
            raise ModelError(f"{name}/tokenizer_config.json: {key} cannot be {value!r:.80}", fix)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name} has no EOS token: a model trained with it would never stop",
            'set "eos_token" in tokenizer_config.json',
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        message = f"the tokenizer has no pad token: padding with {tokenizer.eos_token!r}, which is still trained as EOS"
        notice("pad-token", message)
    if chat_template_path is not None:
        tokenizer.chat_template = read_chat_template(Path(chat_template_path))
    return tokenizer


def read_chat_template(path: Path) -> str | dict[str, str]:
    """Read a Jinja file; with transformers' files of further named templates next to it, all of them by name."""
    default = read_text(path, ModelError, TEMPLATE_FIX)
    further = sorted((path.parent / "additional_chat_templates").glob("*.jinja"))
    if path.name != "chat_template.jinja" or not further:
        return default
    return {"default": default} | {file.stem: read_text(file, ModelError, TEMPLATE_FIX) for file in further}
