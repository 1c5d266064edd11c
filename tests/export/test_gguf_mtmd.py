"""Compared with llama.cpp's reader of mmproj files: it computes transformers' image features."""

import ctypes

import gguf
import numpy as np
import pytest
import torch

from halfbyte.export.gguf_model import export_gguf
from tests.helpers.vision_models import MODELS, PROCESSOR, save_vision_model

pytestmark = pytest.mark.llamacpp
llama_cpp = pytest.importorskip("llama_cpp")
mtmd = pytest.importorskip("llama_cpp.mtmd_cpp")


def by_llamacpp(report, image):
    """Embeddings [tokens, columns] of `image` uint8 [height, width, 3]."""
    text = llama_cpp.Llama(str(report.path), n_ctx=64, n_threads=1, verbose=False)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.warmup, options.flash_attn_type = False, 1, False, 0
    context = mtmd.mtmd_init_from_file(str(report.mmproj).encode(), text.model, options)
    assert context
    assert mtmd.mtmd_support_vision(context)
    chunks = mtmd.mtmd_input_chunks_init()
    pixels = np.ascontiguousarray(image)
    height, width, _ = pixels.shape
    bitmap = mtmd.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
    marker = mtmd.mtmd_default_marker()
    prompt = mtmd.mtmd_input_text(marker, len(marker), False, True)
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(prompt), bitmaps, 1) == 0
    found = None
    for index in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, index)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            assert mtmd.mtmd_encode_chunk(context, chunk) == 0
            shape = (mtmd.mtmd_input_chunk_get_n_tokens(chunk), text.n_embd())
            found = torch.from_numpy(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), shape).copy())
    mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_input_chunks_free(chunks)
    mtmd.mtmd_free(context)
    return found


@torch.no_grad()
def by_transformers(model, image):
    mean, std = (torch.tensor(PROCESSOR[f"image_{each}"]) for each in ("mean", "std"))
    values = ((torch.from_numpy(image) / 255 - mean) / std).permute(2, 0, 1)
    keys = {"pixel_values": values[None]}
    if model.config.model_type == "qwen2_5_vl":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        prepare = Qwen2VLImageProcessorPil(do_resize=False, **PROCESSOR)
        keys = dict(prepare(image, return_tensors="pt"))
    found = model.model.get_image_features(**keys, return_dict=True).pooler_output
    return found[0] if isinstance(found, (tuple, list)) else found.flatten(0, -2)


def difference(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("mix", "bound"), [("f32", 1e-3), ("q8_0", 2e-3), ("bf16", 8e-3)])
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_embeddings_of_an_image_are_those_of_transformers(tmp_path, name, mix, bound):
    """The image has the tower's size, or in Qwen2.5-VL three by two windows, the last ones cut."""
    model = save_vision_model(tmp_path / "model", name)
    report = export_gguf(tmp_path / "model", mix, tmp_path / "m.gguf", device="cpu")
    size = (168, 252, 3) if name == "qwen2_5_vl" else (112, 112, 3)
    image = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    assert difference(by_llamacpp(report, image), by_transformers(model, image)) < bound


@pytest.mark.parametrize("layers", [-2, -1, [1, -2]])
def test_embeddings_of_llava_but_for_the_readers_shift(tmp_path, layers):
    """llama.cpp appends the class token, but positions and row selection expect it first (its issue 25814). With
    positions in llama.cpp's order, all patches but the lost one equal transformers'."""
    model = save_vision_model(tmp_path / "model", "llava", vision_feature_layer=layers)
    report = export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(report.mmproj, "r+").tensors}
    positions = stored["v.position_embd.weight"].data
    positions[:] = np.roll(positions, -1, 0)
    positions.base.flush()
    image = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    assert difference(by_llamacpp(report, image)[:-1], by_transformers(model, image)[1:]) < 2e-3


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_language_model_are_those_of_transformers(tmp_path, name):
    model = save_vision_model(tmp_path / "model", name)
    report = export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    ids = list(range(40, 80))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    text = llama_cpp.Llama(str(report.path), n_ctx=256, n_threads=1, verbose=False, logits_all=True, type_k=0, type_v=0)
    text.eval(ids)
    found = torch.from_numpy(np.array(text.scores[: len(ids)]))
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3 * float(expected.abs().max()))
