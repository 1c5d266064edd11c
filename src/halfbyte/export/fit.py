"""Fit a trained adapter to another base than the one that it was trained on, in closed form.

An adapter trained on NF4 and served on Q4_K_M adds its update to other weights, with other errors. A layer needs the
update s·B·A + (W_trained − W_target) to compute what the trained layer does. It has full rank; the fitted adapter is
its best approximation of the adapter's rank, weighted by the layer's inputs and by the gradients of its outputs, so
that the loss changes least (`adapters.initial_factors.best_for_loss`, `curvature`). There is no training: one forward
and one backward over rows of the run's data, and one decomposition per layer.

Then the divergence from the trained model is measured on held-out rows, with the adapter as it was and as fitted. One
layer's weights of the other base are in memory at a time.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ..adapter_kinds import PREFIX, Factors
from ..adapters.initial_factors import best_for_loss
from ..config import RunConfig
from ..config.run_config import dump_config, with_specs
from ..data.prepare import drawn_documents
from ..formats import KBit
from ..loading.checkpoint import BaseCheckpoint
from ..loading.streamed import joined, rows_of
from ..methods import method_of
from ..modeling.head import verified_head
from ..modeling.layer import causal_lm_of, decoder_layers
from ..reading.tensors import ADAPTER, ADAPTER_CONFIG, read_adapter_config, read_tensors
from ..runs.layout import MODEL_CARD, RESOLVED_CONFIG
from ..runs.saved import Saved, find_trained, load_saved, saved_config
from ..runs.stop_tokens import data_report
from ..utils.errors import CheckpointError, ConfigError, DataError, HalfbyteError
from ..utils.files import new_directory, write_text
from ..utils.hardware import chosen_device
from ..utils.notices import notice
from ..utils.waiting import progress_bars
from .adapter import AdapterLayers
from .curvature import in_float32, padded, replaced_forwards, stream_curvature
from .gguf_adapter import export_adapter
from .target_base import TargetBase
from .weights import MergedWeights, Target

TOKENS = 16_384  # of training rows, at most
HELD_OUT = 4096  # tokens of training rows that are not read, for a run without held-out rows
GGUF_ADAPTER = "adapter-f16.gguf"
POSITIONS = 512  # whose logits are computed at a time


@dataclass(frozen=True)
class FitReport:
    """Result of `fit`.

    Attributes:
        path: folder of the fitted adapter.
        base: description of the base that it fits.
        before, after: KL from the trained model with the adapter unchanged and fitted, nats per held-out token.
        rank: of the fitted factors.
        layers: number of fitted layers.
        tokens: number of tokens read, and held out.
        seconds: of the whole fit.
    """

    path: Path
    base: str
    before: float
    after: float
    rank: int
    layers: int
    tokens: tuple[int, int]
    seconds: float

    def __str__(self) -> str:
        return (
            f"fitted to {self.base}: {self.layers} layers at rank {self.rank}, inputs of {self.tokens[0]:,} tokens\n"
            f"KL from the trained model on {self.tokens[1]:,} held-out tokens: {self.before:.4g} with the adapter as it"
            f" was, {self.after:.4g} fitted ({self.after / max(self.before, 1e-12):.2f}×)"
        )


def fit(
    run_or_adapter_dir: Path | str,
    to: str,
    out: Path | str | None = None,
    *,
    rank: int | None = None,
    data: str | None = None,
    tokens: int = TOKENS,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> FitReport:
    """Write the adapter of a run fitted to another base.

    Args:
        run_or_adapter_dir: a run's output_dir, or one of its checkpoints.
        to: the base, see `TargetBase`.
        out: new folder; default: adapter-BASE in the run's folder.
        rank: of the fitted factors; default: each layer's own.
        data: dataset to read instead of the run's.
        tokens: number of tokens to read, at most.
        trust_remote_code: run the Python code that comes with the base.
        console: for progress; default: none.

    Raises:
        ConfigError: `to`, `rank` or `out` does not fit, or the fitted adapter is no closer.
        CheckpointError: no adapter, or one that is not low-rank factors of linear layers.
        DataError: no rows.
    """
    started = time.perf_counter()
    paths = find_trained(Path(run_or_adapter_dir))
    if paths.adapter is None:
        raise CheckpointError(f"{run_or_adapter_dir} has no adapter to fit", "name a run that trained one")
    overrides = [f"trust_remote_code={trust_remote_code}"]
    config = saved_config(paths, [*overrides, *([f"dataset={data}"] if data else [])], data or "none")
    adapter = AdapterLayers(config, paths.adapter, chosen_device(config.device))
    updates = _updates(config, adapter, paths.adapter)
    target = TargetBase(to, config, adapter)
    folder = Path(out) if out else (paths.run_dir or paths.adapter.parent) / f"adapter-{target.name}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already; fit does not overwrite", "name another folder, or remove this one")
    ranks = _ranks(updates, rank)
    with progress_bars("fitting", console) as progress:
        saved = load_saved(str(run_or_adapter_dir), overrides)
        read, held_out = _documents(config, saved, tokens)
        model: Any = saved.model
        _, layers = decoder_layers(causal_lm_of(model))
        task = progress.add_task("fitting", total=3 * len(layers))
        advance = partial(progress.advance, task)
        with _fixed(model, layers):
            fitted = _fit(model, config, adapter, target, updates, ranks, read, advance)
            unchanged_kl, fitted_kl = _divergences(model, target, [updates, fitted], held_out, advance)
        if fitted_kl >= unchanged_kl:
            wrong = f"--to {to}: the fitted adapter has KL {fitted_kl:.4g} from the trained model, the unchanged one"
            wrong += f" {unchanged_kl:.4g}"
            raise ConfigError(wrong, "raise --tokens or --rank, or serve the adapter as it is")
        counted = sum(map(len, read)), sum(map(len, held_out))
        largest = max(ranks.values())
        report = FitReport(folder, target.description, unchanged_kl, fitted_kl, largest, len(fitted), counted, 0.0)
        with new_directory(folder) as aside:
            _write(aside, paths.adapter, adapter, fitted, target, rank, report)
    return replace(report, seconds=time.perf_counter() - started)


# --- checks before loading -------------------------------------------------------------------------------------------


def _updates(run: RunConfig, adapter: AdapterLayers, folder: Path) -> dict[str, Factors]:
    """Return module → its factors.

    Raises:
        CheckpointError: the adapter changes anything but linear layers by low-rank factors.
    """
    fix = "merge the run, and quantize the merged model"
    if run.storage.qat_scheme is not None:
        raise CheckpointError(f"{folder} was trained with qat_scheme, which merges it in every step", fix)
    if adapter.task is not None:
        raise CheckpointError(
            f"{folder} has the task type {adapter.task}, and fit reads models that generate text", fix
        )
    if unfit := sorted(adapter.replaced.keys() | adapter.experts.keys() | adapter.routers.keys()):
        raise CheckpointError(f"{folder} trains {unfit[0]}, and only adapters of linear layers can be fitted", fix)
    if adapter.stacks or any(len(shape) == 3 for shape in adapter.shapes.values()):
        raise CheckpointError(f"{run.origin.name} is a mixture of experts, which fit does not support", fix)
    updates = {}
    for parameter, layer in adapter.layers.items():
        factors = adapter.factors(layer)
        if isinstance(factors, str):
            raise CheckpointError(f"{folder}: {parameter} has {factors}, not factors that can be fitted", fix)
        updates[parameter.removesuffix(".weight")] = factors
    return updates


def _ranks(updates: Mapping[str, Factors], rank: int | None) -> dict[str, int]:
    """Return module → rank of its fitted factors: at most the smaller side of its weight.

    Raises:
        ConfigError: `rank` is below that of a layer.
    """
    ranks = {}
    for module, (a, b, _) in updates.items():
        if rank and rank < len(a):
            raise ConfigError(f"--rank {rank}: the adapter of {module} has the rank {len(a)}", "set that, or more")
        ranks[module] = min(rank or len(a), max(len(a), min(len(b), a.shape[1])))
    return ranks


def _documents(run: RunConfig, saved: Saved, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return documents to read, and others to measure on.

    Raises:
        DataError: there are no rows.
    """
    held_out = [row["input_ids"] for row in data_report(saved.paths.run_dir).get("held_out", ())]
    try:
        rows = method_of(run).prepare(run, saved.tokenizer).train
    except HalfbyteError as error:
        wrong = f"fit reads rows of the run's training data: {error.message}"
        raise DataError(wrong, "name rows of the same kind with --data") from error
    documents = [ids for ids, _ in drawn_documents(rows, run.seed, tokens if held_out else tokens + HELD_OUT)]
    if held_out:
        return documents, held_out
    count = 0
    while len(documents) > 1 and count < min(HELD_OUT, tokens // 4):
        held_out.append(documents.pop())
        count += len(held_out[-1])
    if not held_out:
        raise DataError("fit needs at least two documents, one of them to measure on", "give more rows with --data")
    notice("fit-held-out", "the run has no held-out rows: measuring on training rows that fit does not read")
    return documents, held_out


# --- fitting ---------------------------------------------------------------------------------------------------------


@contextmanager
def _fixed(model: Any, layers: nn.ModuleList) -> Iterator[None]:
    """Freeze the model, and compute what is outside of decoder layers in fp32."""
    model.requires_grad_(False)
    inside = {id(module) for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        for module in model.modules():
            if id(module) not in inside and not any(True for _ in module.children()):
                stack.enter_context(in_float32(module))
        yield


def _fit(
    model: Any,
    run: RunConfig,
    adapter: AdapterLayers,
    target: TargetBase,
    updates: Mapping[str, Factors],
    ranks: Mapping[str, int],
    documents: Sequence[Sequence[int]],
    advance: Any,
) -> dict[str, Factors]:
    """Return module → fitted factors, with the scaling of the adapter."""
    weights = MergedWeights(run, BaseCheckpoint(run.origin), adapter)
    outputs = {output.parameter: output for output in weights.outputs}
    trained_base: Target = "dequantized" if run.storage.quantized or weights.base.quantized else "original"
    fitted = dict(updates)  # an adapter of the head stays as it is

    def visit(module: str, inputs: Tensor, gradients: Tensor) -> None:
        a, b, scaling = updates[module]
        name = f"{module}.weight"
        trained, served = weights.base_values(outputs[name], trained_base), target.values(name)
        target.check_weight(name, served, trained)
        change = trained - served + scaling * (b @ a)
        factors = best_for_loss(change, inputs, gradients, ranks[module])
        fitted[module] = Factors(factors.a, factors.b / scaling, scaling)

    root = model.get_base_model()
    linears = {name: root.get_submodule(name) for name in updates}
    stream_curvature(model, documents, linears, visit, advance)
    return fitted


@torch.no_grad()
def _divergences(
    model: Any,
    target: TargetBase,
    adapters: Sequence[Mapping[str, Factors]],
    documents: Sequence[Sequence[int]],
    advance: Any,
) -> list[float]:
    """Return the KL from the model, nats per token, of the other base with each of `adapters`."""
    root, causal_lm = model.get_base_model(), causal_lm_of(model)
    ids, mask = padded(documents, next(model.parameters()).device)
    prefix, layers = decoder_layers(causal_lm)
    head = verified_head(model, {"input_ids": ids[:1, :8]})
    if isinstance(head, str):
        raise CheckpointError(f"fit does not compute the logits of this model: {head}", "merge the run instead")
    count = len(ids)
    parts = [slice(at * count, (at + 1) * count) for at in range(1 + len(adapters))]  # the first: the model itself
    names = {id(module): name for name, module in root.named_modules()}
    embedding = causal_lm.get_input_embeddings()
    moved = _with_weight(embedding, target.values(f"{names[id(embedding)]}.weight"), ids) - embedding(ids)

    def forward(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden.float()
        if index == 0:
            hidden = torch.cat([hidden[: len(ids)], hidden[len(ids) :] + moved.repeat(len(adapters), 1, 1)])
        arguments = [(rows_of(args, part, len(hidden)), rows_of(kwargs, part, len(hidden))) for part in parts]
        with in_float32(layers[index]):
            outputs = [forwards[index](hidden[parts[0]], *arguments[0][0], **arguments[0][1])]
            with _replaced_weights(layers[index], f"{prefix}.{index}", names, target) as use:
                for updates, part, (part_args, part_kwargs) in zip(adapters, parts[1:], arguments[1:], strict=True):
                    use(updates)
                    outputs.append(forwards[index](hidden[part], *part_args, **part_kwargs))
        advance()
        return joined(outputs)

    with replaced_forwards(layers, forward) as forwards:
        attention = mask.long().repeat(len(parts), 1)
        hidden = causal_lm.base_model(
            input_ids=ids.repeat(len(parts), 1), attention_mask=attention, use_cache=False
        ).last_hidden_state
    output = causal_lm.get_output_embeddings()
    served = target.values(f"{names[id(output)]}.weight")
    weights = [_with_update(served, updates, names[id(output)]) for updates in adapters]
    sums = [0.0] * len(adapters)
    states = [hidden[part][mask] for part in parts]
    for first in range(0, len(states[0]), POSITIONS):
        rows = slice(first, first + POSITIONS)
        expected = head(output(states[0][rows].float())).log_softmax(-1)
        for at, (state, weight) in enumerate(zip(states[1:], weights, strict=True)):
            difference = expected - head(functional.linear(state[rows].float(), weight)).log_softmax(-1)
            sums[at] += float((expected.exp() * difference).sum(dtype=torch.float64))
    return [total / len(states[0]) for total in sums]


def _with_update(weight: Tensor, updates: Mapping[str, Factors], module: str) -> Tensor:
    """Return a module's weight with its update, if it has one."""
    if module not in updates:
        return weight
    a, b, scaling = updates[module]
    return weight + scaling * (b @ a)


def _with_weight(module: nn.Module, weight: Tensor, ids: Tensor) -> Tensor:
    """Return what an embedding computes with another weight."""
    without, module.weight = module.weight, nn.Parameter(weight, requires_grad=False)
    try:
        output: Tensor = module(ids)
        return output
    finally:
        module.weight = without


@contextmanager
def _replaced_weights(layer: nn.Module, prefix: str, names: Mapping[int, str], target: TargetBase) -> Iterator[Any]:
    """Give a decoder layer the weights of another base; yield a function that adds an adapter's updates to them."""
    linears: dict[str, tuple[Any, Tensor, Tensor | None]] = {}
    narrow: list[tuple[nn.Parameter, Tensor]] = []
    for path, module in layer.named_modules(prefix=prefix):
        if ".lora_" in path or ".base_layer" in path:
            continue
        linear: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        if isinstance(linear, nn.Linear):
            bias = None if linear.bias is None else target.values(f"{path}.bias")
            linears[path] = (module, target.values(f"{path}.weight"), bias)
            continue
        for key, parameter in module.named_parameters(recurse=False):
            narrow.append((parameter, parameter.data))
            parameter.data = target.values(f"{path}.{key}").reshape(parameter.shape)

    def use(updates: Mapping[str, Factors]) -> None:
        for path, (module, weight, bias) in linears.items():
            module.forward = partial(functional.linear, weight=_with_update(weight, updates, path), bias=bias)

    try:
        yield use
    finally:
        for module, _, _ in linears.values():
            del module.forward
        for parameter, data in narrow:
            parameter.data = data


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(
    aside: Path,
    adapter_dir: Path,
    adapter: AdapterLayers,
    fitted: Mapping[str, Factors],
    target: TargetBase,
    rank: int | None,
    report: FitReport,
) -> None:
    shutil.copytree(adapter_dir, aside, dirs_exist_ok=True)
    tensors = dict(read_tensors(adapter_dir / ADAPTER))
    for module, (a, b, scaling) in fitted.items():
        keys = [f"{PREFIX}{module}.lora_{side}.weight" for side in "AB"]
        if rank:  # of all layers, with a scaling of 1
            missing = rank - len(a)
            a, b = functional.pad(a, (0, 0, 0, missing)), functional.pad(scaling * b, (0, missing))
        for key, factor in zip(keys, (a, b), strict=True):
            tensors[key] = factor.to("cpu", tensors[key].dtype).contiguous()
    save_file(tensors, aside / ADAPTER, metadata={"format": "pt"})
    config = read_adapter_config(adapter_dir) | {"init_lora_weights": True}
    if adapter.initial is not None:
        converted = adapter.initial.converted_config().to_dict()
        config |= {key: converted[key] for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern")}
    if target.is_path and not target.is_gguf:
        config["base_model_name_or_path"] = target.origin.name
    if rank:
        config |= {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    write_text(aside / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
    write_text(aside / RESOLVED_CONFIG, dump_config(with_specs(target.config, KBit.names)))
    write_text(aside / MODEL_CARD, _card(config, report))
    if target.is_gguf:
        export_adapter(aside, "f16", aside / GGUF_ADAPTER)


def _card(config: Mapping[str, Any], report: FitReport) -> str:
    return f"""---
base_model: {config["base_model_name_or_path"]}
library_name: peft
---

# An adapter for {report.base}

`halfbyte fit` fitted it, in closed form, from an adapter that was trained on other weights of the same model. It only
fits {report.base}; on another base, use the adapter that was trained.

KL from the trained model on {report.tokens[1]:,} held-out tokens: {report.after:.4g} nats per token, and
{report.before:.4g} with the adapter as it was trained.
"""
