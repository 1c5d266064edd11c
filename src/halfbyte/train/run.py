"""A training run, from a configuration to a finished run directory.

`train` gives the order: prepare the run (`preflight`), open its folder (`run_folder`), load and verify the model
(`setup`), run the loop (`loop`), save and report (`run_folder`). `prepare_run` finds everything that can be wrong with
the input, before any weight is loaded and any file is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, overload

import torch

from ..config import RunConfig, load_config
from ..data.collate import head_share, rounds_widths, with_head_rows
from ..data.rows import RowTable
from ..mesh.mesh import present_mesh
from ..methods.base import Collate
from ..modeling.compute_dtype import no_input_casts
from ..parallel.launch.agreement import check_agreement, check_shared
from ..parallel.launch.launcher import notice_idle_gpus
from ..plan.advice import advise_out_of_memory
from ..report.terminal import LiveMetrics, print_memory, print_run
from ..rewards.specs import named
from ..runs.checkpoints import step_of
from ..runs.inputs import check_output
from ..runs.layout import REPORT
from ..runs.status import Progress, report_status
from ..utils.console import Console, is_verbose
from ..utils.errors import TrainingError
from ..utils.hardware import chosen_device, is_out_of_memory
from ..utils.notices import reset_notices, silent
from ..utils.processes import is_main_rank
from ..utils.text import one_line
from ..utils.waiting import showing_waits
from . import checks, samples
from .background import BackgroundRun
from .hub import HubRepository
from .image_features import check_features, with_features
from .loop import Steps, TrainingLoop, drive, seed_process
from .preflight import PreparedRun, prepare_run
from .reference import add_reference
from .result import RunResult
from .rollouts import sampled_rollouts
from .row_losses import RowLosses
from .run_folder import (
    OpenRun,
    finished_measures,
    open_run,
    print_best,
    save_trained,
    saved_in,
    summarize,
    write_missing_pages,
    write_report_files,
    write_report_of_stopped,
    write_results,
)
from .setup import (
    ModelSource,
    loss_scaler,
    measure_peaks,
    pipelined_stepper,
    process_settings,
    shard_for_rank,
    training_context,
)
from .several import train_adapters
from .trackers import ANSWERS, Details, described
from .verify import patch_and_verify, patch_and_verify_stages, remove_patches


@overload
def finetune(model: str, dataset: str | list[str], *, background: Literal[False] = False, **keys: Any) -> RunResult: ...
@overload
def finetune(model: str, dataset: str | list[str], *, background: Literal[True], **keys: Any) -> BackgroundRun: ...
def finetune(
    model: str, dataset: str | list[str], *, background: bool = False, **keys: Any
) -> RunResult | BackgroundRun:
    """Fine-tune a model, as `halfbyte train` does, and write the run to `output_dir`.

    Args:
        model: a folder with a Hugging Face checkpoint, a GGUF file, or a hub id.
        dataset: files, folders or hub ids of the training rows.
        background: train in a process of its own, and return at once.
        keys: keys of the configuration, such as `output_dir="out"`, `method="dpo"`, `learning_rate=1e-4`.
            `reward_funcs` may also contain functions.

    Returns:
        The run's folder and last numbers; in the background a handle of the run, with `stop()` and `wait()`.

    Raises:
        HalfbyteError: names the key, file, line or tensor at fault and the fix; for bad input before long work.
    """
    reset_notices()
    if background:
        return BackgroundRun.start({"model_name_or_path": model, "dataset": dataset, **keys})
    if (entries := keys.get("reward_funcs")) is not None:
        several = entries if isinstance(entries, list) else [entries]
        keys["reward_funcs"] = [named(entry) if callable(entry) else entry for entry in several]
    config = load_config(None, {"model_name_or_path": model, "dataset": dataset, **keys})
    console = Console(outlives_reader=True, quiet=not is_main_rank())
    print_run(console, config)
    return train(config, console=console)


def train(config: RunConfig, *, resume: str | bool | None = None, console: Console | None = None) -> RunResult:
    """Train as `config` describes and write a run directory.

    Args:
        resume: True for the newest checkpoint in output_dir, or a checkpoint folder; default: `resume_from_checkpoint`.
        console: shows the progress; default: none.

    Raises:
        HalfbyteError: before long work for bad input; TrainingError while training (NaN, out of memory, full disk).
    """
    resume = config.resume_from_checkpoint if resume is None else resume
    if config.trains_several:
        return RunResult(config.output_path, train_adapters(config, resume, console, run_or_report, finished_run))
    with present_mesh(config.layout, chosen_device(config.device).type) as mesh:
        console = console if console is not None and mesh.is_main else Console(quiet=True)
        with showing_waits(console), contextlib.nullcontext() if mesh.is_main else silent():
            if mesh.size == 1:
                notice_idle_gpus(config)
            check_agreement(mesh, config)
            if mesh.is_main:
                check_output(config, resume)
            with report_status(config.output_path) if mesh.is_main else contextlib.nullcontext(Progress()) as progress:
                prepared = prepare_run(config, resume, console, mesh)
                measured = mesh.from_main(finished_measures(prepared) if mesh.is_main else None)
                if measured is not None:
                    return finished_run(prepared, measured, console, progress)
                with open_run(prepared, resume, progress) as run:
                    check_shared(mesh, run.output)
                    with process_settings(prepared):
                        return drive(run_or_report(run, console))


def finished_run(run: PreparedRun, measured: dict[str, int], console: Console, progress: Progress) -> RunResult:
    """Return the result of a run that is already finished; writes its missing pages, and changes no result."""
    output = run.config.output_path
    job = OpenRun.of(run, progress)
    assert run.checkpoint is not None
    done = progress.step = step_of(run.checkpoint)
    progress.total_steps = run.total_steps
    longer = "" if done >= run.total_steps else " (early stopping; raise early_stopping_patience to continue)"
    line = f"finished already: {done} of {run.total_steps} steps{longer}, {output}"
    console.print(one_line(line), soft_wrap=True)
    if run.mesh.is_main:
        write_missing_pages(job, console)
    return RunResult(output, summarize(job, measured))


def run_or_report(run: OpenRun, console: Console, source: ModelSource | None = None) -> Steps[RunResult]:
    """Run; if it stops with an error, write the report of the steps before it.

    Args:
        source: gives the run its model; default: it loads its own.
    """
    prepared = run.prepared
    try:
        with run.progress.ends():
            return (yield from _run(run, console, source or ModelSource()))
    except TrainingError as error:
        write_report_of_stopped(run, error, console)
        raise
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        stopped = TrainingError(advise_out_of_memory(prepared.plan, error, prepared.config))
        write_report_of_stopped(run, stopped, console)
        raise stopped from error


def _run(job: OpenRun, console: Console, source: ModelSource) -> Steps[RunResult]:
    run = job.prepared
    device = run.machine.device
    job.progress.state, job.progress.total_steps = "loading", run.total_steps
    measured: dict[str, int] = {}
    dtype = run.machine.compute_dtype
    _print_resumed(run, console)
    hub = HubRepository(run.config) if run.config.push_to_hub and run.mesh.is_main else None
    models = source.digests(run)
    model = source.load(run, measured)
    pipeline = shard_for_rank(run, model)
    grad_scaler = loss_scaler(run)
    pipelined = None if pipeline is None else pipelined_stepper(run, model, pipeline.stages, grad_scaler)
    seed_process(run.config, run.mesh)
    ids = torch.tensor([run.data.train[0]["input_ids"][: checks.TOKENS]], device=device)
    rows, held_out = run.data.train, run.data.eval
    with no_input_casts(model, dtype):
        if pipelined is None:
            verified = patch_and_verify(run, model, ids, console)
        else:
            verified = patch_and_verify_stages(run, model, pipelined, ids)
        check_features(run, model)
        results = verified.results
        if run.storage_loss is not None:
            results["storage_loss"] = asdict(run.storage_loss)
        if run.method.reference:
            rows, held_out, results["reference"] = add_reference(run, model, console)
        prompts = list(run.prompts)
        answer = partial(
            samples.answer_prompts,
            model,
            run.tokenizer,
            prompts,
            max_new_tokens=run.config.sample_max_new_tokens,
            data_stops=run.data.report.get("stop_tokens", []),
            pipelined=pipelined,
        )
        untrained_answers = answer()
        samples_log = _samples_log(job, answer, untrained_answers)
        stepper = pipelined or source.stepper(run, model, verified)
        with with_features(run, model, rows, held_out, console) as (rows, held_out, features):
            if features is not None:
                results["image_features"] = features
                prompts[:] = samples.with_features(prompts, rows if held_out is None else held_out)
            with (
                training_context(run, model, console) as count_experts,
                sampled_rollouts(job, model, stepper, rows) as rollouts,
            ):
                loop = TrainingLoop(
                    config=run.config,
                    method=run.method,
                    identity=lambda: run.identity | models.result(),
                    metrics=job.metrics,
                    compute_dtype=dtype,
                    model=model,
                    args=run.arguments,
                    device=device,
                    rows=RowTable(rows) if run.data.stream is None else run.data.stream,
                    held_out=held_out,
                    collate=_collator(run),
                    stepper=stepper,
                    grad_scaler=grad_scaler,
                    count_experts=count_experts,
                    mesh=run.mesh,
                    fp8_scales=verified.fp8_scales,
                    rollouts=rollouts,
                    pipeline_state=pipeline,
                    progress=job.progress,
                    samples=samples_log,
                )
                trackers = loop.callbacks.trackers
                trackers.first = Details(described(run.config, run.plan)) if trackers.is_used else None
                if hub is not None:
                    loop.add_callback(hub)
                row_losses = RowLosses.of(job, rows, held_out) if run.config.row_losses else None
                yield from _train(job, loop, console, row_losses)
            job.progress.state = "evaluating"
            trained_answers = answer()
        measure_peaks(run, stepper, measured)
        remove_patches(model)
        job.progress.state = "saving"
        results |= save_trained(job, loop, ids)
    reproducible = checks.reproducibility(run.config, device, verified.report)
    results["reproducible"] = reproducible
    if is_verbose(console):
        weights = "gives the same weights, byte for byte" if reproducible["equal"] else "may give other weights"
        console.print(f"repeating this run on this machine {weights}: {reproducible['why']}")
    ranks = run.mesh.gather(measured)
    if not run.mesh.is_main:
        return RunResult(job.output, {})
    answers = list(zip(run.prompts, untrained_answers, trained_answers, strict=True))
    write_results(job, ranks, results, answers, loop.best_result())
    print_memory(console, run.plan, measured)
    write_report_files(job, console)
    trackers.finish(Details({}, _answers(job, answers), job.output / REPORT))
    if hub is not None:
        console.print(one_line(hub.finish(job.output / saved_in(run.config))), soft_wrap=True)
    return RunResult(job.output, summarize(job, measured))


def _print_resumed(run: PreparedRun, console: Console) -> None:
    if run.checkpoint is not None:
        line = f"resuming from {run.checkpoint}: {step_of(run.checkpoint)} of {run.total_steps} steps are done"
        console.print(one_line(line), soft_wrap=True)


def _answers(job: OpenRun, answers: Sequence[tuple[samples.Prompt, str, str]]) -> list[tuple[Any, ...]]:
    """Return the columns `ANSWERS` of the answers at each of the `sample_steps`, else before and after training."""
    if job.samples.path.exists():
        return [tuple(record.get(name) for name in ANSWERS) for record in job.samples.records()]
    last = job.progress.step
    return [
        (step, prompt.text, answer, prompt.reference)
        for prompt, before, after in answers
        for step, answer in ((0, before), (last, after))
    ]


def _collator(run: PreparedRun) -> Collate:
    """Return the collator of the run's batches. In one process, the head skips positions before untrained tokens."""
    device = run.machine.device
    collate = run.method.collator(run.config, run.tokenizer, device)
    if not run.method.skips_rows or run.mesh.size > 1:
        return collate
    if not rounds_widths(device):
        return with_head_rows(collate, None)
    share = head_share(run.data.train) if run.data.stream is None else None
    return collate if share is None else with_head_rows(collate, share)


def _samples_log(
    job: OpenRun, answer: Callable[[], list[str]], untrained_answers: list[str]
) -> samples.SampleLog | None:
    """Return the log of answers in training, which has those before it; None if the run has no `sample_steps`."""
    run = job.prepared
    if not run.config.sample_steps:
        return None
    log = samples.SampleLog(job.samples, run.prompts, answer, run.config.sample_steps, writes=run.mesh.is_main)
    log.write(0, untrained_answers)
    return log


def _train(job: OpenRun, loop: TrainingLoop, console: Console, row_losses: RowLosses | None) -> Steps[None]:
    """Evaluate, train, evaluate; a resumed run does not repeat a recorded evaluation."""
    run, numbers = job.prepared, job.prepared.method.numbers
    with LiveMetrics(console, run.total_steps, numbers, capacity_bytes=run.plan.capacity_bytes) as live:
        job.metrics.listeners.append(live.update)
        job.progress.state = "training"
        if row_losses is not None:
            row_losses.measure(loop, "start")
        if run.data.eval is not None and not _recorded(job):
            loop.evaluate()
        yield from loop.steps(run.checkpoint)
        evaluated = [record["step"] for record in _recorded(job) if record["kind"] == "eval"]
        if run.data.eval is not None and loop.state.global_step not in evaluated:
            loop.evaluate()
        loop.load_best()
        if row_losses is not None:
            row_losses.measure(loop, "end")
    print_best(job, loop.best_result(), console)


def _recorded(job: OpenRun) -> list[dict[str, Any]]:
    """Return the records so far, as the main rank wrote them; a shared disk may show them to other ranks later."""
    mesh = job.prepared.mesh
    return mesh.from_main(job.metrics.records() if mesh.is_main else [])
