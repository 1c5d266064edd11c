"""Importance matrices computed by running the model, with its adapter, on calibration text (`gguf.imatrix`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import load_config
from ..data.prepare import CALIBRATION_ROW, calibration_rows
from ..gguf.imatrix import Seen, write_importances
from ..gguf.tensors import BESIDE_TEXT, STACKED_EXPERTS, Layout, experts_name, layer_of
from ..modeling.architectures import runs_experts
from ..modeling.families import Family
from ..modeling.head import backbone_inputs
from ..runs.saved import load_saved
from ..utils.notices import notice

TOKENS = 16384  # of calibration text
WITHOUT_IMPORTANCE = {"token_embd.weight", "output.weight"}  # as in llama-imatrix


def collect(
    run_or_model: str, text: str, out: Path, names: Set[str], family: Family, device: torch.device,
    trust_remote_code: bool, progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Run a model with its adapter on calibration text and write the importances of its matrices.

    Args:
        run_or_model: as in `export_gguf`.
        text: a dataset's file, folder or hub id, read as for training.
        out: the file to write.
        names: matrices of the GGUF file to observe.
        trust_remote_code: as in `export_gguf`.
        progress: called with the number of rows done and the total.

    Raises:
        HalfbyteError: the model or the text cannot be used.
    """
    saved = load_saved(run_or_model, [f"device={device}", f"trust_remote_code={trust_remote_code}"])
    keys = {"model_name_or_path": saved.config.model_name_or_path, "dataset": text}
    config = load_config(None, [], keys | {"max_length": CALIBRATION_ROW, "packing": True, "device": str(device)})
    rows = list(calibration_rows(config, saved.tokenizer, TOKENS, torch.device("cpu")))
    model_config: Any = saved.model.config
    layout = Layout(model_config.get_text_config(), family)

    def batches() -> Iterable[dict[str, Tensor]]:
        for index, row in enumerate(rows):
            progress(index, len(rows))
            yield {key: value.to(device) for key, value in row.items()}
        progress(len(rows), len(rows))

    seen = watch(saved.model, batches(), names, layout)
    if missed := sorted(names - seen.keys() - WITHOUT_IMPORTANCE):
        message = f"{len(missed)} matrices got no tokens of the calibration text, such as {missed[0]}"
        notice("importance-missed", f"{message}: they are quantized without importances")
    write_importances(out, seen, text, len(rows), CALIBRATION_ROW)


@torch.no_grad()
def watch(model: nn.Module, batches: Iterable[Mapping[str, Any]], names: Set[str], layout: Layout) -> dict[str, Seen]:
    """Run the batches (arguments of the model's forward) and return matrix name → sums of its squared inputs."""
    seen: dict[str, Seen] = {}
    handles = []
    for key, module in model.named_modules():
        plain = key.removeprefix("base_model.model.").replace(".base_layer", "")
        if BESIDE_TEXT.search(plain) or ".lora_" in plain:
            continue
        if isinstance(module, nn.Linear) and not plain.endswith("lm_head"):
            name = layout.name(f"{plain}.weight")
            if name in names:
                handles.append(module.register_forward_pre_hook(partial(_observe_linear, seen, name, layout)))
        elif runs_experts(module) and STACKED_EXPERTS.fullmatch(f"{plain}.gate_up_proj"):
            hook = partial(_observe_experts, seen, layer_of(f"{plain}."))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        for batch in batches:
            model(**backbone_inputs(model, batch), use_cache=False)  # a cache breaks document isolation
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _observe_linear(seen: dict[str, Seen], name: str, layout: Layout, module: nn.Linear, args: tuple[Tensor]) -> None:
    """Hook of a linear layer."""
    x = layout.columns_in_file(name, args[0].reshape(-1, module.in_features))
    _entry(seen, name, 1, x).add(0, x)


def _observe_experts(
    seen: dict[str, Seen], layer: int, module: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Any]
) -> None:
    """Hook of a layer's experts, called with tokens [tokens, columns], their experts [tokens, k] and adapters."""
    x, chosen = args[0], args[1]
    adapter = (kwargs.get("adapters") or {}).get("gate_up_proj")
    for expert in chosen.unique().tolist():
        rows = x[(chosen == expert).any(-1)]
        weight = module.gate_up_proj[expert]
        first = rows @ weight if module.is_transposed else functional.linear(rows, weight)
        if module.has_bias:
            first = first + module.gate_up_proj_bias[expert]
        if adapter is not None:
            first = first + adapter.scaling * (rows.to(adapter.a.dtype) @ adapter.a[expert].mT @ adapter.b[expert].mT)
        for matrix, inputs in (("gate", rows), ("up", rows), ("down", module._apply_gate(first))):
            name = experts_name(layer, matrix)
            _entry(seen, name, len(module.gate_up_proj), inputs).add(expert, inputs)


def _entry(seen: dict[str, Seen], name: str, experts: int, x: Tensor) -> Seen:
    """Return the entry of a matrix in `seen`, initially zeros."""
    if name not in seen:
        seen[name] = Seen(*(torch.zeros(shape, device=x.device) for shape in ((experts, x.shape[-1]), (experts,))))
    return seen[name]
