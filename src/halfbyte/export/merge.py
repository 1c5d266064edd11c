"""Merging a base and its adapter into one model that other tools load, in 16 bits or quantized (packing.py).

A 4-bit run has two bases to merge onto: the *dequantized* one, dequantize(quantize(W)), which the adapter was trained
on, and the *original* one, with the checkpoint's 16-bit weights. fidelity.py measures on text of the run which result
is closer to the trained model. W + ΔW is computed in fp32 and rounded once.

Tensors are written one at a time, shard by shard, into a temporary folder that is renamed once everything is checked.

A quantized merge is refused in two cases. The update may be lost: a dequantized base lies on its format's grid, and
storing the sum in that format again snaps most of the update back. Or the loss may be higher than in 16 bits; this
applies to runs trained on quantized weights, which already include the cost of their format. For other models the loss
is only reported. Both are measured on samples, so differences within the standard errors pass.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from ..config import SIXTEEN, Storage
from ..config.schema import RunKeys
from ..data.image_processor import PROCESSOR_FILES
from ..formats.retained_update import RetainedUpdate
from ..loading.checkpoint import BaseCheckpoint
from ..loading.find import load_model_config
from ..loading.tokenizers import trained_tokenizer
from ..reading.model_config import GENERATION, read_generation_config
from ..runs.saved import BASES, find_trained, look_up
from ..runs.stop_tokens import data_report, generation_keys
from ..utils.errors import CheckpointError, ConfigError, TrainingError
from ..utils.files import check_space, new_directory, write_json
from ..utils.hardware import chosen_device
from ..utils.notices import notice
from ..utils.waiting import progress_bars, waiting
from .adapter import AdapterLayers
from .fidelity import STANDARD_ERRORS, Fidelity, Loss, is_lost, required_share
from .packing import Packing, Quantize, check_loader, packing
from .shards import check_shard
from .task_files import classifier_keys, write_sentence_transformer
from .verify import Verifier
from .weights import MergedWeights, Target

MIN_REPORTED_LOST_SHARE = 0.1  # lost share of the update to report
EXCESS = 0.01  # allowed nats per token on held-out text
FEW_BITS = 4  # below this every format has a higher loss
IN_16_BITS = "merge in 16 bits (without --quantize)"
SIDE_FILES = ("generation_config.json", "tokenizer.model", *PROCESSOR_FILES, "*.py")


@dataclass(frozen=True)
class MergeReport:
    """Result of `merge`.

    Attributes:
        out_dir: folder of the merged model.
        target: base merged onto, "original" or "dequantized".
        reason: for choosing this base.
        dtype: of the weights that are not quantized.
        quantize: format of the linear layers; "16bit" if nothing is quantized.
        nbytes: of the weights.
        targets: base → distance from the trained model; empty without verification.
        kept: base → the update retained in the weights written onto it; also without verification.
        experts: of the single-expert tensors that the adapter changes, how many are stored with a change, and how many
            there are; None without adapters on experts.
        closer: base with the smaller KL; None without verification.
        tokens: number of tokens in the means.
        seconds: of the whole merge.
        run_dir: folder of the run, for merge.json; None for an adapter without a run.
    """

    out_dir: Path
    target: Target
    reason: str
    dtype: str
    quantize: str
    nbytes: int
    targets: Mapping[Target, Fidelity] = field(default_factory=dict)
    kept: Mapping[Target, RetainedUpdate] = field(default_factory=dict)
    experts: tuple[int, int] | None = None
    closer: Target | None = None
    tokens: int = 0
    seconds: float = 0.0
    run_dir: Path | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the contents of merge.json; `kl` and `max_logit_difference` are distances from the trained model."""
        targets = {
            name: asdict(fidelity.trained) | {"from_unrounded": asdict(fidelity.exact), "noise": asdict(fidelity.noise)}
            | {"bound": fidelity.bound, "kl_bound": fidelity.kl_bound, "explained_by_rounding": fidelity.explained}
            | {"choices_held": fidelity.moved[0], "choices": fidelity.moved[2]}
            | {"lost_update": fidelity.lost, "adapter": asdict(fidelity.adapter)}
            | {"loss": asdict(fidelity.loss) | {"excess": fidelity.loss.excess} if fidelity.loss else None}
            for name, fidelity in self.targets.items()
        }  # fmt: skip
        return {
            "targets": targets,
            "update_kept": {name: {"share": update.share, "error": update.error} for name, update in self.kept.items()},
            "closer": self.closer,
            **({"experts_changed": self.experts[0], "experts": self.experts[1]} if self.experts else {}),
            "written": self.target,
            "reason": self.reason,
            "out_dir": str(self.out_dir),
            "dtype": self.dtype,
            "quantize": self.quantize,
            "bytes": self.nbytes,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }

    @property
    def file_name(self) -> str:
        """Name in the run's folder: merge.json, or merge-FORMAT.json."""
        return "merge.json" if self.quantize == SIXTEEN else f"merge-{slug(self.quantize)}.json"

    def __str__(self) -> str:
        stored = self.dtype if self.quantize == SIXTEEN else self.quantize
        lines = [f"merged onto the {self.target} base in {stored}: {self.reason}"]
        for name, fidelity in self.targets.items():
            mark = "  closer" if name == self.closer and len(self.targets) > 1 else ""
            lines.append(
                f"  {name:<11} KL {fidelity.trained.kl:.3g} nats per token, largest logit difference "
                f"{fidelity.trained.max_logit_difference:.3g} from the base with its adapter{mark}"
            )
        for name, retained in self.kept.items():
            lines.append(f"  {name:<11} {retained}" if retained.total else f"  {name:<11} no adapter")
        if self.experts:
            lines.append(f"  of {self.experts[1]} experts' tensors that the adapter changes, {self.experts[0]} changed")
        if self.targets:
            written = self.targets[self.target]
            cause = "rounding" if self.quantize == SIXTEEN else "quantizing"
            lines.append(
                f"verified on {self.tokens} tokens: {cause} moved logits by up to "
                f"{written.exact.max_logit_difference:.3g} (passes up to {written.bound:.3g})"
            )
            if written.loss:
                lines.append(str(written.loss))
            if written.lost > MIN_REPORTED_LOST_SHARE:
                lines.append(
                    f"{written.lost:.0%} of the update is too small to change these weights in {self.dtype} and was"
                    " rounded away: use the adapter unmerged, or train longer"
                )
        else:
            lines.append("not verified")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Job:
    """A validated merge."""

    run: RunKeys
    adapter_dir: Path | None
    run_dir: Path | None
    out: Path
    device: torch.device
    weights: MergedWeights
    targets: tuple[Target, ...]
    preferred: Target
    reason: str
    min_update_kept: float | None = None


def merge(
    run_or_adapter_dir: Path | str,
    out_dir: Path | str,
    *,
    base: str = "auto",
    quantize: Quantize = None,
    verify: bool = True,
    min_update_kept: float | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> MergeReport:
    """Write a model with the adapter merged: safetensors, config, tokenizer, chat template, generation config.

    Weights keep the dtype and shards of the base checkpoint (bf16 if it is stored in 32 bits), except for the linear
    layers that `quantize` names. Peak host memory is two shards and the adapter; verification loads the merged model,
    and the base with the adapter, one after the other. The numbers go to merge.json (merge-FORMAT.json) in the run's
    folder.

    Args:
        run_or_adapter_dir: a run's output_dir, one of its checkpoints, or an adapter saved by PEFT; with `quantize`
            also a full model.
        out_dir: a folder that does not exist yet.
        base: "original": merge onto the checkpoint's weights; "dequantized": onto the quantized weights of the
            training; "auto": the one that measures closer to the trained model and is not refused (without `verify`:
            dequantized in 16 bits, original otherwise).
        quantize: format of the linear layers: a format of `quantization:`, or patterns of them; or a layout of another
            tool, see `export.layouts.LAYOUTS`. None: 16 bits, or the run's `qat_scheme`.
        verify: reload the merged model with the tool it is written for, and compare its logits with base and adapter,
            and its quantized weights with the merged ones.
        min_update_kept: share of the update that the written weights must retain. None: 0.99 in 8 bits, less below; a
            loss in 16 bits is reported.
        overwrite: replace `out_dir` if it exists.
        trust_remote_code: run the Python code that comes with the base; the run's own configuration does not count.
        console: for progress; default: none.

    Raises:
        ConfigError: `base` or `quantize` does not fit, `out_dir` exists, or the quantized merge loses the update or has
            a higher loss.
        CheckpointError: no adapter, no base, an adapter for another base, or logits that rounding does not explain.
        TrainingError: no space. In every case nothing is left under `out_dir`.
    """
    started = time.perf_counter()
    out = Path(out_dir)
    source = Path(run_or_adapter_dir)
    if base not in BASES:
        raise ConfigError(f"base: {base!r} is not one of {', '.join(BASES)}", "use auto")
    if os.path.lexists(out) and not (out.is_dir() and overwrite):
        raise ConfigError(f"{out} exists already; merge does not overwrite", "name another folder, or remove this one")
    if os.path.lexists(out) and source.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} holds the adapter to be merged", "name another folder")
    job = replace(_prepare(source, out, base, quantize, verify, trust_remote_code), min_update_kept=min_update_kept)
    with progress_bars("merging", console) as progress, new_directory(out) as aside:
        _write_side_files(job, aside)
        fidelities, written, tokens = (_write_closest if verify else _write_unverified)(job, aside, progress)
    retained = {target: job.weights.retained(target) for target in job.targets}
    if len(fidelities) > 1:
        reason = "it is closer to the trained model"
    elif fidelities and len(job.targets) > 1:
        reason = "in this format the other base loses the update"
    else:
        reason = job.reason
    report = MergeReport(
        out,
        written,
        reason,
        dtype=str(job.weights.config()["dtype"]),
        quantize=job.weights.packing.name,
        nbytes=job.weights.nbytes,
        targets=fidelities,
        kept={target: update for target, update in retained.items() if update.total},
        experts=job.weights.changed_experts(written),
        closer=_closest(fidelities),
        tokens=tokens,
        seconds=time.perf_counter() - started,
        run_dir=job.run_dir,
    )
    if verify and job.run_dir:
        with report_failure_is_a_notice(out):
            write_json(job.run_dir / report.file_name, report.as_dict())
    return report


@contextmanager
def report_failure_is_a_notice(out: Path) -> Iterator[None]:
    """Turn a failure to write a merge's report into a notice; the merged model is complete without it."""
    try:
        yield
    except TrainingError as error:
        notice("merge-report", f"{error.message}; the merged model in {out} is complete")


def slug(quantize: str) -> str:
    """Return a target as part of a file name, e.g. "_.down_proj_kbit5" for patterns."""
    return re.sub(r"[^\w.-]+", "_", quantize)


# --- checks before writing -------------------------------------------------------------------------------------------


def _prepare(source: Path, out: Path, base: str, quantize: Quantize, verify: bool, trust_remote_code: bool) -> _Job:
    find_trained(source)
    saved, config = look_up(str(source), [f"trust_remote_code={trust_remote_code}"])
    scheme, storage = config.storage.qat_scheme, config.storage
    quantize = quantize or scheme or (_formats(storage) if storage.merge_aware and saved.adapter else None)
    if saved.adapter is None and quantize in (None, SIXTEEN):
        raise CheckpointError(
            f"{source} has no adapter: {saved.base} is a whole model, and there is nothing to merge",
            "use that folder as it is",
        )
    device = chosen_device(config.device)
    checkpoint = BaseCheckpoint(config.origin)
    if checkpoint.folder.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} holds the base model", "name another folder")
    stored = packing(quantize, config.origin, experts=not storage.rounds)  # which rounds no experts
    if storage.merge_aware and base == "original":
        raise ConfigError("base: original: the run rounded the stored weights with its adapter (merge_aware)",
                          "use base: auto")  # fmt: skip
    base = "dequantized" if storage.merge_aware else base
    targets, preferred, reason = _targets(storage.quantized, checkpoint, base, bool(stored.formats))
    if verify:
        check_loader(stored.loader)
    weights = MergedWeights(config, checkpoint, AdapterLayers(config, saved.adapter, device), stored)
    if storage.rounds and not weights.as_trained:
        message = f"the run was trained to be stored as {scheme or 'its base is'}"
        notice("merge-qat", f"{message}: stored as {stored.name}, the model differs from the trained one")
    check_space(out, weights.nbytes, "free some space, or name a folder on another disk")
    return _Job(config, saved.adapter, saved.run_dir, out, device, weights, targets, preferred, reason)


def _formats(storage: Storage) -> Quantize:
    """Return the formats of a run's linear layers as `packing` takes them."""
    patterns = dict(storage.formats)
    return patterns["*"] if patterns.keys() == {"*"} else patterns


def _targets(
    trained_quantized: bool, checkpoint: BaseCheckpoint, base_choice: str, quantized: bool
) -> tuple[tuple[Target, ...], Target, str]:
    """Return the bases to try, the one to write unless another measures closer, and the reason.

    Args:
        trained_quantized: whether training quantized the base.
        quantized: whether the merged weights are quantized; the dequantized base may then lie on their grid, which
            snaps the update back.
    """
    if checkpoint.quantized:
        if base_choice == "original":
            raise ConfigError(
                f"base: original: {checkpoint.folder} itself is stored quantized", "use base: dequantized, or auto"
            )
        return ("dequantized",), "dequantized", "the base checkpoint itself is stored quantized"
    if not trained_quantized:
        return ("original",), "original", "training did not quantize the base, so both bases are the same"
    if base_choice == "original":
        return ("original",), "original", "as asked"
    if base_choice == "dequantized":
        return ("dequantized",), "dequantized", "as asked"
    if quantized:
        reason = "a quantization grid would drop the update, and its weights are on none (not measured)"
        return ("original", "dequantized"), "original", reason
    return ("original", "dequantized"), "dequantized", "the adapter was trained on it (not measured: verify is off)"


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_closest(job: _Job, aside: Path, progress: Progress) -> tuple[dict[Target, Fidelity], Target, int]:
    """Write and measure each target in turn in the same folder; the one to keep is written last.

    Raises:
        ConfigError: every target loses the update or has a higher loss.
    """
    verifier = Verifier(job.run, job.adapter_dir, job.weights, aside, job.run_dir, progress)
    fidelities: dict[Target, Fidelity] = {}
    refusals: dict[Target, ConfigError] = {}
    order = sorted(job.targets, key=lambda target: target == job.preferred)
    for target in order:
        result = _write_and_verify(job, aside, target, verifier, progress)
        if isinstance(result, ConfigError):
            refusals[target] = result
        else:
            fidelities[target] = result
    written = _closest(fidelities)
    if written is None:
        raise refusals[job.preferred]
    if written != order[-1]:
        _write_and_verify(job, aside, written, verifier, progress)
    return fidelities, written, verifier.tokens


def _write_unverified(job: _Job, aside: Path, progress: Progress) -> tuple[dict[Target, Fidelity], Target, int]:
    if job.weights.packing.calibrated:  # calibrates by running the trained model
        Verifier(job.run, job.adapter_dir, job.weights, aside, job.run_dir, progress)
    _write(job, aside, job.preferred, progress)
    if lost := _update_refusal(job, job.preferred):
        notice("merge-kept", f"{lost.message}; {lost.fix}")
    return {}, job.preferred, 0


def _closest(measured: Mapping[Target, Fidelity]) -> Target | None:
    return min(measured, key=lambda target: measured[target].trained.kl, default=None)


def _write_and_verify(
    job: _Job, aside: Path, target: Target, verifier: Verifier, progress: Progress
) -> Fidelity | ConfigError:
    """Return how close the model merged onto `target` is, or the error that refuses it."""
    for file, sums in _write(job, aside, target, progress).items():
        check_shard(aside / file, sums)
    if lost := _update_refusal(job, target):
        return lost
    measured = verifier.verify(aside, target)
    return higher_loss_error(measured.loss, job.weights.packing, job.run.storage.quantized) or measured


def _update_refusal(job: _Job, target: Target) -> ConfigError | None:
    weights = job.weights
    if weights.as_trained:  # quantization-aware training: the update is measured after rounding
        return None
    original = not weights.base.quantized
    return lost_update_error(weights.retained(target), weights.packing, target, original, job.min_update_kept)


def _write(job: _Job, aside: Path, target: Target, progress: Progress) -> dict[str, dict[str, int]]:
    name = f"merging onto the {target} base"
    task = progress.add_task(name, total=job.weights.nbytes)
    with waiting(name):
        return job.weights.write(aside, target, lambda size: progress.advance(task, size))


def _write_side_files(job: _Job, aside: Path) -> None:
    """Write everything but the weights; the tokenizer and chat template are the run's."""
    folder = job.weights.base.folder
    for pattern in SIDE_FILES:
        for file in folder.glob(pattern):
            shutil.copyfile(file, aside / file.name)
    for file in (job.adapter_dir / name for name in PROCESSOR_FILES) if job.adapter_dir else ():
        if file.is_file():  # with the run's limits on pixels
            shutil.copyfile(file, aside / file.name)
    config, task = job.weights.config(), job.weights.adapter.task
    tokenizer = trained_tokenizer(job.adapter_dir or folder, job.run)
    tokenizer.save_pretrained(aside)
    if task is not None:
        model_config = load_model_config(job.run.origin)
        if head := job.weights.adapter.head:
            labels = len(next(iter(head.values())))
            config |= classifier_keys(job.run, task, model_config, labels, tokenizer.pad_token_id)
        elif job.run.method == "embedding":
            write_sentence_transformer(aside, job.run, model_config.get_text_config().hidden_size)
    write_json(aside / "config.json", config)
    if (keys := generation_keys(folder, tokenizer, data_report(job.run_dir))) != read_generation_config(folder):
        write_json(aside / GENERATION, keys)


# --- refusals of a quantized merge ------------------------------------------------------------------------------------


def lost_update_error(
    retained: RetainedUpdate, packing: Packing, target: Target, original: bool, minimum: float | None = None
) -> ConfigError | None:
    """Return the error for a merge that lost its update, or None.

    Args:
        original: whether there is an original base to merge onto.
        minimum: share to retain; None: the usual one of the format.
    """
    needed = required_share(packing.bits, minimum)
    if not is_lost(retained, needed) or (minimum is None and not packing.formats):  # 16 bits: reported only
        return None
    if not packing.formats:
        fix = "use the adapter unmerged, or train longer"
    elif target == "dequantized" and original:
        fix = "merge onto the original base (--base original, or auto)"
    elif target == "dequantized":
        fix = f"{IN_16_BITS}, or name the 16-bit model as model_name_or_path in the run's config.resolved.yaml"
    else:
        fix = f"{IN_16_BITS}, or into 8 bits (--quantize fp8-block)"
    return ConfigError(
        f"quantize: in {packing.name} on the {target} base {retained}, and {needed:.0%} is required: rounding to the"
        " format's grid takes back what training changed",
        f"{fix}; --min-update-kept lowers what is required",
    )


def higher_loss_error(loss: Loss | None, packing: Packing, trained_quantized: bool) -> ConfigError | None:
    """Return the error for a merge with a higher loss than its run's training format explains, or None.

    Args:
        trained_quantized: whether the run trained on quantized weights. Training on these same formats is no exception:
            the update is rounded now, too, and the 16-bit merge is better.
    """
    if loss is None or not trained_quantized or packing.bits < FEW_BITS:
        return None
    if loss.excess - STANDARD_ERRORS * loss.error <= EXCESS:
        return None
    return ConfigError(
        f"quantize: {packing.name} loses more than the run was trained with: {loss}, of which {EXCESS} is allowed",
        f"{IN_16_BITS}, or into 8 bits (--quantize fp8-block); --no-verify writes it anyway",
    )
