"""Compared with llama.cpp's reader of mmproj files, in cyllama's wheel: it computes transformers' image features."""

import gguf
import numpy as np
import pytest
import torch

from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.llamacpp import llamacpp_logits
from tests.helpers.vision_models import LINE_BREAK, MODELS, PROCESSOR, save_vision_model

pytestmark = pytest.mark.llamacpp
llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")


def by_llamacpp(report, image, added=0):
    """Embeddings [tokens, columns] of `image` uint8 [height, width, 3].

    Args:
        added: number of later layers of the language model that get features of the image, too.
    """
    text = llama_cpp.LlamaModel(str(report.path), llama_cpp.LlamaModelParams(), verbose=False)
    options = llama_cpp.MtmdContextParams()
    options.use_gpu = options.warmup = False
    context = llama_cpp.MtmdContext(str(report.mmproj), text, options)
    height, width, _ = image.shape
    bitmap = llama_cpp.MtmdBitmap.create_image(width, height, image.tobytes())
    chunks = context.tokenize(llama_cpp.get_default_media_marker(), [bitmap], False, True)
    embeddings = []
    for chunk in (chunks[index] for index in range(len(chunks))):
        if chunk.type == llama_cpp.MtmdInputChunkType.IMAGE:
            assert context.encode_chunk(chunk) == 0
            embeddings += context.get_output_embeddings(chunk.n_tokens, text.n_embd * (1 + added))
    return torch.tensor(embeddings)[:, : text.n_embd]


@torch.no_grad()
def by_transformers(model, image):
    """Features [tokens, columns] of `image` uint8 [height, width, 3], in Pixtral with its line breaks."""
    mean, std = (torch.tensor(PROCESSOR[f"image_{name}"]) for name in ("mean", "std"))
    values = ((torch.from_numpy(image) / 255 - mean) / std).permute(2, 0, 1)
    keys, vision = {"pixel_values": values[None]}, model.config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        prepare = Qwen2VLImageProcessorPil(do_resize=False, patch_size=vision.patch_size, **PROCESSOR)
        keys = dict(prepare(image, return_tensors="pt"))
    if vision.model_type == "pixtral":
        keys["image_sizes"] = torch.tensor([image.shape[:2]])
    if hasattr(model.config, "scale_factor"):  # images of a row, and tiles of an image
        keys["pixel_values"] = values[None, None]
    features = model.model.get_image_features(**keys, return_dict=True).pooler_output
    features = torch.cat(list(features)) if isinstance(features, (tuple, list)) else features.flatten(0, -2)
    if vision.model_type == "pixtral":
        columns = image.shape[1] // vision.patch_size // getattr(model.config, "spatial_merge_size", 1)
        rows = features.view(-1, columns, features.shape[-1])
        ending = model.get_input_embeddings().weight[LINE_BREAK].expand(len(rows), 1, -1)
        features = torch.cat([rows, ending], 1).flatten(0, 1)[:-1]
    return features


def difference(features, expected):
    assert features.shape == expected.shape
    return float((features - expected).norm() / expected.norm())


# name → height and width of an image, largest difference in f32
IMAGES = {
    "gemma3": (112, 112, 1e-3), "llava_siglip": (112, 112, 1e-3),
    "qwen2_5_vl": (168, 252, 1e-3),  # three by two windows, the last ones cut
    "qwen3_vl": (128, 192, 7e-3), "qwen3_5": (128, 192, 7e-3), "qwen3_5_moe": (128, 192, 7e-3),  # another grid
    "mistral3": (112, 168, 1e-3), "pixtral": (112, 168, 1e-3),
    "idefics3": (56, 56, 1e-3), "smolvlm": (56, 56, 1e-3),
    "glm4v": (112, 168, 1e-4), "glm46v": (112, 168, 1e-4), "glm4v_moe": (112, 168, 1e-4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mix"), [*((name, "f32") for name in IMAGES), *((name, "f16") for name in IMAGES), ("gemma3", "bf16")]
)
def test_embeddings_of_an_image_are_those_of_transformers(tmp_path, name, mix):
    model = save_vision_model(tmp_path / "model", name)
    report = export_gguf(tmp_path / "model", mix, tmp_path / "m.gguf", device="cpu")
    height, width, bound = IMAGES[name]
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    added = len(getattr(model.config.vision_config, "deepstack_visual_indexes", []))
    expected = by_transformers(model, image)
    if hasattr(model.config, "scale_factor"):  # llama.cpp shows an image of one tile twice, as a whole and as its tile
        expected = expected.repeat(2, 1)
    off = difference(by_llamacpp(report, image, added), expected)
    print(f"{name} {mix}: {off:.2g}")
    assert off < bound + {"f32": 0, "f16": 2e-3, "bf16": 8e-3}[mix]


@pytest.mark.parametrize("layers", [-2, -1, [1, -2]])
def test_embeddings_of_llava_but_for_the_readers_shift(tmp_path, layers):
    """llama.cpp appends the class token, but positions and row selection expect it first (its issue 25814). With
    positions in llama.cpp's order, all patches but the lost one equal transformers'."""
    model = save_vision_model(tmp_path / "model", "llava", vision_feature_layer=layers)
    report = export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    roll_positions(report.mmproj)
    image = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    assert difference(by_llamacpp(report, image)[:-1], by_transformers(model, image)[1:]) < 2e-3


def test_embeddings_of_internvl_but_for_the_readers_shift(tmp_path):
    model = save_vision_model(tmp_path / "model", "internvl")
    report = export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    roll_positions(report.mmproj)
    image = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    assert difference(by_llamacpp(report, image), by_transformers(model, image)) < 2e-3


def roll_positions(path):
    """Put the class token's position last."""
    positions = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}["v.position_embd.weight"].data
    positions[:] = np.roll(positions, -1, 0)
    positions.base.flush()


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_language_model_are_those_of_transformers(tmp_path, name):
    model = save_vision_model(tmp_path / "model", name)
    report = export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    ids = list(range(40, 80))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    logits = llamacpp_logits(report.path, ids)[:, : expected.shape[1]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-3 * float(expected.abs().max()))
