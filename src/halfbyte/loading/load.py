"""Models and tokenizers by name or path, quantized while they load."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import Origin, Storage, storage_of
from ..formats import FORMATS
from ..formats.base import FLOATS
from ..modeling.architectures import auto_class, beside_text
from ..modeling.layer_sizes import layer_sizes, widest
from ..modeling.tiny import tiny_config
from ..parallel import ALONE, Mesh
from ..reading import open_bytes, read_text
from ..reading.boundary import answered
from ..reading.tensors import safetensors_files
from ..utils.errors import ConfigError, ModelError
from ..utils.hardware import chosen_device, compute_dtype
from ..utils.notices import notice
from ..utils.text import counts
from ..utils.transformers_logging import no_loading_bars, quiet
from .assignment import left_whole
from .completeness import check_finite, check_loaded
from .find import ModelFiles, find_model, place_of, trusted_only
from .sharded import Elsewhere, Share, load_together

TOKENIZER_KINDS = {"chat_template": (str, dict, type(None)), "model_max_length": (int, float)}
TEMPLATE = "give the path of a Jinja file as chat_template_path"
LONG = 2**31  # bytes of weights that take seconds to load
FLEX = "flex_attention"
FLEX_HEAD = 16  # torch's kernels take no smaller head
TORCHS_OWN = ("eager", "sdpa", FLEX)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A torch dtype from its name; "auto" is what the device multiplies fast, and is said."""
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
    """Whether the attention that a run asks for is there, for a model of `config`; builds one without weights, and runs
    a small one of its kind where gradients are wanted.

    Args:
        name: `attn_implementation`; None for transformers' choice.
        trains: whether gradients are wanted.

    Raises:
        ConfigError: it is not, and why.
    """
    if name is None:
        return
    fix = "leave attn_implementation out (sdpa)"
    try:
        with torch.device("meta"):
            auto_class(config).from_config(copy.deepcopy(config), attn_implementation=name)
    except (ImportError, ValueError) as error:  # transformers says which package is missing, or which names it knows
        raise ConfigError(f"attn_implementation: {name}: {str(error).splitlines()[0]}", fix) from error
    if name == FLEX and trains:
        size = min(each.head_dim for each in layer_sizes(config.get_text_config()))
        if device.type == "cpu":
            raise ConfigError(f"attn_implementation: {name} computes no gradients on a CPU", fix)
        if size < FLEX_HEAD:
            raise ConfigError(f"attn_implementation: {name} takes heads of {FLEX_HEAD} and more, not of {size}", fix)
    if "flash" in name and device.type == "cpu":
        raise ConfigError(f"attn_implementation: {name} runs on GPUs only", fix)
    if trains and name not in TORCHS_OWN and (raised := _step_with(config, name, device)):
        usual = _step_with(config, "sdpa", device) and _step_with(config, "eager", device)
        if usual is None:  # else it is the small model that does not run
            said = str(raised).strip().partition("\n")[0] or type(raised).__name__
            raise ConfigError(f"attn_implementation: {name} does not train this model on {device}: {said}", fix)


def _step_with(config: Any, attention: str, device: torch.device) -> Exception | None:
    """What a small model of `config`, with heads of its size, raises in a forward and backward with that attention."""
    try:
        small = tiny_config(config)
        small.__dict__.pop("quantization_config", None)
        text, size = small.get_text_config(), widest(config.get_text_config()).head_dim
        if vars(text).get("head_dim"):
            text.head_dim = size
        else:
            text.hidden_size = size * text.num_attention_heads
        dtype = compute_dtype(device).dtype
        model = auto_class(small).from_config(small, attn_implementation=attention, dtype=dtype).to(device).train()
        tokens = torch.arange(10, 20, device=device)[None]
        model(input_ids=tokens, use_cache=False).logits.float().sum().backward()
    except Exception as error:  # whatever the attention's own library raises
        return error
    return None


def load_model(
    name_or_path: str | ModelFiles,
    storage: Storage | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    mesh: Mesh = ALONE,
    along: tuple[str, ...] = (),
    elsewhere: Elsewhere | None = None,
    experts_on_host: Collection[int] = (),
    **keys: Any,
) -> Any:
    """A causal language model of transformers, its linear layers (not the head) quantized.

    A vision tower and its projector, where there are any, are frozen and keep `dtype`. Shards are streamed: each tensor
    is quantized on the target device and dropped. A checkpoint that was quantized before is taken as it is. Norms, the
    head and embeddings keep `dtype`, but for those that give each layer a vector of its own (Gemma 3n and 4).

    Args:
        name_or_path: a folder with a Hugging Face checkpoint, a GGUF file, or a hub id; or what `find_model` found.
        storage: how its linear layers are stored; default: as `keys` say.
        dtype: of computation and unquantized weights; "auto" picks what the hardware is fast in.
        device: default: the first accelerator, else the CPU.
        attn_implementation, revision, trust_remote_code: as in transformers.
        mesh, along, elsewhere: processes that call this at once, and what each keeps: see `divided.Share`.
        experts_on_host: decoder layers whose packed experts are left in the host's memory, see `memory.expert_offload`.
        keys: `load_in_4bit`, `bnb_4bit_quant_type`, `bnb_4bit_blocksize`, `bnb_4bit_use_double_quant`, `quantization`,
            `skip_quant_first_layers`, `skip_quant_last_layers`, `qat_scheme`, as in a run's configuration.

    Raises:
        ModelError: no such model or format, or nothing in it can be quantized.
        CheckpointError: a file or tensor is missing, truncated or misshapen.
        ConfigError: no such key, keys that contradict each other, nothing to keep, or no such attention here.
    """
    from ..qat.model import fake_quantize_linears, qat_format

    storage = storage_of(storage, **keys)
    asked = Origin(str(name_or_path), revision, trust_remote_code, storage.keep)
    files = find_model(asked) if isinstance(name_or_path, str) else name_or_path
    target, config = chosen_device(device), copy.deepcopy(files.config)
    check_attention(config, attn_implementation, target)
    if attn_implementation is None and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        attn_implementation = "eager"  # Gemma 2: SDPA leaves scores uncapped, silently before transformers 5.23
    share = Share(mesh, along, elsewhere)
    options = _quantized_by(config, files.name, storage, share.of_memory, experts_on_host)
    options |= {"revision": files.place.revision, "trust_remote_code": files.place.trust_remote_code}
    options |= {"attn_implementation": attn_implementation, "dtype": resolve_dtype(dtype, target)}
    load = functools.partial(_from_pretrained, files.place.name, config=config, bars=mesh.is_main, **options)
    model = load(device=target) if mesh.size == 1 else load_together(files.place, config, share, target, load)
    _check_no_conv1d(model, files.name)
    for name in beside_text(model):
        model.get_submodule(name).requires_grad_(False)
    if storage.qat_scheme is not None:
        fake_quantize_linears(model, qat_format(storage.qat_scheme))
    return model.eval()


def _check_no_conv1d(model: Any, name: str) -> None:
    if getattr(getattr(model, "hf_quantizer", None), "conv1d", None):
        raise ModelError(
            f"{name} has Conv1D layers, which runs of halfbyte neither train nor merge",
            "load it by transformers: from_pretrained(name, quantization_config=HalfbyteConfig())",
        )


def check_stored(files: ModelFiles, storage: Storage) -> None:
    """Whether a model that was quantized before is stored as something that loads.

    Raises:
        ModelError: it is not, or `storage` asks for 16 bits.
        CheckpointError: its config does not say what it is stored as.
    """
    said = f"quantization_config in the config of {files.name} cannot be read"
    with answered(said, "correct it, or use the 16-bit model"):
        _quantized_by(copy.deepcopy(files.config), files.name, storage)


def _quantized_by(
    config: Any, name: str, storage: Storage, ways: int = 1, on_host: Collection[int] = ()
) -> dict[str, Any]:
    """What transformers is to be told so that `HalfbyteQuantizer` loads; a checkpoint that was quantized before says it
    in its own `config`, where it is put."""
    from .quantizer import HalfbyteConfig

    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        config.quantization_config = _prequantized(stored, name, storage) | {"ways": ways, "on_host": [*on_host]}
        return {}
    own = HalfbyteConfig(storage, ways=ways, on_host=on_host) if storage.quantized else None
    return {"quantization_config": own} if own else {}


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
    """transformers' loading, with what is missing, misshapen or broken named.

    Args:
        bars: whether transformers may show how far it is.
        cls: the model's class; None: as `config` says.
        state_dict: entry → what to read it from; None: from the files.
    """
    # transformers takes a name or entries, and from entries only the class itself
    source = {} if state_dict is None else {"state_dict": state_dict}
    with (
        trusted_only(name_or_path),
        answered(f"cannot load {name_or_path!r}", "check the checkpoint's files"),
        quiet(),
        contextlib.nullcontext() if bars and not _is_small(name_or_path) else no_loading_bars(),
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
            _named(model, name_or_path, options)
    check_loaded(info, name_or_path, config)
    check_finite(model, name_or_path)
    return model


def _named(model: Any, name_or_path: str, options: Mapping[str, Any]) -> None:
    """What transformers sets by the name of a checkpoint: that name, and how the model generates."""
    model.name_or_path = model.config.name_or_path = name_or_path
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        from transformers import GenerationConfig

        keys = {"revision": options["revision"]}
        try:
            model.generation_config = GenerationConfig.from_pretrained(name_or_path, **keys)
        except OSError:  # no file: as its config says
            model.generation_config = GenerationConfig.from_pretrained(
                name_or_path, config_file_name="config.json", _from_model_config=True, **keys
            )


def _is_small(name_or_path: str) -> bool:
    """Whether loading ends before a bar says anything; of a hub id that is not known."""
    folder = Path(name_or_path)
    return folder.is_dir() and sum(file.stat().st_size for file in safetensors_files(folder)) < LONG


def _prequantized(stored: Any, name: str, storage: Storage) -> dict[str, Any]:
    """The quantization entry of a pre-quantized checkpoint, rewritten as options of `HalfbyteConfig`."""
    entry = stored if isinstance(stored, dict) else stored.to_dict()
    if not storage.quantized:
        raise ModelError(f"{name} holds quantized weights", "set load_in_4bit: true, or use the 16-bit model")
    if "kept" in entry:
        others = f"; quantized as the bnb_4bit keys say: {counts(entry['others'])}" if entry["others"] else ""
        notice(f"kept-{name}", f"{name}: linear layers keep the file's values: {counts(entry['kept'])}{others}")
        return entry | {"storage": storage}
    if entry.get("quant_method") == "halfbyte":
        notice("prequantized", f"{name} is already quantized ({', '.join(entry['formats'])}); its bytes are kept")
        return entry
    found = (cls.from_quantization_config(entry) for cls in FORMATS.values())
    format_ = next(filter(None, found), None)
    if format_ is None:
        raise ModelError(
            f"{name} is stored as {entry.get('quant_method')}, which halfbyte does not load yet",
            "use the 16-bit model, or a bitsandbytes one",
        )
    notice("prequantized", f"{name} is already quantized ({format_.spec}); its bytes are kept")
    skip = left_whole(entry)
    as_stored = Storage((("*", format_.spec),))
    return {"quant_method": "halfbyte", "storage": as_stored, "llm_int8_skip_modules": skip}


def load_tokenizer(
    name_or_path: str | Origin,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template_path: str | None = None,
) -> Any:
    """The tokenizer of a model, with an EOS token, a pad token and, when given, another chat template.

    Args:
        name_or_path: as in `load_model`; or an `Origin`, which says revision and trust itself.

    Raises:
        ModelError: there is no tokenizer, it has no EOS token, or the template file does not exist.
    """
    from transformers import AutoTokenizer

    if isinstance(name_or_path, str):
        name_or_path = Origin(name_or_path, revision, trust_remote_code)
    place = place_of(name_or_path)
    name = place.name
    there = Path(name, "tokenizer.json").is_file()
    fix = "correct or re-download the tokenizer's files" if there else "put tokenizer.json beside the weights"
    files = " (tokenizer.json, tokenizer_config.json)" if there else ""
    if there:
        with open_bytes(Path(name, "tokenizer.json"), ModelError, fix):
            pass  # what is wrong with the file itself is said of it
    with trusted_only(name), answered(f"cannot load the tokenizer of {name!r}{files}", fix, ModelError):
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=place.revision, trust_remote_code=place.trust_remote_code
        )
    for key, kinds in TOKENIZER_KINDS.items():
        if not isinstance(value := getattr(tokenizer, key), kinds):
            raise ModelError(f"{name}/tokenizer_config.json: {key} cannot be {value!r:.80}", fix)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name} has no EOS token: a model trained with it would never stop",
            'set "eos_token" in tokenizer_config.json',
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        said = f"the tokenizer has no pad token; padding with {tokenizer.eos_token!r}, which stays trained as EOS"
        notice("pad-token", said)
    if chat_template_path is not None:
        tokenizer.chat_template = read_text(chat_template_path, ModelError, TEMPLATE)
    return tokenizer
