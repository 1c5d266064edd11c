"""An adapter as a GGUF file, for llama.cpp's --lora with a base in GGUF.

llama.cpp scales an adapter by alpha/rank with one alpha per file; B is scaled to match PEFT's scaling (rsLoRA, patterns
of ranks and alphas).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter, Keys

from ..config.schema import RunKeys
from ..gguf.graph import checked_family, original_context, rope_of
from ..gguf.quants import FLOATS, Type, quantize
from ..gguf.tensors import BESIDE_TEXT, Layout
from ..loading.checkpoint import BaseCheckpoint
from ..loading.tokenizers import trained_tokenizer
from ..runs.saved import find, saved_config
from ..runs.stop_tokens import data_report, declared_stop_tokens, known_stop_tokens
from ..utils.errors import CheckpointError, ConfigError
from ..utils.files import new_file
from ..utils.notices import notice
from .adapter import AdapterLayers, check_unmerged, generating_layers
from .gguf_model import output_path, text_config


def export_adapter(
    run: Path | str, mix: str = "f16", out: Path | str | None = None, *, trust_remote_code: bool = False
) -> Path:
    """Write the adapter of `run` as GGUF.

    Args:
        run: a run's output_dir or an adapter that PEFT saved.
        mix: f32, f16 or bf16.
        out: the file; default: adapter-MIX.gguf in the run's folder.
        trust_remote_code: as in `export_gguf`.

    Raises:
        ConfigError: another type, or the file exists.
        CheckpointError: no adapter, or one that --lora cannot apply (DoRA, embeddings, whole layers, vision towers).
    """
    type_ = Type.__members__.get(mix.upper())
    if type_ not in FLOATS:
        raise ConfigError(f"--gguf {mix}: an adapter is written as f32, f16 or bf16", "use f16")
    saved = find(str(run))
    if saved.adapter is None:
        raise CheckpointError(f"{run} has no adapter", "export it without --adapter-only")
    config = saved_config(saved, [f"trust_remote_code={trust_remote_code}"])
    check_unmerged(config)
    path = output_path(run, out, f"adapter-{mix.lower()}.gguf")
    if config.rope_scaling:
        flags = _rope_flags(text_config(config.origin))
        notice("adapter-rope", f"this adapter was trained with rope_scaling: run llama.cpp with {flags}")
    with new_file(path) as aside:
        writer = GGUFWriter(aside, checked_family(text_config(config.origin)).gguf.arch)
        writer.add_type("adapter")
        writer.add_string(Keys.Adapter.TYPE, "lora")
        alpha, tensors = adapter_tensors(config, AdapterLayers(config, saved.adapter, torch.device("cpu")))
        writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
        for name, tensor in tensors.items():
            stored = quantize(tensor, type_).numpy()
            writer.add_tensor(name, stored, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    # at trained end tokens that the base's file does not declare, llama.cpp would not stop
    tokenizer, base = trained_tokenizer(saved.adapter, config), BaseCheckpoint(config.origin).folder
    declared = {tokenizer.eos_token_id, *declared_stop_tokens(base)}
    missing = [index for index in known_stop_tokens(data_report(saved.run_dir), tokenizer) if index not in declared]
    if missing:
        names = " ".join(f"--reverse-prompt '{name}'" for name in tokenizer.convert_ids_to_tokens(missing))
        message = "llama.cpp uses the stop tokens of the base's file, and this adapter ends its answers with others"
        notice("adapter-ends", f"{message}: run it with {names}")
    return path


def _rope_flags(config: Any) -> str:
    """Return the options of llama.cpp that scale the RoPE of the base's file as `config` does.

    Raises:
        ConfigError: there are none; frequencies of their own are tensors of the base's file.
    """
    rope, context = rope_of(config), config.max_position_embeddings
    rope_type = rope["rope_type"]
    if rope_type in ("llama3", "longrope"):
        wrong = f"rope_scaling: {rope_type}: llama.cpp reads its frequencies from the base's file, not from an adapter"
        raise ConfigError(wrong, "export the merged model: without --adapter-only")
    flags = {"default": f"--rope-freq-base {rope['rope_theta']:g}"}.get(rope_type, f"--rope-scaling {rope_type}")
    flags += f" --rope-scale {rope['factor']:g}" if "factor" in rope else ""
    flags += f" --yarn-orig-ctx {original_context(config)}" if rope_type == "yarn" else ""
    return f"{flags} -c {context}"


@torch.no_grad()
def adapter_tensors(config: RunKeys, adapter: AdapterLayers) -> tuple[float, dict[str, torch.Tensor]]:
    """Return alpha, and name → A [rank, in] or B [out, rank] in fp32, in the row layout of the base's file."""
    model_config = text_config(config.origin)
    layout = Layout(model_config, checked_family(model_config))
    folder = generating_layers(adapter).folder
    if adapter.replaced:
        raise CheckpointError(f"{folder}: --lora cannot replace {min(adapter.replaced)}", "export the merged model")
    vision = {parameter for parameter in adapter.layers if BESIDE_TEXT.search(parameter)}
    if beyond := adapter.experts.keys() | adapter.routers.keys() | vision:
        message = f"{folder}: GGUF adapters have no place for the adapter of {min(beyond)}"
        raise CheckpointError(message, "export the merged model")
    alpha, tensors = float(config.lora_alpha), {}
    for parameter, layer in adapter.layers.items():
        factors = adapter.factors(layer)
        if isinstance(factors, str):
            raise CheckpointError(f"{folder}: {parameter}: --lora cannot apply {factors}", "export the merged model")
        if parameter in adapter.tied:  # the base's file has no tensor of this name
            refused = f"an adapter of {parameter}, which is the base's {adapter.tied[parameter]}"
            raise CheckpointError(f"{folder}: --lora cannot apply {refused}", "export the merged model")
        name = layout.name(parameter)
        a, b, scaling = factors
        tensors[f"{name}.lora_a"] = layout.columns_in_file(name, a)
        tensors[f"{name}.lora_b"] = layout.rows_in_file(name, b * (scaling * a.shape[0] / alpha))
    return alpha, tensors
