"""Merging: one model out of a base and its adapter, in 16 bits or quantized again (packing.py), that other tools load.

A 4-bit run has two bases to merge onto. The *dequantized* one, dequantize(quantize(W)), is what the adapter was
trained on; the *original* one has the checkpoint's own 16-bit weights, which the adapter never saw. Which is closer to
the model as it was trained is measured (fidelity.py), on text of the run. W + ΔW is computed in fp32, rounded once,
to 16 bits or to a quantized format.

Weights go from the base's files to the new ones one tensor at a time, shard by shard, into a folder beside the target
that is renamed when everything in it is checked.

What is stored quantized is judged, too (judge.py): a target in which the update or the loss is gone is refused.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from halfbyte.config import SIXTEEN, Resolved, RunConfig, resolve
from halfbyte.reading.model_config import GENERATION, read_generation_config
from halfbyte.runs.layout import merge_report
from halfbyte.runs.saved import find_trained, look_up, trained_tokenizer
from halfbyte.runs.stop_tokens import data_report, generation_keys
from halfbyte.utils.errors import CheckpointError, ConfigError, TrainingError
from halfbyte.utils.files import check_space, new_directory, write_json
from halfbyte.utils.hardware import chosen_device
from halfbyte.utils.notices import notice

from ..loading.checkpoint import BaseCheckpoint
from .adapter import AdapterLayers
from .fidelity import Fidelity
from .judge import loss_is_higher, update_is_lost
from .kept import Kept
from .packing import Quantize, check_loader, packing
from .shards import check_shard
from .verify import Verifier
from .weights import MergedWeights, Target

LOST_NOTEWORTHY = 0.1  # share of the update
BASES = ("auto", "original", "dequantized")
SIDE_FILES = ("generation_config.json", "tokenizer.model", "preprocessor_config.json", "processor_config.json", "*.py")


@dataclass(frozen=True)
class MergeReport:
    """What `merge` wrote, and how close it is.

    Attributes:
        out_dir: folder of the merged model.
        target: the base merged onto, "original" or "dequantized".
        reason: why that one.
        dtype: of the weights that are not quantized.
        quantize: what the linear layers are stored in; "16bit" where nothing is quantized.
        nbytes: of the weights.
        targets: target → its distance from the model as it was trained; empty without verification.
        kept: target → what of the update is in the weights written onto it; also without verification.
        experts: of single experts' tensors, how many hold what the adapter changes in them, and in how many it does;
            None: it changes none.
        closer: the target with the smaller KL; None without verification.
        tokens: how many tokens of text the distances are means over.
        seconds: of the whole merge.
        run_dir: the run it belongs to, where merge.json is; None for an adapter alone.
    """

    out_dir: Path
    target: Target
    reason: str
    dtype: str
    quantize: str
    nbytes: int
    targets: Mapping[Target, Fidelity] = field(default_factory=dict)
    kept: Mapping[Target, Kept] = field(default_factory=dict)
    experts: tuple[int, int] | None = None
    closer: Target | None = None
    tokens: int = 0
    seconds: float = 0.0
    run_dir: Path | None = None

    def as_dict(self) -> dict[str, object]:
        """The contents of merge.json: of each target, `kl` and `max_logit_difference` from the model as trained."""
        targets = {
            name: asdict(each.trained) | {"from_unrounded": asdict(each.exact), "noise": asdict(each.noise)}
            | {"bound": each.bound, "kl_bound": each.kl_bound, "explained_by_rounding": each.explained}
            | {"choices_held": each.moved[0], "choices": each.moved[2]}
            | {"lost_update": each.lost, "adapter": asdict(each.adapter)}
            | {"loss": asdict(each.loss) | {"excess": each.loss.excess} if each.loss else None}
            for name, each in self.targets.items()
        }  # fmt: skip
        return {
            "targets": targets,
            "update_kept": {name: {"share": each.share, "error": each.error} for name, each in self.kept.items()},
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
        """In the run's folder: merge.json, or merge-FORMAT.json."""
        return merge_report("" if self.quantize == SIXTEEN else slug(self.quantize))

    def __str__(self) -> str:
        stored = self.dtype if self.quantize == SIXTEEN else self.quantize
        lines = [f"merged onto the {self.target} base in {stored}: {self.reason}"]
        for name, each in self.targets.items():
            mark = "  closer" if name == self.closer and len(self.targets) > 1 else ""
            lines.append(
                f"  {name:<11} KL {each.trained.kl:.3g} nats per token, largest logit difference "
                f"{each.trained.max_logit_difference:.3g} from the base with its adapter{mark}"
            )
        for name, kept in self.kept.items():
            lines.append(f"  {name:<11} {kept}" if kept.total else f"  {name:<11} no adapter")
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
            if written.lost > LOST_NOTEWORTHY:
                lines.append(
                    f"{written.lost:.0%} of the update is too small for {self.dtype} beside these weights and was"
                    " rounded away: the adapter, or a longer training run, keeps it"
                )
        else:
            lines.append("not verified")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Job:
    """A merge that is ready to start."""

    config: RunConfig
    run: Resolved
    adapter_dir: Path | None
    run_dir: Path | None
    out: Path
    device: torch.device
    weights: MergedWeights
    targets: tuple[Target, ...]
    preferred: Target
    reason: str


def merge(
    run_or_adapter_dir: Path | str,
    out_dir: Path | str,
    *,
    base: str = "auto",
    quantize: Quantize = None,
    verify: bool = True,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> MergeReport:
    """Write a model with the adapter merged: safetensors, config, tokenizer, chat template, generation config.

    Weights keep the dtype and the shards of the base checkpoint (bf16 where it is stored in 32 bits), but for the
    linear layers that `quantize` names. Host memory stays within two shards and the adapter; verifying loads the merged
    model, and the base with the adapter, one after the other. Numbers go to merge.json (merge-FORMAT.json) in the run's
    folder.

    Args:
        run_or_adapter_dir: a run's output_dir, one of its checkpoints, or an adapter that PEFT saved; to be quantized,
            a whole model too.
        out_dir: a folder that does not exist yet.
        base: "original": onto the checkpoint's weights; "dequantized": onto what 4-bit training saw; "auto": the one
            that measures closer to the model as it was trained, of those that keep what was trained (without `verify`:
            the dequantized one in 16 bits, else the original).
        quantize: what the linear layers are stored in: a format of `quantization:`, or patterns of them; or for another
            tool, which then loads the model: bnb-nf4, bnb-fp4, bnb-int8, fp8-block, nvfp4-modelopt. None: 16
            bits, or what the run was trained for (`qat_scheme`).
        verify: reload the merged model with that tool and compare logits with base and adapter, and the quantized
            weights with the merged ones.
        overwrite: replace `out_dir` if it is there.
        trust_remote_code: run the Python code that comes with the base; the run's own configuration does not count.
        console: where progress is shown; default: nowhere.

    Raises:
        ConfigError: `base` or `quantize` does not fit, or `out_dir` is there already; or stored so, the update or the
            loss is gone (judge.py).
        CheckpointError: no adapter, no base, an adapter for another base, or logits that rounding does not explain.
        TrainingError: no space. In every case nothing is left under `out_dir`.
    """
    started = time.perf_counter()
    out = Path(out_dir)
    _check_out(out, Path(run_or_adapter_dir), base, overwrite)
    job = _prepare(Path(run_or_adapter_dir), out, base, quantize, verify, trust_remote_code)
    with _progress(console) as progress, new_directory(out) as aside:
        _write_side_files(job, aside)
        found, written, tokens = (_write_closest if verify else _write_unverified)(job, aside, progress)
    dtype, stored = str(job.weights.config()["dtype"]), job.weights.packing.name
    kept = {target: kept for target in job.targets if (kept := job.weights.kept(target)).total}
    seconds = time.perf_counter() - started
    report = MergeReport(
        out, written, _reason(job, found), dtype, stored, job.weights.nbytes, found, kept,
        job.weights.experts_arrived(written), _closer(found), tokens, seconds, run_dir=job.run_dir,
    )  # fmt: skip
    if verify and job.run_dir:
        with whole_all_the_same(out):
            write_json(job.run_dir / report.file_name, report.as_dict())
    return report


@contextmanager
def whole_all_the_same(out: Path) -> Iterator[None]:
    """Around what is written of a merge into its run: without it the merged model is no worse, so it is only said."""
    try:
        yield
    except TrainingError as error:
        notice("merge-report", f"{error.message}; the merged model in {out} is whole")


def slug(quantize: str) -> str:
    """A part of a file's name for a target, e.g. "_.down_proj_kbit5" for patterns."""
    return re.sub(r"[^\w.-]+", "_", quantize)


# --- before long work ------------------------------------------------------------------------------------------------


def _check_out(out: Path, source: Path, base: str, overwrite: bool) -> None:
    if base not in BASES:
        raise ConfigError(f"base: {base!r} is not one of {', '.join(BASES)}", "use auto")
    if not os.path.lexists(out):
        return
    if not out.is_dir() or not overwrite:
        raise ConfigError(f"{out} exists already; merge does not overwrite", "name another folder, or remove this one")
    if source.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} holds the adapter to be merged", "name another folder")


def _prepare(source: Path, out: Path, base: str, quantize: Quantize, verify: bool, trust_remote_code: bool) -> _Job:
    find_trained(source)
    place, config = look_up(str(source), [f"trust_remote_code={trust_remote_code}"])
    run = resolve(config)
    scheme = run.storage.qat_scheme
    quantize = quantize or scheme
    if place.adapter is None and quantize in (None, SIXTEEN):
        raise CheckpointError(
            f"{source} has no adapter: {place.base} is a whole model, and there is nothing to merge",
            "use that folder as it is",
        )
    device = chosen_device(config.device)
    checkpoint = BaseCheckpoint(run.origin)
    if checkpoint.folder.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} holds the base model", "name another folder")
    stored = packing(quantize, run.origin, experts=scheme is None)  # which training rounds no experts to
    targets, preferred, reason = _targets(run.storage.quantized, checkpoint, base, bool(stored.formats))
    if scheme is not None and not stored.is_scheme(scheme):
        said = f"the run was trained to be stored as {scheme}"
        notice("merge-qat", f"{said}: in {stored.name} the model computes something else than in training")
    if verify:
        check_loader(stored.loader)
    weights = MergedWeights(run, checkpoint, AdapterLayers(run, place.adapter, device), stored)
    check_space(out, weights.nbytes, "free some space, or name a folder on another disk")
    run_dir = place.run_dir
    return _Job(config, run, place.adapter, run_dir, out, device, weights, targets, preferred, reason)


def _targets(
    trained_quantized: bool, base: BaseCheckpoint, wanted: str, quantized: bool
) -> tuple[tuple[Target, ...], Target, str]:
    """The bases to try, the one to write unless another measures closer, and why.

    `trained_quantized`: the base was, in training; `quantized`: the merged weights will be. The dequantized base may
    lie on their grid, which snaps the update back.
    """
    if base.quantized:
        if wanted == "original":
            raise ConfigError(
                f"base: original: {base.folder} itself is stored quantized", "use base: dequantized, or auto"
            )
        return ("dequantized",), "dequantized", "the base checkpoint itself is stored quantized"
    if not trained_quantized:
        return ("original",), "original", "training quantized no base, so both bases are the same"
    if wanted == "original":
        return ("original",), "original", "as asked"
    if wanted == "dequantized":
        return ("dequantized",), "dequantized", "as asked"
    both: tuple[Target, ...] = ("original", "dequantized")
    if quantized:
        return both, "original", "its weights do not lie on a grid that would take the update back (not measured)"
    return both, "dequantized", "the adapter was trained on it (not measured: verify is off)"


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_closest(job: _Job, aside: Path, progress: Progress) -> tuple[dict[Target, Fidelity], Target, int]:
    """Write and measure each target, one after the other in the same place; the last one written is the one to keep.

    Raises:
        ConfigError: in every target, the update or the loss is gone.
    """
    verifier = Verifier(job.run, job.adapter_dir, job.weights, aside, job.run_dir, progress)
    found: dict[Target, Fidelity] = {}
    refusals: dict[Target, ConfigError] = {}
    order = sorted(job.targets, key=lambda target: target == job.preferred)
    for target in order:
        measured = _write_and_verify(job, aside, target, verifier, progress)
        if isinstance(measured, ConfigError):
            refusals[target] = measured
        else:
            found[target] = measured
    written = _closer(found)
    if written is None:
        raise refusals[job.preferred]
    if written != order[-1]:
        _write_and_verify(job, aside, written, verifier, progress)
    return found, written, verifier.tokens


def _write_unverified(job: _Job, aside: Path, progress: Progress) -> tuple[dict[Target, Fidelity], Target, int]:
    if job.weights.packing.calibrated:  # by running the trained model
        Verifier(job.run, job.adapter_dir, job.weights, aside, job.run_dir, progress)
    _write(job, aside, job.preferred, progress)
    if lost := _lost(job, job.preferred):
        notice("merge-kept", f"{lost.message}; {lost.fix}")
    return {}, job.preferred, 0


def _reason(job: _Job, found: Mapping[Target, Fidelity]) -> str:
    """Why the model was merged onto the base that it was merged onto."""
    if len(found) > 1:
        return "it is closer to the trained model"
    return "stored so, the other one loses what was trained" if found and len(job.targets) > 1 else job.reason


def _closer(found: Mapping[Target, Fidelity]) -> Target | None:
    return min(found, key=lambda target: found[target].trained.kl, default=None)


def _write_and_verify(
    job: _Job, aside: Path, target: Target, verifier: Verifier, progress: Progress
) -> Fidelity | ConfigError:
    """How close the model merged onto `target` is, or why it is refused."""
    for file, sums in _write(job, aside, target, progress).items():
        check_shard(aside / file, sums)
    if lost := _lost(job, target):
        return lost
    measured = verifier.verify(aside, target)
    return loss_is_higher(measured.loss, job.weights.packing, job.run.storage.quantized) or measured


def _lost(job: _Job, target: Target) -> ConfigError | None:
    weights = job.weights
    if weights.as_trained:  # rounded in every step, the update is what survives rounding
        return None
    return update_is_lost(weights.kept(target), weights.packing, target, original=not weights.base.quantized)


def _write(job: _Job, aside: Path, target: Target, progress: Progress) -> dict[str, dict[str, int]]:
    task = progress.add_task(f"merging onto the {target} base", total=job.weights.nbytes)
    return job.weights.write(aside, target, lambda size: progress.advance(task, size))


def _write_side_files(job: _Job, aside: Path) -> None:
    """Everything but the weights. The tokenizer is the one that was trained with, its chat template included."""
    folder = job.weights.base.folder
    for pattern in SIDE_FILES:
        for file in folder.glob(pattern):
            shutil.copyfile(file, aside / file.name)
    write_json(aside / "config.json", job.weights.config())
    tokenizer = trained_tokenizer(job.adapter_dir or folder, job.config)
    tokenizer.save_pretrained(aside)
    if (keys := generation_keys(folder, tokenizer, data_report(job.run_dir))) != read_generation_config(folder):
        write_json(aside / GENERATION, keys)


@contextmanager
def _progress(console: Console | None) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(quiet=True), transient=True) as progress:
        yield progress
