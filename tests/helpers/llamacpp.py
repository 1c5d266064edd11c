"""llama.cpp through llama-cpp-python: loading, perplexity, and its own quantizer."""

import ctypes

import gguf
import numpy as np
import pytest
import torch

from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.mixes import MIXES
from halfbyte.gguf.quants import Type

llama_cpp = pytest.importorskip("llama_cpp")
QUANTIZED = [mix for mix in MIXES if mix not in ("f32", "f16", "bf16")]
KEEP_FP32 = {"type_k": 0, "type_v": 0}  # the cache


def load(path, context=512):
    options = {
        "n_threads": 1,
        "n_threads_batch": 1,
        "verbose": False,
        "logits_all": True,
        "n_batch": context,
        "n_ubatch": context,
    }
    return llama_cpp.Llama(str(path), n_ctx=context, **options, **KEEP_FP32)


def quantized_by_llamacpp(path, mix, out):
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = int(MIXES[mix][1]), 1
    assert llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(options)) == 0
    return {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}


def perplexity(path, rows):
    model, total, count = load(path, 256), 0.0, 0
    for row in rows:
        model.reset()
        model.eval(row)
        scores = torch.log_softmax(torch.from_numpy(np.array(model.scores[: len(row)])), -1)
        total -= float(scores[:-1].gather(1, torch.tensor(row[1:])[:, None]).sum())
        count += len(row) - 1
    return np.exp(total / count)


def compare_with_llamacpps_quantizer(folder, path, rows, tmp_path, mix):
    """Weight error (RMS over all quantized weights) and perplexity, within half a percent of llama.cpp's."""
    export_gguf(folder, mix, tmp_path / "m.gguf", device="cpu")
    theirs = quantized_by_llamacpp(path, mix, tmp_path / "theirs.gguf")
    exact = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    off = {"ours": 0.0, "theirs": 0.0}
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for name, tensor in theirs.items():
        assert tensor.tensor_type == ours[name].tensor_type
        if tensor.tensor_type != Type.F32:
            for who, each in (("ours", ours[name]), ("theirs", tensor)):
                off[who] += float(((gguf.quants.dequantize(each.data, each.tensor_type) - exact[name]) ** 2).sum())
    ratio = np.sqrt(off["ours"] / off["theirs"])
    mine, other = perplexity(tmp_path / "m.gguf", rows), perplexity(tmp_path / "theirs.gguf", rows)
    print(f"{folder.name} {mix}: weight error {ratio:.4f} of llama.cpp's, perplexity {mine:.4f} and {other:.4f}")
    assert ratio <= 1.005
    assert mine <= 1.005 * other
