"""Compared with llama.cpp's reader of mmproj files, in cyllama's wheel: it computes transformers' image features."""

import inspect
from itertools import chain

import gguf
import numpy as np
import pytest
import torch

from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.llamacpp import llamacpp_logits
from tests.helpers.vision_models import IMAGE, LINE_BREAK, MODELS, PROCESSOR, save_vision_model

pytestmark = pytest.mark.llamacpp
llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
MARKER = llama_cpp.get_default_media_marker()


class Reader:
    """A language model and its mmproj file in llama.cpp, and the chunks of a text with an image.

    Args:
        image: uint8 [height, width, 3], at the place of llama.cpp's marker.
    """

    def __init__(self, report, text, image):
        self.model = TextModel(str(report.path), llama_cpp.LlamaModelParams(), verbose=False)
        options = llama_cpp.MtmdContextParams()
        options.use_gpu = options.warmup = False
        self.context = llama_cpp.MtmdContext(str(report.mmproj), self.model, options)
        height, width, _ = image.shape
        bitmap = llama_cpp.MtmdBitmap.create_image(width, height, image.tobytes())
        self.chunks = self.context.tokenize(text, [bitmap], False, True)

    def __iter__(self):
        """Yield the chunks, and whether each is an image."""
        for chunk in (self.chunks[index] for index in range(len(self.chunks))):
            yield chunk, chunk.type == llama_cpp.MtmdInputChunkType.IMAGE


class TextModel(llama_cpp.LlamaModel):
    """cyllama 0.2.18's get_logits_ith asks a model for what only its vocabulary has."""

    @property
    def n_vocab(self):
        return self.get_vocab().n_vocab


def by_llamacpp(report, image, added=0):
    """Embeddings [tokens, columns] of `image` uint8 [height, width, 3].

    Args:
        added: number of later layers of the language model that get features of the image, too.
    """
    reader, embeddings = Reader(report, MARKER, image), []
    for chunk in (chunk for chunk, is_image in reader if is_image):
        assert reader.context.encode_chunk(chunk) == 0
        embeddings += reader.context.get_output_embeddings(chunk.n_tokens, reader.model.n_embd * (1 + added))
    return torch.tensor(embeddings)[:, : reader.model.n_embd]


def inputs_of(model, image):
    """Inputs of transformers' towers for `image` uint8 [height, width, 3]."""
    mean, std = (torch.tensor(PROCESSOR[f"image_{name}"]) for name in ("mean", "std"))
    values = ((torch.from_numpy(image) / 255 - mean) / std).permute(2, 0, 1)
    vision = model.config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        prepare = Qwen2VLImageProcessorPil(do_resize=False, patch_size=vision.patch_size, **PROCESSOR)
        return dict(prepare(image, return_tensors="pt"))
    if vision.model_type in ("gemma4_vision", "siglip2_vision_model"):
        side = vision.patch_size
        rows = values.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 3, 4, 0)  # y, x, row, column, colour
        y, x = torch.meshgrid(*map(torch.arange, rows.shape[:2]), indexing="ij")
        places = torch.stack([x, y], -1).view(1, -1, 2)
        patches = {"pixel_values": rows.reshape(1, places.shape[1], -1)}
        if vision.model_type == "gemma4_vision":
            return patches | {"image_position_ids": places}
        mask = torch.ones(places.shape[:2], dtype=torch.long)
        return patches | {"spatial_shapes": torch.tensor([rows.shape[:2]]), "pixel_attention_mask": mask}
    if hasattr(model.config, "scale_factor"):  # llama.cpp shows an image of one tile twice, as a whole and as its tile
        return {"pixel_values": values.expand(1, 2, *values.shape)}
    sizes = {"image_sizes": torch.tensor([image.shape[:2]])} if vision.model_type == "pixtral" else {}
    return {"pixel_values": values[None]} | sizes


@torch.no_grad()
def by_transformers(model, image):
    """Features [tokens, columns] of `image` uint8 [height, width, 3], in Pixtral with its line breaks."""
    vision = model.config.vision_config
    features = model.model.get_image_features(**inputs_of(model, image), return_dict=True).pooler_output
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
    "mistral3": (112, 168, 1e-3), "ministral3": (112, 168, 1e-3), "pixtral": (112, 168, 1e-3),
    "idefics3": (56, 56, 1e-3), "smolvlm": (56, 56, 1e-3),
    "gemma4": (672, 912, 1e-3),  # llama.cpp enlarges small images
    "lfm2_vl": (256, 256, 1e-3),
    "glm4v": (112, 168, 1e-4), "glm46v": (112, 168, 1e-4), "glm4v_moe": (112, 168, 1e-4),
}  # fmt: skip


# llama.cpp adds a line break to uninitialised memory times 0, which may be NaN.
BROKEN_LINES = ("mistral3", "ministral3", "pixtral")
OTHERWISE = ("llava", "llava_siglip", "gemma4", *BROKEN_LINES)  # what the reader computes otherwise


@pytest.mark.parametrize(
    ("name", "mix"), [*((name, "f32") for name in IMAGES), *((name, "f16") for name in IMAGES), ("gemma3", "bf16")]
)
def test_embeddings_of_an_image_are_those_of_transformers(tmp_path, name, mix):
    model = save_vision_model(tmp_path / "model", name)
    report = export_gguf(tmp_path / "model", mix, tmp_path / "m.gguf", device="cpu")
    height, width, bound = IMAGES[name]
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    added = len(getattr(model.config.vision_config, "deepstack_visual_indexes", []))
    features, expected = by_llamacpp(report, image, added), by_transformers(model, image)
    if name in BROKEN_LINES:
        features = torch.where(features.isnan().all(1, keepdim=True), expected, features)
    if name == "gemma4":  # llama.cpp of May 2026 gives every embedding an RMS of 1, of November transformers' own
        expected /= expected.pow(2).mean(-1, keepdim=True).sqrt()
    off = difference(features, expected)
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


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OTHERWISE])
def test_logits_after_an_image_are_those_of_transformers(tmp_path, name):
    """Positions, masks, and what stands around an image are the family's."""
    model = save_vision_model(tmp_path / "model", name)
    report = export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    height, width, _ = IMAGES.get(name, (56, 56, 0))
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    reader = Reader(report, f"What is it? {MARKER}It is", image)
    keys = llama_cpp.LlamaContextParams()
    keys.n_ctx = keys.n_batch = keys.n_ubatch = 512
    keys.n_threads = keys.n_threads_batch = 1
    keys.type_k = keys.type_v = 0  # the cache in fp32
    context = llama_cpp.LlamaContext(reader.model, keys, verbose=False)
    reader.context.eval_chunks(context, reader.chunks, 0, 0, 512, True)
    logits = torch.tensor(np.array(context.get_logits_ith(-1)))[: model.config.get_text_config().vocab_size]

    ids = [[IMAGE] * chunk.n_tokens if is_image else list(chunk.get_text_tokens()) for chunk, is_image in reader]
    ids = torch.tensor([[*chain(*ids)]])
    types = {"token_type_ids", "mm_token_type_ids"} & inspect.signature(model.forward).parameters.keys()
    with torch.no_grad():
        expected = model(ids, **dict.fromkeys(types, (ids == IMAGE).long()), **inputs_of(model, image)).logits[0, -1]
    assert float((logits - expected).abs().max()) < 5e-3 * float(expected.abs().max())
    assert logits.argmax() == expected.argmax()


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_language_model_are_those_of_transformers(tmp_path, name):
    model = save_vision_model(tmp_path / "model", name)
    report = export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    ids = list(range(40, 80))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    logits = llamacpp_logits(report.path, ids)[:, : expected.shape[1]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-3 * float(expected.abs().max()))
