"""The vision part of a model as llama.cpp's mmproj file: tower and projector, architecture "clip".

A row of `TOWERS` is what one kind of vision model becomes: the tensors that its graph in llama.cpp reads (tools/mtmd),
no fewer and no others. Names are those of the gguf library where it has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH, GGUFType, GGUFWriter, TensorNameMap, VisionProjectorType, get_tensor_name_map
from torch import Tensor

from halfbyte.errors import CheckpointError, ModelError
from halfbyte.notices import notice

from .tensors import BESIDE_TEXT, Planned, Weight
from .types import Type

BOTH = (".weight", ".bias")
# What the gguf library has no name for, or that of another family
NAMES = {
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
}
BLOCK = ("ln1", "ln2", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down")
SERVE_OTHERWISE = "serve the model with transformers or vLLM"
DYNAMIC_SIZE = 560  # the side of the images that llama.cpp plans memory for, where any size goes
WINDOW = 112  # pixels, fixed in llama.cpp


@dataclass(frozen=True)
class Tower:
    """One row.

    Args:
        projector: what llama.cpp calls it.
        model_types: of the vision config.
        activations: of the tower's MLP, in transformers' names → the flag in the file, if it has one.
        outside: tensors beside the layers.
        block: parts of a layer: those with a bias, and those without.
        unused: names in the checkpoint of tensors that the language model gets nothing from.
    """

    projector: str
    model_types: tuple[str, ...]
    activations: Mapping[str, str]
    outside: frozenset[str]
    block: tuple[tuple[str, ...], tuple[str, ...]]
    unused: re.Pattern[str]

    def tensors(self, layers: int) -> set[str]:
        """Names of all tensors of the file."""
        biased, plain = self.block
        parts = [part + kind for part in biased for kind in BOTH] + [f"{part}.weight" for part in plain]
        return {*self.outside} | {f"v.blk.{layer}.{part}" for layer in range(layers) for part in parts}


TANH = {"gelu_pytorch_tanh": "use_gelu", "gelu": "use_gelu"}  # llama.cpp has the tanh form alone
TOWERS = {
    "gemma3": Tower(
        VisionProjectorType.GEMMA3,
        ("siglip_vision_model",),
        TANH,
        frozenset(
            {"v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight", "v.post_ln.weight", "v.post_ln.bias",
             "mm.input_projection.weight", "mm.soft_emb_norm.weight"}
        ),
        (BLOCK, ()),
        re.compile(r"vision_model\.head\.|\.position_ids$"),
    ),
    "llava": Tower(
        "mlp",
        ("clip_vision_model",),
        TANH | {"quick_gelu": ""},
        frozenset(
            {"v.class_embd", "v.patch_embd.weight", "v.position_embd.weight", "v.pre_ln.weight", "v.pre_ln.bias",
             "mm.0.weight", "mm.0.bias", "mm.2.weight", "mm.2.bias"}
        ),
        (BLOCK, ()),
        re.compile(r"vision_model\.post_layernorm\.|\.position_ids$"),  # features come from before it
    ),
    "qwen2_5_vl": Tower(
        VisionProjectorType.QWEN25VL,
        ("qwen2_5_vl", "qwen2_5_vl_vision"),
        {"silu": "use_silu"},
        frozenset(
            {"v.patch_embd.weight", "v.patch_embd.weight.1", "v.post_ln.weight",
             "mm.0.weight", "mm.0.bias", "mm.2.weight", "mm.2.bias"}
        ),
        ((*BLOCK[2:], "ffn_gate"), BLOCK[:2]),
        re.compile(r"$^"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Vision:
    """The vision part of a model.

    Attributes:
        config: of the whole model, of transformers.
        processor: preprocessor_config.json.
        tower: its row.
    """

    config: Any
    processor: Mapping[str, Any]
    tower: Tower

    @property
    def layers(self) -> int:
        vision = self.config.vision_config
        return int(vision.depth if self.config.model_type == "qwen2_5_vl" else vision.num_hidden_layers)


def vision_of(config: Any, folder: Path, names: list[str]) -> Vision | None:
    """The vision part of the model in `folder`; None if it has none.

    Args:
        config: of the whole model, of transformers.
        names: of its tensors.

    Raises:
        ModelError: one that the file could not stand for: the first tensor, or the key of the config.
        CheckpointError: no preprocessor_config.json.
    """
    beside = [name for name in names if BESIDE_TEXT.search(name)]
    if not beside:
        return None
    tower = TOWERS.get(config.model_type)
    if tower is None:
        known = ", ".join(TOWERS)
        raise ModelError(
            f"{min(beside)} is beside the language model, and GGUF export knows no such part of {config.model_type}"
            f" models (it knows those of {known})",
            SERVE_OTHERWISE,
        )
    _check_config(config, tower)
    if config.model_type == "llava":
        notice(
            "gguf-llava-shift",
            "llama.cpp of 2025 and 2026 moves the patches of LLaVA's images by one and loses the first (its issue"
            " 25814); the file is as it should be",
        )
    return Vision(config, _processor(folder), tower)


def _processor(folder: Path) -> dict[str, Any]:
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            stored: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
            stored = stored.get("image_processor", stored)
            if "image_mean" in stored and "image_std" in stored:
                return stored
    raise CheckpointError(
        f"{folder} has no preprocessor_config.json with image_mean and image_std",
        "copy it from the model that this one was made from",
    )


def _check_config(config: Any, tower: Tower) -> None:
    """Refuse what llama.cpp's graph would compute otherwise."""
    vision, expected = config.vision_config, {}
    if vision.model_type not in tower.model_types:
        expected["vision_config.model_type"] = (vision.model_type, " or ".join(tower.model_types))
    if vision.hidden_act not in tower.activations:
        expected["vision_config.hidden_act"] = (vision.hidden_act, " or ".join(tower.activations))
    if vision.intermediate_size == vision.hidden_size:  # the reader takes up for down then
        expected["vision_config.intermediate_size"] = (vision.intermediate_size, "any but hidden_size")
    if config.model_type == "llava":
        if config.projector_hidden_act not in ("gelu", "gelu_pytorch_tanh"):
            expected["projector_hidden_act"] = (config.projector_hidden_act, "gelu")
        if config.vision_feature_select_strategy != "default":
            expected["vision_feature_select_strategy"] = (config.vision_feature_select_strategy, "default")
    if config.model_type == "qwen2_5_vl":
        full = list(vision.fullatt_block_indexes)
        period = full[0] + 1 if full else 0
        if not full or full != list(range(period - 1, vision.depth, period)):
            expected["vision_config.fullatt_block_indexes"] = (full, "every n-th layer")
        for key, value in (("window_size", WINDOW), ("spatial_merge_size", 2), ("temporal_patch_size", 2)):
            if getattr(vision, key) != value:
                expected[f"vision_config.{key}"] = (getattr(vision, key), str(value))
    for key, (value, wanted) in expected.items():
        raise ModelError(f"config.json: {key}: {value}: llama.cpp's graph has {wanted}", SERVE_OTHERWISE)


# --- metadata --------------------------------------------------------------------------------------------------------


def add_vision(writer: GGUFWriter, vision: Vision) -> None:
    """Everything llama.cpp needs to build the graph and to prepare images."""
    config, part, tower = vision.config, vision.config.vision_config, vision.tower
    qwen = config.model_type == "qwen2_5_vl"
    writer.add_type(GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(tower.projector)
    writer.add_vision_block_count(vision.layers)
    writer.add_vision_embedding_length(part.hidden_size)
    writer.add_vision_feed_forward_length(part.intermediate_size)
    writer.add_vision_head_count(part.num_heads if qwen else part.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(1e-6 if qwen else part.layer_norm_eps)  # Qwen's is fixed in its code
    writer.add_vision_patch_size(part.patch_size)
    writer.add_vision_image_size(DYNAMIC_SIZE if qwen else part.image_size)
    writer.add_vision_projection_dim(part.out_hidden_size if qwen else config.get_text_config().hidden_size)
    writer.add_vision_image_mean(vision.processor["image_mean"])
    writer.add_vision_image_std(vision.processor["image_std"])
    if flag := tower.activations[part.hidden_act]:
        getattr(writer, f"add_vision_{flag}")(True)
    if qwen:
        writer.add_vision_spatial_merge_size(part.spatial_merge_size)
        writer.add_vision_n_wa_pattern(part.fullatt_block_indexes[0] + 1)
    elif config.model_type == "gemma3":
        side = part.image_size // part.patch_size
        writer.add_vision_projector_scale_factor(side // int(config.mm_tokens_per_image**0.5))
    else:
        writer.add_bool("clip.has_llava_projector", True)
        writer.add_array("clip.vision.feature_layer", feature_layers(config))


def vision_metadata(vision: Vision) -> dict[str, object]:
    """Metadata of the file to look at again."""
    return {"general.architecture": "clip", "clip.vision.block_count": vision.layers}


def feature_layers(config: Any) -> list[int]:
    """After how many layers LLaVA takes features."""
    given, layers = config.vision_feature_layer, config.vision_config.num_hidden_layers
    return [each % (layers + 1) for each in (given if isinstance(given, list) else [given])]


# --- tensors ---------------------------------------------------------------------------------------------------------


def plan_vision(weights: Mapping[str, Weight], vision: Vision) -> list[Planned]:
    """The tensors of the file, in the order of the weights.

    Raises:
        ModelError: a weight that the graph has no place for.
        CheckpointError: one that it needs is missing.
    """
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision.layers)
    wanted = vision.tower.tensors(vision.layers)
    planned = {}
    for key, weight in weights.items():
        if not BESIDE_TEXT.search(key):
            continue
        plain = re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", key.removeprefix("model."))
        if vision.tower.unused.search(plain):
            continue
        for part in _placed(_name(plain, names), weight):
            if part.name not in wanted:
                raise ModelError(
                    f"{key} has no place in llama.cpp's graph of {vision.config.model_type}", SERVE_OTHERWISE
                )
            planned[part.name] = part
    if missing := wanted - planned.keys():
        raise CheckpointError(
            f"the checkpoint lacks the tensor that becomes {min(missing)} in the file", "re-download the checkpoint"
        )
    return list(planned.values())


def _name(plain: str, names: TensorNameMap) -> str:
    """The name in the file; empty if there is none."""
    stem, kind = next(((plain.removesuffix(each), each) for each in BOTH if plain.endswith(each)), (plain, ""))
    if stem in NAMES:
        return NAMES[stem] + kind
    return names.get_name(plain, try_suffixes=BOTH) or ""


def _placed(name: str, weight: Weight) -> Iterator[Planned]:
    """What of the file a weight of the checkpoint becomes."""
    if ".attn_qkv." in name:
        shape = (weight.shape[0] // 3, *weight.shape[1:])
        for index, part in enumerate("qkv"):
            yield Planned(name.replace("attn_qkv", f"attn_{part}"), shape, [partial(_third, weight, index)])
    elif name == "v.patch_embd.weight" and len(weight.shape) == 5:
        shape = (*weight.shape[:2], *weight.shape[3:])
        for index, suffix in enumerate(["", ".1"]):
            yield Planned(name + suffix, shape, [partial(_frame, weight, index)])
    elif name == "mm.soft_emb_norm.weight":  # RMSNorm multiplies by 1 + weight; the file holds the sum
        yield Planned(name, weight.shape, [lambda: weight.read().float() + 1])
    else:
        yield Planned(name, weight.shape, [weight.read])


def _third(weight: Weight, index: int) -> Tensor:
    return weight.read().chunk(3)[index]


def _frame(weight: Weight, index: int) -> Tensor:
    """Of a convolution over pairs of frames [out, colours, frames, side, side], what one frame meets."""
    return weight.read()[:, :, index].contiguous()


def vision_types(planned: list[Planned], mix: Type) -> dict[str, Type]:
    """Name → type. Matrices get F16, or BF16 or F32 where the language model has it; what is added stays F32.

    Args:
        mix: type of most of the language model's tensors.
    """
    base = mix if mix in (Type.F32, Type.BF16) else Type.F16

    def type_of(each: Planned) -> Type:
        if len(each.shape) == 1 or "position_embd" in each.name:
            return Type.F32
        return Type.F32 if base == Type.BF16 and "patch_embd" in each.name else base  # no convolution in BF16

    return {each.name: type_of(each) for each in planned}
