"""Models and tokenizers by name or path, quantized while they load."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..architectures import auto_class, beside_text
from ..checkpoint_files import check_checkpoint
from ..errors import CheckpointError, ConfigError, HalfbyteError, ModelError
from ..families import FAMILIES
from ..formats import FORMATS
from ..formats.base import FLOATS
from ..gguf.cache import checkpoint_folder, in_words
from ..hardware import chosen_device, compute_dtype
from ..notices import notice
from .choice import qat_format

FLEX = "flex_attention"
FLEX_HEAD = 16  # torch's kernels take no smaller head


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


def read_model_config(
    name_or_path: str, *, quantization: Any = None, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The transformers config of a model of any kind.

    Args:
        quantization: "keep": that of a GGUF file whose types are kept, which says what they are.

    Raises:
        ModelError: there is no such model.
    """
    from transformers import AutoConfig

    name_or_path = checkpoint_folder(name_or_path, quantization)
    _check_folder(name_or_path)
    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if refused := untrusted(error, name_or_path):
            raise refused from error
        raise ModelError(
            f"cannot read the model config of {name_or_path!r}: {error}",
            "give a folder with config.json, or a hub id you can reach",
        ) from error


def untrusted(error: Exception, name: str) -> ModelError | None:
    """What to say where transformers will not run the Python code in `name`; None for any other error."""
    if "trust_remote_code" not in str(error):
        return None
    return ModelError(
        f"{name} brings Python code of its own, which is run only where you say so",
        "read that code, then set trust_remote_code: true to train; afterwards add --trust-remote-code to the command"
        " (trust_remote_code=True in Python)",
    )


def load_model_config(
    name_or_path: str, *, quantization: Any = None, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The transformers config of a model.

    Args:
        quantization: as in `read_model_config`.

    Raises:
        ModelError: there is no such model, or it is neither a causal language model nor one that takes images and
            whose text part is of a family in `families`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = read_model_config(name_or_path, quantization=quantization, **options)
    own_code = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or own_code:
        return config
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ModelError(
            f"{name_or_path} is a {config.model_type} model, which is not a causal language model",
            "give a decoder-only language model",
        )
    known = [family.package for family in FAMILIES if family.tower]
    if config.model_type not in known:
        raise ModelError(
            f"{name_or_path} is a {config.model_type} model; of models that take images, halfbyte knows the text parts"
            f" of {' and '.join(known)}",
            "give one of those, or a decoder-only language model",
        )
    return config


def check_attention(config: Any, name: str | None, device: torch.device, *, trains: bool = False) -> None:
    """Whether the attention that a run asks for is there, for a model of `config`; builds one without weights.

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
        text = config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if device.type == "cpu":
            raise ConfigError(f"attn_implementation: {name} computes no gradients on a CPU", fix)
        if size < FLEX_HEAD:
            raise ConfigError(f"attn_implementation: {name} takes heads of {FLEX_HEAD} and more, not of {size}", fix)
    if "flash" in name and device.type == "cpu":
        raise ConfigError(f"attn_implementation: {name} runs on GPUs only", fix)


def load_model(
    name_or_path: str,
    *,
    load_in_4bit: bool = True,
    quant_type: str = "nf4",
    blocksize: int = 64,
    double_quant: bool = True,
    quantization: str | Mapping[str, str] | None = None,
    skip_quant_first_layers: int = 0,
    skip_quant_last_layers: int = 0,
    qat_scheme: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A causal language model of transformers, its linear layers (not the head) quantized.

    A vision tower and its projector, where there are any, are frozen and keep `dtype`.

    Shards are streamed: each tensor is quantized on the target device and dropped. A checkpoint that was quantized
    before is taken as it is. Embeddings, norms and the head keep `dtype`.

    Args:
        name_or_path: a folder with a Hugging Face checkpoint, a GGUF file, or a hub id.
        load_in_4bit: False loads everything in `dtype`, whatever the next six say.
        quant_type, blocksize, double_quant, quantization, skip_quant_first_layers, skip_quant_last_layers: see
            `halfbyte.models.quantizer.HalfbyteConfig`. `quantization` may be "keep", of a GGUF file: linear layers
            of a type that a format holds keep their values, the others are quantized as the first three say.
        qat_scheme: the format that linear layers of a model in 16 bits round their weights to in every forward.
        dtype: of computation and unquantized weights; "auto" picks what the hardware is fast in.
        device: default: the first accelerator, else the CPU.
        attn_implementation, revision, trust_remote_code: as in transformers.

    Raises:
        ModelError: no such model or format, or nothing in it can be quantized.
        CheckpointError: a file or tensor is missing, truncated or misshapen.
        ConfigError: there is nothing to keep, or no such attention here.
    """
    from .qat import fake_quantize_linears
    from .quantizer import HalfbyteConfig

    given, name_or_path = name_or_path, checkpoint_folder(name_or_path, quantization)
    target = chosen_device(device)
    config = load_model_config(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    check_attention(config, attn_implementation, target)
    check_checkpoint(Path(name_or_path))
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    usual: dict[str, Any] = {"bnb_4bit_quant_type": quant_type, "bnb_4bit_blocksize": blocksize}
    usual["bnb_4bit_use_double_quant"] = double_quant
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        config.quantization_config = _prequantized(stored, given, load_in_4bit) | usual
    elif load_in_4bit:
        options["quantization_config"] = HalfbyteConfig(
            **usual,
            quantization=quantization,
            skip_quant_first_layers=skip_quant_first_layers,
            skip_quant_last_layers=skip_quant_last_layers,
        )
    if attn_implementation is None and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        attn_implementation = "eager"  # Gemma 2: SDPA leaves scores uncapped, silently before transformers 5.23
    options |= {"dtype": resolve_dtype(dtype, target), "device_map": {"": target}}
    model = _from_pretrained(name_or_path, config=config, attn_implementation=attn_implementation, **options)
    for name in beside_text(model):
        model.get_submodule(name).requires_grad_(False)
    if qat_scheme is not None:
        fake_quantize_linears(model, qat_format(qat_scheme))
    return model.eval()


def _from_pretrained(name_or_path: str, *, config: Any, **options: Any) -> Any:
    """transformers' loading, with what is missing or misshapen named."""
    try:
        loaded: Any = auto_class(config).from_pretrained(
            name_or_path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **options,
        )
    except HalfbyteError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        if refused := untrusted(error, name_or_path):
            raise refused from error
        raise CheckpointError(f"cannot load {name_or_path!r}: {error}", "check the checkpoint's files") from error
    model, info = loaded
    _check_loaded(info, name_or_path)
    return model


def _prequantized(stored: Any, name: str, load_in_4bit: bool) -> dict[str, Any]:
    """The quantization entry of a pre-quantized checkpoint, rewritten so that halfbyte loads it."""
    entry = stored if isinstance(stored, dict) else stored.to_dict()
    if not load_in_4bit:
        raise ModelError(f"{name} holds quantized weights", "set load_in_4bit: true, or use the 16-bit model")
    if "kept" in entry:
        others = f"; quantized as the bnb_4bit keys say: {in_words(entry['others'])}" if entry["others"] else ""
        notice(f"kept-{name}", f"{name}: linear layers keep the file's values: {in_words(entry['kept'])}{others}")
        return entry
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
    skip = entry.get("llm_int8_skip_modules") or entry.get("modules_to_not_convert")
    return {"quant_method": "halfbyte", "quantization": format_.spec, "llm_int8_skip_modules": skip}


def _check_loaded(info: Any, name: str) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{name}: {len(missing)} tensors are missing from the checkpoint, first {missing[0]}",
            "re-download the checkpoint",
        )
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    if mismatched:
        raise CheckpointError(f"{name}: misshapen tensors: {mismatched[0]}", "check that config.json fits the weights")


def _check_folder(name_or_path: str) -> None:
    """A path that does not exist is told apart from a hub id, with the nearest existing folder."""
    path = Path(name_or_path)
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{path} has no config.json", "give a folder with a Hugging Face checkpoint")
    elif looks_local:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give a folder with a Hugging Face checkpoint"
        raise ModelError(f"there is no folder {path}", hint)


def load_tokenizer(
    name_or_path: str,
    *,
    quantization: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template_path: str | None = None,
) -> Any:
    """The tokenizer of a model, with an EOS token, a pad token and, when given, another chat template.

    Args:
        quantization: as in `read_model_config`; the tokenizer is the same, but a GGUF file is not unpacked twice.

    Raises:
        ModelError: there is no tokenizer, it has no EOS token, or the template file does not exist.
    """
    from transformers import AutoTokenizer

    name_or_path = checkpoint_folder(name_or_path, quantization)
    _check_folder(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if refused := untrusted(error, name_or_path):
            raise refused from error
        raise ModelError(
            f"cannot load the tokenizer of {name_or_path!r}: {error}", "put tokenizer.json beside the weights"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name_or_path} has no EOS token: a model trained with it would never stop",
            'set "eos_token" in tokenizer_config.json',
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        said = f"the tokenizer has no pad token; padding with {tokenizer.eos_token!r}, which stays trained as EOS"
        notice("pad-token", said)
    if chat_template_path is not None:
        template = Path(chat_template_path)
        if not template.exists():
            raise ModelError(f"chat_template_path: there is no file {template}", "give the path of a Jinja file")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer
