"""Supervised fine-tuning from a configuration to a finished run directory.

`train` is the order of things; each step is a function of its own, here or in the modules beside. Whatever can be wrong
with the input is found by `prepare_job`, before any weight is loaded.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from halfbyte.adapters import add_adapter, no_input_casts, save_adapter
from halfbyte.config import RunConfig, load_config
from halfbyte.console import Console
from halfbyte.data.collate import make_collator
from halfbyte.errors import TrainingError
from halfbyte.files import new_directory, write_json
from halfbyte.generation.stops import stop_tokens
from halfbyte.hardware import free_cached_memory, is_out_of_memory
from halfbyte.memory.host import HEAP_WASTE, return_large_blocks
from halfbyte.memory.limit import held_to
from halfbyte.methods.base import Collate
from halfbyte.models.attention import lengths_vary
from halfbyte.models.isolation import isolate_run, release
from halfbyte.models.load import load_model
from halfbyte.models.patch import PatchReport, patch, unpatch
from halfbyte.models.recipes import configured_recipe
from halfbyte.notices import forget, silent
from halfbyte.parallel import present_mesh
from halfbyte.plan.estimate import GIB
from halfbyte.terminal import LiveMetrics, advise_out_of_memory, print_memory
from halfbyte.words import one_line

from ..runs.lock import run_lock
from . import checks, samples
from .arguments import training_arguments
from .loop import TrainingLoop
from .metrics import memory_now, peak_memory, reserved_memory, restart_peak
from .reproducible import repeatable, verdict
from .setup import Job, lengths_differ, prepare_job, write_environment, write_memory


@dataclass(frozen=True)
class RunResult:
    """A finished run: where it is, and its last numbers (`loss`, `eval_loss`, `perplexity`, `peak_bytes`, ...)."""

    output_dir: Path
    metrics: dict[str, Any]

    def merge(self, out_dir: Path | str, **options: Any) -> Any:
        """Merge the adapter into 16-bit weights; see `halfbyte.export.merge.merge`."""
        from halfbyte.export.merge import merge

        return merge(self.output_dir, out_dir, **options)


def finetune(model: str, dataset: str | list[str], **keys: Any) -> RunResult:
    """Fine-tune `model` on `dataset`; `keys` are those of the configuration file.

    Raises:
        HalfbyteError: with the key, file, line or tensor at fault and the fix.
    """
    forget()
    config = load_config(None, {"model_name_or_path": model, "dataset": dataset, **keys})
    return train(config, console=Console(outlives_reader=True))


def train(config: RunConfig, *, resume: str | bool | None = None, console: Console | None = None) -> RunResult:
    """Train what `config` describes and leave a run directory.

    Args:
        resume: True for the newest checkpoint in output_dir, or a checkpoint folder; default: `resume_from_checkpoint`.
        console: where progress is shown; default: nowhere.

    Raises:
        HalfbyteError: before long work for bad input; TrainingError while training (NaN, out of memory, full disk).
    """
    mesh = present_mesh()
    console = console if console is not None and mesh.is_main else Console(quiet=True)
    with run_lock(config.output_path), contextlib.nullcontext() if mesh.is_main else silent():
        job = prepare_job(config, config.resume_from_checkpoint if resume is None else resume, console, mesh)
        try:
            with _settings(job):
                return _run(job, console)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            stopped = TrainingError(advise_out_of_memory(job.plan, error, config))
            _report_stopped(job, stopped, console)
            raise stopped from error
        except TrainingError as error:
            _report_stopped(job, error, console)
            raise
        finally:
            _release(job.device)


@contextlib.contextmanager
def _settings(job: Job) -> Iterator[None]:
    """What holds for the whole process while a run trains: its share of memory, its algorithms."""
    limit = job.config.memory_limit_gib
    share = held_to(job.device, None if limit is None else int(limit * GIB))
    with share, repeatable(job.config, job.device), lengths_vary(lengths_differ(job)):
        yield


def _release(device: torch.device) -> None:
    """Give a finished run's memory back now: loop and model refer to each other, which waits for a collection."""
    gc.collect()
    free_cached_memory(device)


def _run(job: Job, console: Console) -> RunResult:
    measured: dict[str, int] = {}
    model = _trainable_model(job, measured)
    collate = job.method.collator(job.config, job.tokenizer, job.device)
    loop = _loop(job, model, collate)
    rows = job.data.train if job.data.eval is None else job.data.eval
    ids = torch.tensor([job.data.train[0]["input_ids"][: checks.TOKENS]], device=job.device)
    templated = job.data.report["template"] is not None
    prompts = samples.pick_prompts(job.config, job.tokenizer, rows, templated=templated)
    with no_input_casts(model, job.compute_dtype):
        results, report = _make_ready(job, model, loop, ids, console)
        before = _answers(job, model, prompts)
        _train(job, loop, console)
        after = _answers(job, model, prompts)
        measured |= _peaks(job, loop, measured["base_bytes"])
        release(model)
        unpatch(model)
        if job.mesh.is_main:
            results |= _save(job, model, ids)
    found = results["reproducible"] = job.environment["reproducible"] = verdict(job.config, job.device, report)
    console.print(f"a run with this seed {'has equal bytes' if found['equal'] else 'may differ'}: {found['why']}")
    if not job.mesh.is_main:
        return RunResult(job.output, {})
    _write_results(job, measured, results, list(zip(prompts, before, after, strict=True)))
    print_memory(console, job.plan, measured)
    _report(job, console)
    return RunResult(job.output, _summary(job, measured))


def _write_results(
    job: Job, measured: dict[str, int], results: dict[str, Any], answers: list[tuple[samples.Prompt, str, str]]
) -> None:
    """The files of a finished run beside its adapter and report."""
    write_memory(job, measured)
    write_json(job.output / "checks.json", results)
    write_json(
        job.output / "generations.json",
        [{"prompt": p.text, "before": b, "after": a, "reference": p.reference} for p, b, a in answers],
    )
    write_environment(job, finished=time.time())


def _make_ready(
    job: Job, model: Any, loop: TrainingLoop, ids: torch.Tensor, console: Console
) -> tuple[dict[str, Any], PatchReport | None]:
    """Patch the model, keep packed documents apart, and check each against what the model computed before."""
    report = None
    results = {"first_step": checks.loss_check(model, ids, job.compute_dtype)}
    if job.config.use_kernels and job.device.type != "cpu":
        report = patch(model, job.plan.levels or None)
        console.print(str(report))
        loss = results["first_step"]["loss"]
        results["fused"] = checks.fused_check(model, ids, job.compute_dtype, loss)
    plain = make_collator(job.config, job.tokenizer, job.device)
    isolation = isolate_run(model, job.config, plain, job.data.train, job.compute_dtype)
    if isolation is not None:
        results["isolation"] = isolation.document()
    if job.plan.use_graphs and (isolation is None or isolation.way == "positions"):  # other ways look at the batch
        loop.use_graphs()
    if job.run.precision.recipe != "bf16":  # a CPU computes in it, too
        loop.scaling = patch(model, job.plan.levels or None, configured_recipe(job.run.precision)).scaling
    return results, report


def _peaks(job: Job, loop: TrainingLoop, base_bytes: int) -> dict[str, int]:
    """What the run took; `run_bytes` is what the plan's prediction is of."""
    peak = peak_memory(job.device)
    graphs = {"graph_pool_bytes": held} if (held := loop.stepper.most_graph_bytes) else {}
    return {"peak_bytes": peak, "run_bytes": peak - base_bytes} | graphs | reserved_memory(job.device)


def _trainable_model(job: Job, measured: dict[str, int]) -> Any:
    """Load the model, add the adapter, and set up recomputation; measures memory before and after loading."""
    config = job.config
    if job.device.type == "cpu" and job.plan.total * HEAP_WASTE > job.plan.capacity_bytes:
        return_large_blocks()
    restart_peak(job.device)
    measured["base_bytes"] = memory_now(job.device)
    how: dict[str, Any] = {"device": job.device, "attn_implementation": config.attn_implementation}
    model = load_model(job.files, job.run.storage, dtype=job.weights_dtype, **how)
    measured["after_load_bytes"] = memory_now(job.device)
    set_seed(config.seed)
    if job.plan.activation_checkpointing and not job.plan.levels:
        _recompute_activations(model)
    return add_adapter(model, job.run.adapter) if job.run.adapter else model.requires_grad_(True)


def _recompute_activations(model: Any) -> None:
    """Non-reentrant, so that gradients reach adapters although the embeddings are frozen: no input hook is needed."""
    # transformers 5.23 renamed it; 5.17 knows only the old name
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _loop(job: Job, model: Any, collate: Collate) -> TrainingLoop:
    data, evaluate = job.data, job.data.eval is not None
    return TrainingLoop(
        config=job.config,
        data=job.size,
        metrics=job.metrics,
        compute_dtype=job.compute_dtype,
        model=model,
        args=training_arguments(job.config, job.device, job.compute_dtype, rows=len(data.train), evaluate=evaluate),
        device=job.device,
        rows=data.train,
        held_out=data.eval,
        collate=collate,
        mesh=job.mesh,
    )


def _answers(job: Job, model: Any, prompts: list[samples.Prompt]) -> list[str]:
    return samples.answer(
        model,
        job.tokenizer,
        prompts,
        max_new_tokens=job.config.sample_max_new_tokens,
        stops=stop_tokens(job.tokenizer, model, job.data.report.get("stop_tokens", [])),
    )


def _train(job: Job, loop: TrainingLoop, console: Console) -> None:
    """Evaluate, train, evaluate; a resumed run repeats none of it."""
    numbers = job.method.numbers
    with LiveMetrics(console, job.total_steps, numbers, capacity_bytes=job.plan.capacity_bytes) as live:
        job.metrics.listeners.append(live.update)
        if job.data.eval is not None and not job.metrics.records():
            loop.evaluate()
        loop.train(job.checkpoint)
        evaluated = [record["step"] for record in job.metrics.records() if record["kind"] == "eval"]
        if job.data.eval is not None and loop.state.global_step not in evaluated:
            loop.evaluate()


def _save(job: Job, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Write adapter/ (or model/) with the tokenizer, and check the files against what was trained."""
    if job.config.use_peft:
        with new_directory(job.output / "adapter") as aside:
            save_adapter(model, aside)
            job.tokenizer.save_pretrained(aside)
        return {"adapter_reload": checks.adapter_reload(model, job.output / "adapter", ids, job.compute_dtype)}
    if job.run.storage.qat_scheme is None:  # else `halfbyte merge` rounds what was trained, and once
        model.to(job.files.config.dtype or torch.float32)  # as the base was stored
    with new_directory(job.output / "model") as aside:
        model.save_pretrained(aside)
        job.tokenizer.save_pretrained(aside)
    return {"model_reload": checks.model_reload(model, job.output / "model")}


def _report(job: Job, console: Console) -> None:
    from halfbyte.report import write_card, write_report

    write_card(job.output)
    report = write_report(job.output)
    saved = "adapter" if job.config.use_peft else "model"
    console.print(one_line(f"saved: {job.output / saved} · report: {report}"), soft_wrap=True)


def _report_stopped(job: Job, error: TrainingError, console: Console) -> None:
    """What the steps before it came to, where there were any; nothing where the disk is full, which the error says."""
    if job.mesh.is_main and job.metrics.records():
        from halfbyte.report import write_report

        with contextlib.suppress(TrainingError):
            write_environment(job, time.time(), error.message)
            console.print(f"report until then: {write_report(job.output)}", soft_wrap=True)


def _summary(job: Job, measured: dict[str, int]) -> dict[str, Any]:
    """The last numbers of a run."""
    records = job.metrics.records()
    trained = [record for record in records if record["kind"] == "train"]
    evaluated = [record for record in records if record["kind"] == "eval"]
    summary = {"steps": trained[-1]["step"], "loss": trained[-1]["loss"], "peak_bytes": measured["peak_bytes"]}
    seconds = sum(record["tokens"] / record["tokens_per_second"] for record in trained)
    summary["tokens_per_second"] = sum(record["tokens"] for record in trained) / seconds
    if evaluated:
        summary |= {"eval_loss": evaluated[-1]["loss"], "eval_loss_before": evaluated[0]["loss"]}
        others = [metric.name for metric in job.method.numbers.evaluated[1:]]
        summary |= {name: evaluated[-1][name] for name in others if name in evaluated[-1]}
    return summary
