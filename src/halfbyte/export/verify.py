"""Verifying a merge: the models to compare, one in memory at a time, and the text to compare them on.

Logits say whether a merged model computes what its base and adapter do. Where weights are quantized, that says little
about a single one: each is also compared with what the merge, done once more, makes of it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from halfbyte.config import Resolved
from halfbyte.loading.find import find_model
from halfbyte.loading.load import load_model, load_tokenizer
from halfbyte.modeling.adapters import load_adapter
from halfbyte.qat.model import round_merged
from halfbyte.utils.errors import CheckpointError
from halfbyte.utils.hardware import free_cached_memory
from halfbyte.utils.notices import notice

from ..loading.checkpoint import DTYPES
from ..reading import read_json
from ..runs.layout import DATA_REPORT
from ..utils.transformers_logging import no_loading_bars
from .fidelity import (
    DRAWS,
    NONE,
    Distance,
    Document,
    Fidelity,
    Loss,
    Rounding,
    StoredLinear,
    distance,
    logits,
    most,
    token_losses,
)  # fmt: skip
from .reload import reload, stored_values
from .routing import Choices, Routing, moved
from .weights import MergedWeights, Output, Target

KEPT = "nothing was kept; please report this with the run"
ROWS, LENGTH = 4, 128
SAME = 2**-8  # relative: what a loader that keeps bf16 rounds dequantized values by
HEADROOM = 1.25  # memory over that of the weights: one layer in fp32, activations, logits
TEXT = """The library opens at nine. A reader may borrow up to 5 books for three weeks, and return them at any desk.
def mean(values):
    total = sum(values)
    return total / len(values)
Question: Tom has 3 boxes with 12 pens each and gives away 7 pens. How many are left? 3 * 12 = 36, and 36 - 7 = 29.
"""  # for an adapter that came without its run: prose, code and numbers


class Verifier:
    """Compares merged models with the base and adapter they come from.

    Args:
        adapter: folder of the adapter; None for a whole model.
        tokenizer: folder with the tokenizer of the merged model.
        run_dir: the run whose text is read; None for an adapter alone.
    """

    def __init__(
        self,
        run: Resolved,
        adapter: Path | None,
        weights: MergedWeights,
        tokenizer: Path,
        run_dir: Path | None,
        progress: Progress,
    ):
        self._run, self._adapter, self._weights, self._progress = run, adapter, weights, progress
        self._device = _device_for(weights)
        self._ids = text_ids(tokenizer, run_dir).to(self._device)
        self._documents, self._held_out = loss_documents(run_dir, self._ids) if weights.packing.formats else ([], False)
        observe = self._observe if weights.packing.calibrated else None
        self._routing, self._routing_of_original = Routing(), Routing()
        self._trained, self._bare, self._losses = self._adapted(
            weights.trained_dtype, run.storage.quantized, self._routing, observe
        )
        self._unquantized: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def tokens(self) -> int:
        return self._ids.numel()

    def verify(self, folder: Path, target: Target) -> Fidelity:
        """Reload `folder` with the tool it is stored for, and compare its logits and its quantized weights.

        Raises:
            CheckpointError: the folder does not load, a weight is not the merged one, or rounding does not explain how
                the logits differ.
        """
        rounded_before = self._rounded_before(target)
        exact, bare, before = (self._trained, self._bare, self._losses) if rounded_before else self._original()
        routing = self._routing if rounded_before else self._routing_of_original
        found, losses, chosen = self._reloaded(folder, target, routing)
        merged, (held, *noisy), (own, *by_noise) = found[0], found[-1 - DRAWS :], chosen[-1 - DRAWS :]
        kept, quantized = self._weights.kept(target), bool(self._weights.packing.formats)
        fidelity = Fidelity(
            trained=distance(self._trained, merged),
            exact=distance(exact, held),
            noise=most(distance(held, each) for each in noisy),
            adapter=distance(bare, exact),
            lost=abs(1 - kept.share),
            largest_logit=float(exact.abs().max()),
            kept=kept,
            loss=Loss.between(losses, (before, self._losses), self._held_out) if quantized else None,
            moved=(moved(own, routing.chosen), max(moved(each, own) for each in by_noise), routing.choices),
        )
        if not fidelity.explained:
            raise CheckpointError(_unexplained(fidelity, target), KEPT)
        return fidelity

    def _rounded_before(self, target: Target) -> bool:
        """Whether the base merged onto is the one trained on, quantized as it was."""
        return target == "dequantized" or self._weights.as_trained

    def _original(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `_adapted`, of the base's stored weights."""
        if self._unquantized is None:
            dtype = DTYPES[self._weights.base.dtype]
            self._unquantized = self._adapted(dtype, False, self._routing_of_original)
        return self._unquantized

    def _adapted(
        self, dtype: torch.dtype, quantized: bool, routing: Routing, observe: Callable[[Any], None] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of a base with the adapter, whose `routing` is noted, and without it; its losses with it. `observe`
        sees the model before."""

        def load() -> nn.Module:
            run = self._run
            storage = run.storage if quantized else replace(run.storage, formats=())
            if not self._weights.as_trained:
                storage = replace(storage, qat_scheme=None)
            # transformers' own attention, since flash attention does not compute in fp32
            base = load_model(find_model(run.origin), storage, dtype=dtype, device=self._device)
            model = base if self._adapter is None else load_adapter(base, self._adapter, run.origin.name)
            round_merged(model)
            if observe:
                observe(base)
            return model

        bits = "quantized base" if quantized else "base"
        said = f"measuring the {bits}" + (" with its adapter" if self._adapter else "")
        with_bare = self._adapter is not None
        found, losses, _ = self._measure(said, load, [(NONE, routing.recorded)], with_bare=with_bare)
        return found[0], found[-1], losses

    def _observe(self, model: nn.Module) -> None:
        """Have the layers that will be quantized record their largest input."""
        found = self._weights.input_amax

        def record(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[name] = max(found.get(name, 0.0), float(inputs[0].abs().max()))

        for parameter, peers in self._peers().items():
            for each in peers:
                module = model.get_submodule(each.removesuffix(".weight"))
                module.register_forward_pre_hook(partial(record, parameter.removesuffix(".weight")))

    def _peers(self) -> Mapping[str, tuple[str, ...]]:
        """Parameter → those whose inputs count for its scale."""
        packing = self._weights.packing
        return {parameter: packing.peers.get(parameter, (parameter,)) for parameter in packing.formats}

    def _reloaded(self, folder: Path, target: Target, routing: Routing) -> tuple[list[Tensor], Tensor, list[Choices]]:
        """Logits of the merged model: of a mixture as it routes tokens, then with `routing` held, then with noise, too;
        its losses; and what tokens would have chosen each time."""
        weights, packing, before = self._weights, self._weights.packing, self._rounded_before(target)
        cast = weights.cast(weights.trained_dtype if before else DTYPES[weights.base.dtype], before)
        errors: dict[str, Tensor] = {}
        rounding = Rounding(weights.rounded(target), cast, errors)

        def load() -> nn.Module:
            dtype = str(self._weights.config()["dtype"])
            model = reload(folder, packing, dtype, self._device, self._run.origin.trust_remote_code)
            for output in self._weights.outputs if packing.formats else ():
                if output.parts:
                    errors[output.parameter] = self._check_stack(model, output, target)
                else:
                    self._check_weight(model, output, target)
            return model

        held = [(each, routing.held) for each in (NONE, *[rounding] * DRAWS)]
        alone = [(NONE, Routing().held)] if routing.chosen else []
        return self._measure("reloading the merged model", load, [*alone, *held], routing)

    @torch.no_grad()
    def _check_weight(self, model: Any, output: Output, target: Target) -> None:
        """Compare a loaded weight with the merged one, and have a quantized one computed from as it is stored."""
        name, _, kind = output.parameter.rpartition(".")
        if output.parameter not in self._weights.adapter.shapes or not self._weights.is_whole(output):
            return
        module = model.get_submodule(name)
        if not output.packed:
            found, expected = getattr(module, kind).data.float(), self._weights.tensor(output, target).float()
            _check_same(found, expected.to(found.device), output)
            return
        found = stored_values(module)
        _check_same(found, self._weights.quantized(output, target).dequantize(torch.float32).to(found.device), output)
        error = (found - self._weights.values(output, target).to(found.device)).square().mean(1).sqrt()
        model.set_submodule(name, StoredLinear(name, partial(stored_values, module), error, module.bias))

    @torch.no_grad()
    def _check_stack(self, model: Any, output: Output, target: Target) -> Tensor:
        """Compare a loaded stack of experts with the merged one; fp32 [E, N], each row's error."""
        found, expected = model.get_parameter(output.parameter), self._weights.stack(output, target)
        errors = []
        for at, (weight, _) in enumerate(self._weights.experts(output, target)):
            one, other = (_expert(stack, at) for stack in (found, expected))
            _check_same(one, other.to(one.device), output)
            errors.append((one - weight.to(one.device)).square().mean(1).sqrt())
        return torch.stack(errors)

    def _measure(
        self,
        description: str,
        load: Callable[[], Any],
        forwards: Sequence[tuple[Rounding, Callable[[Any], contextlib.AbstractContextManager[None]]]],
        routing: Routing | None = None,
        *,
        with_bare: bool = False,
    ) -> tuple[list[Tensor], Tensor, list[Choices]]:
        """Logits of a model, once for each rounding to be done again and what is around it, and last, if asked, without
        its adapter; its losses (none where none are compared); and what tokens would have chosen inside `routing`. The
        model is dropped."""
        task = self._progress.add_task(description, total=None)
        with no_loading_bars():
            model = load()
        found, chosen = [], []
        for seed, (rounding, around) in enumerate(forwards):
            with around(model):
                found.append(logits(model, self._ids, rounding, seed))
            chosen.append([] if routing is None else routing.own)
        losses = token_losses(model, self._documents) if self._documents else torch.empty(0)
        if with_bare:
            with model.disable_adapter():
                found.append(logits(model, self._ids))
        del model
        gc.collect()  # modules and hooks refer to each other
        free_cached_memory(self._device)
        self._progress.remove_task(task)
        return found, losses, chosen


def _check_same(found: Tensor, expected: Tensor, output: Output) -> None:
    if found.shape != expected.shape or not bool(((found - expected).abs() <= SAME * expected.abs()).all()):
        raise CheckpointError(f"{output.parameter} reads back other values than were merged", KEPT)


def _expert(stack: Any, at: int) -> Tensor:
    """fp32 [N, K]: an expert of a packed stack."""
    return stack[at].dequantize(torch.float32)


def _unexplained(fidelity: Fidelity, target: Target) -> str:
    def words(each: Distance) -> str:
        return f"{each.max_logit_difference:.3g} (KL {each.kl:.3g})"

    return (
        f"the model merged onto the {target} base computes something else than base and adapter: logits differ by up "
        f"to {words(fidelity.exact)}, where rounding explains {fidelity.bound:.3g} (KL {fidelity.kl_bound:.3g})"
    )


def _device_for(weights: MergedWeights) -> torch.device:
    """Where the merged model fits: the run's device, or the CPU, with a notice."""
    device = weights.adapter.device
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < HEADROOM * weights.nbytes:
        notice("merge-device", f"verifying on the CPU: the merged model does not fit {device}")
        return torch.device("cpu")
    return device


def text_ids(tokenizer: Path, run_dir: Path | None) -> Tensor:
    """int64 [rows, T]: the documents shown in the run's data report, cut into equal rows; else a built-in text."""
    text = "".join("".join(sample["tokens"]) for sample in _data_report(run_dir).get("samples", ()))
    if not text:
        notice("merge-text", "no text of the run is left, so the merge is measured on a short built-in one")
    ids = load_tokenizer(str(tokenizer))(text or TEXT, add_special_tokens=False)["input_ids"]
    length = min(LENGTH, len(ids))
    rows = min(ROWS, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length)


def loss_documents(run_dir: Path | None, ids: Tensor) -> tuple[list[Document], bool]:
    """The documents that losses are compared on: those that the run held out, else `ids` [rows, T], all tokens of which
    count; and whether they were held out."""
    found = [
        (torch.tensor(each["input_ids"]), torch.tensor(each["trained"]))
        for each in _data_report(run_dir).get("held_out", ())
    ]
    if found:
        return found, True
    return [(row.cpu(), torch.ones(len(row), dtype=torch.bool)) for row in ids], False


def _data_report(run_dir: Path | None) -> dict[str, Any]:
    """A run's data_report.json; empty without one."""
    path = run_dir / DATA_REPORT if run_dir else None
    return read_json(path, CheckpointError) if path and path.is_file() else {}
