"""Verifying a merge: reload the merged model, and compare its logits and weights.

Logits show whether a merged model computes what its base and adapter do. They say little about a single quantized
weight, so each is also compared with a second merge of it. One model is in memory at a time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from ..adapters.lora import load_adapter
from ..config.schema import RunKeys
from ..formats import Blockwise4
from ..loading.checkpoint import DTYPES
from ..loading.find import find_model
from ..loading.load import load_model, load_tokenizer
from ..modeling.architectures import auto_class
from ..qat.model import round_merged
from ..reading import read_json
from ..reading.boundary import answered
from ..reading.model_config import read_config
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, HalfbyteError
from ..utils.hardware import free_cached_memory
from ..utils.notices import notice, silent
from ..utils.streams import no_loading_bars
from ..utils.waiting import waiting
from .fidelity import DRAWS, Fidelity, Loss, distance, elementwise_max
from .layouts import Loader
from .logits import (
    NO_ROUNDING,
    Choices,
    Document,
    Rounding,
    Routing,
    StoredLinear,
    count_moved,
    logits,
    token_losses,
)  # fmt: skip
from .packing import PACKAGE_OF
from .weights import MergedWeights, Output, Target

REPORT = "please report this"
NOTHING_WRITTEN = "no model was written; please report this with the run"
ROWS, LENGTH = 4, 128
RELATIVE_TOLERANCE = 2**-8  # rounding of dequantized values by loaders that keep them in bf16
HEADROOM = 1.25  # device memory relative to the weights, for one fp32 layer, activations and logits
TEXT = """The library opens at nine. A reader may borrow up to 5 books for three weeks, and return them at any desk.
def mean(values):
    total = sum(values)
    return total / len(values)
Question: Tom has 3 boxes with 12 pens each and gives away 7 pens. How many are left? 3 * 12 = 36, and 36 - 7 = 29.
"""  # used for an adapter without its run: prose, code and numbers


class Verifier:
    """Compares merged models with their base and adapter.

    Args:
        adapter: folder of the adapter; None for a full model.
        tokenizer: folder with the tokenizer of the merged model.
        run_dir: the run whose text is used; None for an adapter without a run.
    """

    def __init__(
        self,
        run: RunKeys,
        adapter: Path | None,
        weights: MergedWeights,
        tokenizer: Path,
        run_dir: Path | None,
        progress: Progress,
    ):
        self._run = run
        self._adapter = adapter
        self._weights = weights
        self._progress = progress
        self._device = weights.adapter.device
        if self._device.type == "cuda" and torch.cuda.mem_get_info(self._device)[0] < HEADROOM * weights.nbytes:
            notice("merge-device", f"verifying on the CPU: the merged model does not fit {self._device}")
            self._device = torch.device("cpu")
        self._ids = text_ids(load_tokenizer(str(tokenizer)), run_dir).to(self._device)
        measures_loss = weights.packing.formats and not weights.adapter.head  # a classifier has no loss of tokens
        self._documents, self._held_out = loss_documents(run_dir, self._ids) if measures_loss else ([], False)
        observe = self._observe if weights.packing.calibrated else None
        self._routing = Routing()
        self._routing_of_original = Routing()
        self._trained, self._bare, self._losses = self._measure_base(
            weights.trained_dtype, run.storage.quantized, self._routing, observe
        )

    @property
    def tokens(self) -> int:
        return self._ids.numel()

    @waiting("comparing with the trained model")
    def verify(self, folder: Path, target: Target) -> Fidelity:
        """Reload `folder` with the tool it is stored for, and compare its logits and its quantized weights.

        Raises:
            CheckpointError: the folder does not load, a weight differs from the merged one, or rounding does not
                explain the difference of the logits.
        """
        rounded_before = self._rounded_before(target)
        exact, bare, exact_losses = (self._trained, self._bare, self._losses) if rounded_before else self._original
        routing = self._routing if rounded_before else self._routing_of_original
        all_logits, merged_losses, choices = self._measure_merged(folder, target, routing)
        held, *noisy = all_logits[-1 - DRAWS :]
        preferred, *preferred_with_noise = choices[-1 - DRAWS :]
        retained = self._weights.retained(target)
        moved_by_noise = max(count_moved(noisy_choices, preferred) for noisy_choices in preferred_with_noise)
        fidelity = Fidelity(
            trained=distance(self._trained, all_logits[0]),
            exact=distance(exact, held),
            noise=elementwise_max(distance(held, logits) for logits in noisy),
            adapter=distance(bare, exact),
            lost=0.0 if self._weights.as_trained else abs(1 - retained.share),  # training has rounded its update
            largest_logit=float(exact.abs().max()),
            loss=Loss.between(merged_losses, (exact_losses, self._losses), self._held_out) if self._documents else None,
            moved=(count_moved(preferred, routing.chosen), moved_by_noise, routing.choices),
        )
        if not fidelity.explained:
            raise CheckpointError(
                f"the model merged onto the {target} base computes something else than base and adapter: logits differ "
                f"by up to {fidelity.exact}, where rounding explains {fidelity.bound:.3g} (KL {fidelity.kl_bound:.3g})",
                NOTHING_WRITTEN,
            )
        return fidelity

    def _rounded_before(self, target: Target) -> bool:
        """Return whether the base merged onto is the trained base, quantized as in training."""
        return target == "dequantized" or self._weights.as_trained

    @functools.cached_property
    def _original(self) -> tuple[Tensor, Tensor, Tensor]:
        """Results of `_measure_base` for the base's stored weights."""
        return self._measure_base(DTYPES[self._weights.base.dtype], False, self._routing_of_original)

    @waiting("measuring the trained model")
    def _measure_base(
        self, dtype: torch.dtype, quantized: bool, routing: Routing, observe: Callable[[Any], None] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Measure a base with and without the adapter.

        Args:
            routing: records the experts that tokens choose with the adapter.
            observe: called with the base before the measurement.

        Returns:
            Logits with the adapter, logits without it, and losses with it.
        """

        def load() -> nn.Module:
            run = self._run
            storage = run.storage if quantized else replace(run.storage, formats=())
            if not self._weights.as_trained:
                storage = replace(storage, qat_scheme=None, merge_aware=False)
            # transformers' own attention: flash attention does not support fp32
            initial = self._weights.adapter.initial
            stored_without = initial if quantized else None
            files = find_model(run.origin)
            base = load_model(files, storage, dtype=dtype, device=self._device, initial=stored_without)
            model = base
            if self._adapter is not None:
                model = load_adapter(
                    base, self._adapter, run.origin.name, initial=initial, converted=stored_without is None
                )
            round_merged(model)
            if observe:
                observe(base)
            return model

        bits = "quantized base" if quantized else "base"
        description = f"measuring the {bits}" + (" with its adapter" if self._adapter else "")
        with_bare = self._adapter is not None
        all_logits, losses, _ = self._measure(description, load, [(NO_ROUNDING, routing.recorded)], with_bare=with_bare)
        return all_logits[0], all_logits[-1], losses

    def _observe(self, model: nn.Module) -> None:
        """Make the layers that will be quantized record their largest input."""
        input_amax = self._weights.input_amax

        def record(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            input_amax[name] = max(input_amax.get(name, 0.0), float(inputs[0].abs().max()))

        for parameter in self._weights.packing.formats:
            for peer in self._weights.packing.peers.get(parameter, (parameter,)):
                module = model.get_submodule(peer.removesuffix(".weight"))
                module.register_forward_pre_hook(partial(record, parameter.removesuffix(".weight")))

    def _measure_merged(
        self, folder: Path, target: Target, routing: Routing
    ) -> tuple[list[Tensor], Tensor, list[Choices]]:
        """Measure the merged model.

        Returns:
            Logits with its own routing (mixtures only), with `routing` held, and with noise; its losses; and the
            experts that tokens would have chosen in each forward.
        """
        weights, packing = self._weights, self._weights.packing
        rounded_before = self._rounded_before(target)
        cast = weights.cast(weights.trained_dtype if rounded_before else DTYPES[weights.base.dtype], rounded_before)
        errors: dict[str, Tensor] = {}
        rounding = Rounding(weights.rounded(target), cast, errors)

        def load() -> nn.Module:
            dtype = str(self._weights.config()["dtype"])
            loader = None if packing.config is None else packing.loader
            model = reload(folder, loader, dtype, self._device, self._run.origin.trust_remote_code)
            for output in self._weights.outputs if packing.formats else ():
                if not output.sources:
                    self._check_weight(model, output, target)
            for name in (name for name in packing.formats if len(weights.adapter.shapes[name]) == 3):
                errors[name] = self._check_stack(model, weights.stack_of_experts(name), target)
            return model

        held = [(noise, routing.held) for noise in (NO_ROUNDING, *[rounding] * DRAWS)]
        alone = [(NO_ROUNDING, Routing().held)] if routing.chosen else []
        return self._measure("reloading the merged model", load, [*alone, *held], routing)

    @torch.no_grad()
    def _check_weight(self, model: Any, output: Output, target: Target) -> None:
        """Compare a loaded weight with the merged one; a quantized layer then computes from its stored values."""
        name, _, key = output.parameter.rpartition(".")
        if output.parameter not in self._weights.adapter.shapes or not self._weights.is_whole(output):
            return
        module = model.get_submodule(name)
        if not output.packed:
            loaded, expected = getattr(module, key).data.float(), self._weights.tensor(output, target).float()
            _check_same(loaded, expected.to(loaded.device), output)
            return
        loaded = stored_values(module)
        _check_same(loaded, self._weights.quantized(output, target).dequantize(torch.float32).to(loaded.device), output)
        error = (loaded - self._weights.values(output, target).to(loaded.device)).square().mean(1).sqrt()
        model.set_submodule(name, StoredLinear(name, partial(stored_values, module), error, module.bias))

    @torch.no_grad()
    def _check_stack(self, model: Any, output: Output, target: Target) -> Tensor:
        """Compare a loaded stack of experts with the merged one; return each row's error, fp32 [E, N]."""
        loaded_stack: Any = model.get_parameter(output.parameter)
        errors = []
        for index, (expected, weight) in enumerate(self._weights.stored_experts(output, target)):
            loaded = loaded_stack[index].dequantize(torch.float32)
            _check_same(loaded, expected.to(loaded.device), output)
            errors.append((loaded - weight.to(loaded.device)).square().mean(1).sqrt())
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
        """Load a model, compute its logits and losses, and drop it.

        Args:
            forwards: for each forward, the rounding to apply and the context to run it in.
            routing: collects the experts that tokens would have chosen.
            with_bare: also compute logits without the adapter, last.

        Returns:
            Logits of each forward; losses (empty without documents); and expert choices of each forward.
        """
        task = self._progress.add_task(description, total=None)
        with no_loading_bars():
            model = load()
        all_logits, chosen = [], []
        for seed, (rounding, around) in enumerate(forwards):
            with around(model):
                all_logits.append(logits(model, self._ids, rounding, seed))
            chosen.append([] if routing is None else routing.preferred)
        losses = token_losses(model, self._documents) if self._documents else torch.empty(0)
        if with_bare:
            with model.disable_adapter():
                all_logits.append(logits(model, self._ids))
        del model
        gc.collect()  # modules and hooks form reference cycles
        free_cached_memory(self._device)
        self._progress.remove_task(task)
        return all_logits, losses, chosen


def _check_same(loaded: Tensor, expected: Tensor, output: Output) -> None:
    bound = RELATIVE_TOLERANCE * expected.abs()
    if loaded.shape != expected.shape or not bool(((loaded - expected).abs() <= bound).all()):
        raise CheckpointError(f"{output.parameter} reads back other values than were merged", NOTHING_WRITTEN)


def text_ids(tokenizer: Any, run_dir: Path | None) -> Tensor:
    """Return the run's sample documents (else a built-in text) in rows of equal length, int64 [rows, T]."""
    text = "".join("".join(sample["tokens"]) for sample in _data_report(run_dir).get("samples", ()))
    if not text:
        notice("merge-text", "the run has no sample text, so the merge is measured on a short built-in text")
    ids = tokenizer(text or TEXT, add_special_tokens=False)["input_ids"]
    length = min(LENGTH, len(ids))
    rows = min(ROWS, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length)


def loss_documents(run_dir: Path | None, ids: Tensor) -> tuple[list[Document], bool]:
    """Return the run's held-out documents and True; without any, `ids` [rows, T] with all tokens counted, and False."""
    rows = _data_report(run_dir).get("held_out", ())
    if rows:
        return [(torch.tensor(row["input_ids"]), torch.tensor(row["trained"])) for row in rows], True
    return [(row.cpu(), torch.ones(len(row), dtype=torch.bool)) for row in ids], False


def _data_report(run_dir: Path | None) -> dict[str, Any]:
    """Return a run's data_report.json; empty without one."""
    path = run_dir / "data_report.json" if run_dir else None
    return read_json(path, CheckpointError) if path and path.is_file() else {}


# --- reading a merged model back --------------------------------------------------------------------------------------


def loader_of(entry: Mapping[str, Any]) -> Loader | None:
    """Return the tool that loads a model with this `quantization_config`; None: plain transformers."""
    known: dict[str, Loader] = {"bitsandbytes": "bitsandbytes", "fp8": "fp8"}
    loader = known.get(str(entry.get("quant_method")), "halfbyte") if entry else None
    needed = PACKAGE_OF.get(loader) if loader else None
    return "halfbyte" if needed and find_spec(needed) is None else loader


def reload(folder: Path, loader: Loader | None, dtype: str, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """Load the merged model: with plain transformers (and bitsandbytes if stored for it), or with halfbyte.

    Args:
        loader: the tool that it is stored for; None: plain transformers.
        dtype: of the weights that are not quantized, as in config.json.

    Raises:
        CheckpointError: it does not load, or lacks a weight.
    """
    if loader == "halfbyte":
        try:
            with silent():
                return load_model(str(folder), dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        except HalfbyteError as error:
            raise CheckpointError(f"the merged model does not load: {error.message}", REPORT) from error
    from transformers import AutoConfig, FineGrainedFP8Config

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "device_map": {"": device}}
    if loader == "fp8":  # dequantize instead of using FP8 matmuls
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    config = read_config(folder)
    if (config.get("text_config") or config).get("attn_logit_softcapping"):
        options["attn_implementation"] = "eager"  # SDPA leaves scores uncapped, silently before transformers 5.23
    with answered("the merged model does not load", REPORT):
        auto = auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
        loaded: Any = auto.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    model, info = loaded
    missing = [str(name) for key in ("missing_keys", "mismatched_keys") for name in sorted(info[key], key=str)]
    if missing:
        raise CheckpointError(f"the merged model lacks {missing[0]}", REPORT)
    return model


def compute_stored(model: Any) -> None:
    """Let the linears that bitsandbytes has loaded compute in fp32 from the values that it reads."""
    for name, module in list(model.named_modules()):
        if type(getattr(module, "weight", None)).__name__ in ("Params4bit", "Int8Params"):
            error = torch.zeros(module.out_features)
            model.set_submodule(name, StoredLinear(name, partial(stored_values, module), error, module.bias))


def stored_values(module: nn.Module) -> Tensor:
    """Return the weight of a loaded module, fp32, dequantized by the tool that loaded it."""
    weight: Any = module.weight
    if isinstance(weight.data, QuantizedTensor):
        return weight.data.dequantize(torch.float32)
    weight_type = type(weight).__name__
    if weight_type == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        state = copy.copy(weight.quant_state)
        if weight.device.type == "cpu" and state.shape[-1] % state.blocksize:
            # bitsandbytes 0.50.2's CPU kernel is wrong if blocks cross rows; its GPU kernels are right
            entries = {"": weight.data, **state.as_dict(packed=True)}
            format_, parts, shape, _ = Blockwise4.from_state(entries, "weight")
            return format_.dequantize(parts, shape, torch.float32)
        state.dtype = torch.float32
        return dequantize_4bit(weight.data, state)
    if weight_type == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(weight.data, weight.SCB)
    return weight.data.float()
