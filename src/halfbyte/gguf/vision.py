"""Export of a model's vision tower and projector as llama.cpp's mmproj file, architecture "clip".

`modeling.families.Tower` describes each kind of tower. Tensor names are the gguf library's where it has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, GGUFWriter, TensorNameMap, get_tensor_name_map
from torch import Tensor

from ..modeling.families import Tower, family_of_config, tower_of, towers
from ..reading import look, read_json
from ..reading.boundary import answered
from ..utils.errors import CheckpointError, ModelError
from ..utils.notices import notice
from .quants import Type
from .tensors import BESIDE_TEXT, KINDS, Planned, Weight, interleaved

CLIP = MODEL_ARCH_NAMES[MODEL_ARCH.MMPROJ]
LINE_BREAK = "v.token_embd.img_break"
DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}  # parts of a merger, and names in the file
SERVE_OTHERWISE = "serve the model with transformers or vLLM"


@dataclass(frozen=True)
class Vision:
    """The vision part of a model.

    Attributes:
        config: transformers config of the full model.
        processor: preprocessor_config.json, completed.
        tower: its kind of vision tower.
    """

    config: Any
    processor: Mapping[str, Any]
    tower: Tower

    @property
    def layers(self) -> int:
        """Number of the tower's layers."""
        return int(getattr(self.config.vision_config, self.tower.layers))

    @property
    def tensors(self) -> set[str]:
        """Names of the tensors that every such file has."""
        names = [name + suffix for name in self.tower.biased for suffix in KINDS]
        names += [f"{name}.weight" for name in self.tower.plain]
        merged = [f"v.deepstack.{layer}.{name}" for layer in self.deepstack for name in DEEPSTACK.values()]
        return {*self.tower.outside} | {name + suffix for name in merged for suffix in KINDS} | self._in_layers(names)

    @property
    def optional_tensors(self) -> set[str]:
        """Names of the tensors that only some of these files have."""
        parts = {name for name in self.tower.optional if not name.startswith(("v.", "mm."))}
        return {*self.tower.optional} - parts | self._in_layers(parts)

    def _in_layers(self, names: Iterable[str]) -> set[str]:
        return {f"v.blk.{layer}.{name}" for layer in range(self.layers) for name in names}

    @property
    def deepstack(self) -> list[int]:
        """Layers whose outputs are added in the language model's first layers."""
        return list(getattr(self.config.vision_config, self.tower.deepstack)) if self.tower.deepstack else []

    @property
    def names(self) -> dict[str, str]:
        """Checkpoint name → name in the file, without suffixes, where the gguf library has none."""
        mergers = {
            f"visual.deepstack_merger_list.{number}.{part}": f"v.deepstack.{layer}.{name}"
            for number, layer in enumerate(self.deepstack)
            for part, name in DEEPSTACK.items()
        }
        tensors = {
            key.format(bid=layer): name.format(bid=layer)
            for key, name in self.tower.names.items()
            for layer in range(self.layers)
        }
        return tensors | mergers

    @property
    def image_size(self) -> int:
        """Image side that llama.cpp reserves memory for, in pixels."""
        vision_config = self.config.vision_config
        if self.tower.positions:
            return int(math.isqrt(getattr(vision_config, self.tower.positions)) * vision_config.patch_size)
        return square_side(self.tower.image_size or vision_config.image_size)


def square_side(size: int | Sequence[int]) -> int:
    """Side of a square in pixels, from one number or height and width."""
    return int(size if isinstance(size, int) else size[0])


def vision_of(
    config: Any, folder: Path, names: list[str], pixels: tuple[int | None, int | None] = (None, None)
) -> Vision | None:
    """Return the vision part of the model in `folder`, or None.

    A model with an unsupported vision part returns None with a notice if its language model also exists as a model of
    its own.

    Args:
        config: transformers config of the full model.
        names: of its tensors.
        pixels: fewest and most of an image in training; None: the processor's limit.

    Raises:
        ModelError: an unsupported vision part, by its first tensor or the config key.
        CheckpointError: no preprocessor_config.json, or one without keys that the file needs.
    """
    vision = [name for name in names if BESIDE_TEXT.search(name)]
    if not vision:
        return None
    tower = tower_of(config)
    text = family_of_config(config.get_text_config())
    if tower is None and text and text.package == config.model_type and text.gguf.text_alone:
        notice(
            f"gguf-{config.model_type}",
            f"exporting the language model only: GGUF export does not support the vision part of {config.model_type}"
            f" models ({min(vision)} and {len(vision) - 1} more tensors)",
        )
        return None
    if tower is None:
        supported = ", ".join(towers())
        raise ModelError(
            f"{min(vision)} is not part of the language model, and GGUF export does not support the vision part of"
            f" {config.model_type} models (it supports {supported})",
            SERVE_OTHERWISE,
        )
    _check_config(config, tower)
    if tower.notice:
        notice(f"gguf-{config.model_type}", tower.notice)
    part = Vision(config, _processor(folder, tower), tower)
    if any(tower.image_tokens):
        _report_token_limits(part, pixels)
    return part


def _report_token_limits(vision: Vision, pixels: tuple[int | None, int | None]) -> None:
    """Report the flags with which llama.cpp scales images as the processor does, whose limits no key of the file has.

    Args:
        pixels: as in `vision_of`.
    """
    tower, vision_config = vision.tower, vision.config.vision_config
    frames = vision_config.temporal_patch_size if tower.limited_frames else 1
    unit = (vision_config.patch_size * vision_config.spatial_merge_size) ** 2
    size = vision.processor.get("size") or {}
    flags = []
    for name, edge, limit, default in zip(
        ("min", "max"), ("shortest_edge", "longest_edge"), pixels, tower.image_tokens, strict=True
    ):
        limit = limit or vision.processor.get(f"{name}_pixels") or size.get(edge, 0) // frames
        if limit and limit // unit != default:
            flags.append(f"--image-{name}-tokens {max(limit // unit, 1)}")
    if flags:
        least, most = tower.image_tokens
        notice(
            "gguf-image-tokens",
            f"llama.cpp scales images to between {least} and {most} tokens, the model was trained with other limits:"
            f" start llama-server and llama-mtmd-cli with {' '.join(flags)}",
        )


def _processor(folder: Path, tower: Tower) -> dict[str, Any]:
    """Read the image processor's configuration, with the defaults of its class for what the file leaves out.

    `image_mean` and `image_std` are those of values in [0, 1], as llama.cpp normalises them.

    Raises:
        CheckpointError: no such file, or keys that are neither in it nor in its class.
    """
    file, stored = _processor_file(folder)
    needed = {"image_mean", "image_std", *(name.partition(".")[0] for name in tower.processor_keys.values())}
    if missing := sorted(needed - stored.keys()):
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        with answered(f"{file} has no {missing[0]}, and its class cannot say the default", f"add {missing[0]} to it"):
            defaults = AutoImageProcessor.from_pretrained(folder, backend="pil").to_dict()
        stored = defaults | stored
    for key in ("image_mean", "image_std"):
        if not isinstance(stored.get(key), Sequence) or len(stored[key]) != 3:
            raise CheckpointError(f"{file}: {key}: {stored.get(key)} is no list of three numbers", f"correct {key}")
    if stored.get("do_normalize") is False:
        stored |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    factor = 255 * stored.get("rescale_factor", 1 / 255) if stored.get("do_rescale", True) else 255.0
    return stored | {key: [value / factor for value in stored[key]] for key in ("image_mean", "image_std")}


def _processor_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file with the image processor's configuration, which transformers reads, and the configuration."""
    for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", "")):
        if look(folder / name, CheckpointError):
            stored = read_json(folder / name, CheckpointError, "re-download the checkpoint")
            stored = stored.get(key) if key and isinstance(stored, dict) else stored
            if isinstance(stored, dict):
                return folder / name, stored
    raise CheckpointError(
        f"{folder} has no preprocessor_config.json", "copy it from the model that this one was made from"
    )


def _check_config(config: Any, tower: Tower) -> None:
    """Refuse config values that llama.cpp's graph does not support."""
    vision = config.vision_config
    expected = {}
    if vision.model_type not in tower.model_types:
        types = [name for kind in towers()[config.model_type] for name in kind.model_types]
        expected["vision_config.model_type"] = (vision.model_type, " or ".join(types))
    if (activation := getattr(vision, tower.activation)) not in tower.activations:
        expected[f"vision_config.{tower.activation}"] = (activation, " or ".join(tower.activations))
    if vision.intermediate_size == vision.hidden_size:  # llama.cpp would confuse up and down
        expected["vision_config.intermediate_size"] = (vision.intermediate_size, "any but hidden_size")
    for key, values in tower.required.items():
        value = _setting(config, key)
        if value not in values:
            expected[key] = (value, " or ".join(map(str, values)))
    if tower.causal_widths:
        text = config.get_text_config()
        attention = "null" if text.hidden_size in tower.causal_widths else "vision"
        if (text.use_bidirectional_attention or "null") != attention:
            expected["text_config.use_bidirectional_attention"] = (text.use_bidirectional_attention, attention)
    if tower.unwindowed:
        full = list(getattr(vision, tower.unwindowed))
        period = full[0] + 1 if full else 0
        if not full or full != list(range(period - 1, getattr(vision, tower.layers), period)):
            expected[f"vision_config.{tower.unwindowed}"] = (full, "every n-th layer")
    for key, (value, supported) in expected.items():
        raise ModelError(f"config.json: {key}: {value}: llama.cpp's graph supports {supported}", SERVE_OTHERWISE)


def _setting(config: Any, name: str) -> Any:
    """Value of a dotted key in a config or mapping; None without one."""
    for step in name.split("."):
        config = config.get(step) if isinstance(config, Mapping) else getattr(config, step, None)
    return config


# --- metadata --------------------------------------------------------------------------------------------------------


def add_vision(writer: GGUFWriter, vision: Vision) -> None:
    """Write the keys that llama.cpp builds the vision graph and prepares images from."""
    config = vision.config
    vision_config = config.vision_config
    tower = vision.tower
    writer.add_type(GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(tower.projector)
    writer.add_vision_block_count(vision.layers)
    writer.add_vision_embedding_length(vision_config.hidden_size)
    writer.add_vision_feed_forward_length(vision_config.intermediate_size)
    writer.add_vision_head_count(getattr(vision_config, tower.heads))
    writer.add_vision_attention_layernorm_eps(tower.epsilon or getattr(vision_config, tower.norm))
    writer.add_vision_patch_size(square_side(vision_config.patch_size))
    writer.add_vision_image_size(vision.image_size)
    width = getattr(vision_config, tower.projected) if tower.projected else config.get_text_config().hidden_size
    writer.add_vision_projection_dim(width)
    writer.add_vision_image_mean(vision.processor["image_mean"])
    writer.add_vision_image_std(vision.processor["image_std"])
    if flag := tower.activations[getattr(vision_config, tower.activation)]:
        getattr(writer, f"add_vision_{flag}")(True)
    if hasattr(vision_config, "spatial_merge_size"):
        writer.add_vision_spatial_merge_size(vision_config.spatial_merge_size)
    for key, name in tower.keys.items():
        number = _setting(config, name)
        writer.add_uint32(key, round(1 / number) if number < 1 else number)
    for key, name in tower.processor_keys.items():
        if (number := _setting(vision.processor, name)) is not None:
            writer.add_uint32(key, number)
    if vision.deepstack:
        writer.add_vision_is_deepstack_layers([layer in vision.deepstack for layer in range(vision.layers)])
    if tower.unwindowed:
        writer.add_vision_n_wa_pattern(getattr(vision_config, tower.unwindowed)[0] + 1)
    if tower.pooled:
        side = vision_config.image_size // vision_config.patch_size
        writer.add_vision_projector_scale_factor(side // int(getattr(config, tower.pooled) ** 0.5))
    if tower.feature_layers:
        setting = getattr(config, tower.feature_layers)
        feature_layers = setting if isinstance(setting, list) else [setting]
        writer.add_bool("clip.has_llava_projector", True)
        writer.add_array("clip.vision.feature_layer", [layer % (vision.layers + 1) for layer in feature_layers])


def vision_keys(vision: Vision) -> dict[str, object]:
    """Keys of the file to verify after writing."""
    return {"general.architecture": CLIP, "clip.vision.block_count": vision.layers}


# --- tensors ---------------------------------------------------------------------------------------------------------


def plan_vision(weights: Mapping[str, Weight], vision: Vision, tokenizer: Any) -> list[Planned]:
    """Plan the tensors of the file, in the order of the weights.

    Args:
        weights: checkpoint name → weight.
        tokenizer: of the language model, whose token for a line break's embedding some graphs read.

    Raises:
        ModelError: a weight that the graph does not have, or a tokenizer without this token.
        CheckpointError: a missing weight.
    """
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision.layers)
    expected = vision.tensors
    optional = vision.optional_tensors
    unused = re.compile(vision.tower.unused)
    planned = {}
    for key, weight in weights.items():
        if not BESIDE_TEXT.search(key):
            continue
        if unused.search(_stem(key)):
            continue
        for tensor in _parts_in_file(_name(key, names, vision), weight, vision):
            if tensor.name not in expected | optional:
                raise ModelError(
                    f"{key} has no place in llama.cpp's graph of {vision.config.model_type}", SERVE_OTHERWISE
                )
            planned[tensor.name] = tensor
    if vision.tower.line_break:
        planned[LINE_BREAK] = _line_break(weights, vision.tower.line_break, tokenizer)
    if missing := expected - planned.keys():
        raise CheckpointError(
            f"the checkpoint lacks the tensor that becomes {min(missing)} in the file", "re-download the checkpoint"
        )
    return list(planned.values())


def _stem(key: str) -> str:
    """Checkpoint name as the gguf library has it for most towers."""
    return re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", key.removeprefix("model."))


def _name(key: str, names: TensorNameMap, vision: Vision) -> str:
    """Name in the file; empty if the graph has no such tensor."""
    suffix = next((ending for ending in KINDS if key.endswith(ending)), "")
    short = key.removeprefix("model.")
    if name := vision.names.get(short.removesuffix(suffix)):
        return name + suffix
    candidates = (names.get_name(name, try_suffixes=KINDS) for name in (_stem(key), short, f"model.{short}"))
    return next(filter(None, candidates), "")


def _line_break(weights: Mapping[str, Weight], token: str, tokenizer: Any) -> Planned:
    """Plan the embedding of the token after each row of patches, [columns].

    Raises:
        ModelError: the tokenizer has no such token.
    """
    row = tokenizer.get_vocab().get(token)
    if row is None:
        raise ModelError(f"the tokenizer has no token {token}, which llama.cpp puts after each row of patches",
                         "use the model's own tokenizer")  # fmt: skip
    weight = next(weight for key, weight in weights.items() if key.endswith("embed_tokens.weight"))
    return Planned(LINE_BREAK, weight.shape[1:], [lambda: weight.read()[row]])


def _parts_in_file(name: str, weight: Weight, vision: Vision) -> Iterator[Planned]:
    """Yield the tensors of the file that a checkpoint weight becomes."""
    tower = vision.tower
    if ".attn_qkv." in name and "attn_qkv" not in tower.biased + tower.plain:
        shape = (weight.shape[0] // 3, *weight.shape[1:])
        for index, letter in enumerate("qkv"):
            name_in_file = name.replace("attn_qkv", f"attn_{letter}")
            yield Planned(name_in_file, shape, [partial(_third, weight, index)])
    elif name == "v.patch_embd.weight" and len(weight.shape) == 5:
        shape = (*weight.shape[:2], *weight.shape[3:])
        for index, suffix in enumerate(["", ".1"]):  # a convolution over pairs of frames [out, colours, frames, …]
            yield Planned(name + suffix, shape, [partial(_frame, weight, index)])
    elif name == "mm.soft_emb_norm.weight":  # RMSNorm multiplies by 1 + weight, which the file stores
        yield Planned(name, weight.shape, [lambda: weight.read().float() + 1])
    elif tower.permuted and (".attn_q." in name or ".attn_k." in name):
        heads = getattr(vision.config.vision_config, tower.heads)
        yield Planned(name, weight.shape, [lambda: interleaved(weight.read(), heads)])
    elif name in ("v.class_embd", "v.position_embd.weight") and weight.shape[0] == 1 and len(weight.shape) == 3:
        shape = weight.shape[-1:] if weight.shape[1] == 1 else weight.shape[1:]
        yield Planned(name, shape, [lambda: weight.read().view(shape)])
    elif name == "v.patch_embd.weight" and len(weight.shape) == 2:  # of patches [rows, columns, colours]
        side = square_side(vision.config.vision_config.patch_size)
        shape = (weight.shape[0], weight.shape[1] // side**2, side, side)
        yield Planned(name, shape, [partial(_patch_kernel, weight, side)])
    elif not weight.shape:
        yield Planned(name, (1,), [lambda: weight.read().view(1)])
    else:
        yield Planned(name, weight.shape, [weight.read])


def _patch_kernel(weight: Weight, side: int) -> Tensor:
    return weight.read().unflatten(1, (side, side, -1)).permute(0, 3, 1, 2).contiguous()


def _third(weight: Weight, index: int) -> Tensor:
    return weight.read().chunk(3)[index]


def _frame(weight: Weight, index: int) -> Tensor:
    return weight.read()[:, :, index].contiguous()


def vision_types(planned: list[Planned], mix: Type) -> dict[str, Type]:
    """Name → type. Matrices get F16, or the language model's BF16 or F32; biases and position embeddings get F32.

    Args:
        mix: type of most of the language model's tensors.
    """
    base = mix if mix in (Type.F32, Type.BF16) else Type.F16

    def type_of(tensor: Planned) -> Type:
        if len(tensor.shape) == 1 or "position_embd" in tensor.name:
            return Type.F32
        return Type.F32 if base == Type.BF16 and "patch_embd" in tensor.name else base  # llama.cpp: no BF16 convolution

    return {tensor.name: type_of(tensor) for tensor in planned}
