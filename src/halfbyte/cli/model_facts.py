"""Facts about a model besides the storage of its weights: fused training, decoding, packing, GGUF.

The facts hold for the model's own config, so they are found by trying them on a tiny model of it, without weights.
"""

from __future__ import annotations

from typing import Any

from ..data.collate import PackedCollator
from ..generation.adapters import Unsupported
from ..generation.decoder import Decoder
from ..gguf.graph import checked_family
from ..modeling.families import family_of_config, tower_of
from ..modeling.packing import isolate_documents
from ..modeling.patch import EXPERTS, patch, unpatch
from ..modeling.tiny_model import tiny_model
from ..utils.errors import HalfbyteError, ModelError, first_line
from ..utils.notices import silent

PACKING = {
    "positions": "position ids keep packed documents apart",
    "bounds": "halfbyte passes document bounds to the layers",
    "masks": "halfbyte makes the attention masks",
    "unpacked": "halfbyte unpacks documents in each step, which takes more time",
}
GENERATING = ("decoding", "GGUF")  # facts about models that generate text


def model_facts(config: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    """Return lines for `check`: family, decoding, packing and GGUF of a model, by transformers' `config`."""
    family = family_of_config(config.get_text_config())
    name = "not one that halfbyte knows" if family is None else family.name
    with silent():
        try:
            model = tiny_model(config, trust_remote_code=trust_remote_code).requires_grad_(False)
        except Exception as error:  # the model's own code may raise anything for tiny sizes
            fused = "fused on GPUs" if family and family.patched else "trains with transformers' own forwards"
            tested = {"family": f"{name} · {fused} (no tiny model shows more: {type(error).__name__})"}
        else:
            tested = {
                "family": f"{name} · {_fused(model)}",
                "decoding": _decoding(model),
                "packing": _packing(model),
            }
        return tested | {"GGUF": _gguf(config)}


def _fused(model: Any) -> str:
    """Describe what training on a GPU fuses."""
    report = patch(model)
    unpatch(model)
    lost = [f"{operation}: {reason}" for operation, reason in report.unfused if operation != EXPERTS]
    if not report.fused:
        return "trains with transformers' own forwards"
    unfused = f" · not fused: {'; '.join(lost)}" if lost else ""
    return f"fused on GPUs: {', '.join(report.fused)}{unfused}"


def _decoding(model: Any) -> str:
    try:
        Decoder(model, [None], 8)
    except Unsupported as reason:
        return f"transformers' own, which is slower: {reason}"
    return "halfbyte's own, on GPUs as CUDA graphs"


def _packing(model: Any) -> str:
    tokens = range(10, model.get_input_embeddings().weight.shape[0])
    try:
        return PACKING[isolate_documents(model, PackedCollator(0), key="packing", length=256, tokens=tokens).method]
    except HalfbyteError as error:
        return f"no: {error.message}"
    except Exception as error:  # as above
        return f"not tried on a tiny model: {type(error).__name__}: {first_line(error)}"


def _gguf(config: Any) -> str:
    text = config.get_text_config()
    try:
        family = checked_family(text)
    except ModelError as error:
        return f"no: {error.message}"
    directions = "export and import" if family.gguf.imported else "export"
    return f"{directions} as llama.cpp's {family.gguf.arch}" + (", images as mmproj" if tower_of(config) else "")
