"""The folder of a run: open it, and write its files, from the configuration to the trained weights and the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig, dump_config, dump_given
from ..config.run_config import with_specs
from ..data.image_processor import ImageProcessor, save_processor_files
from ..data.images import thumbnail
from ..export.task_files import write_task_files
from ..formats import KBit
from ..mesh.sharded_linears import full_parameters
from ..methods.base import Numbers
from ..optim import trained_parameters
from ..plan.policy import describe_levels
from ..reading import read_json, read_text
from ..reading.model_config import GENERATION
from ..runs import checkpoints
from ..runs.layout import (
    CHECKS,
    COMPLETIONS,
    DATA_REPORT,
    ENVIRONMENT,
    FIRST,
    GENERATIONS,
    GIVEN_CONFIG,
    INITIAL,
    LAST,
    MEMORY,
    METRICS,
    MOMENTS,
    PAGES,
    RESOLVED_CONFIG,
    ROW_LOSSES,
    SAMPLES,
    WEIGHTS,
)
from ..runs.metrics import MetricsFile, describe_best, evaluation_of_weights, final_loss
from ..runs.saved import initial_adapter
from ..runs.status import Progress
from ..runs.stop_tokens import generation_keys
from ..utils.console import Console
from ..utils.errors import ConfigError, TrainingError
from ..utils.files import new_directory, remove, write_json, write_text
from ..utils.notices import notices_so_far
from ..utils.text import one_line
from ..utils.waiting import waiting
from . import checks
from .best_evaluation import BestEvaluation
from .checkpoint import save_weights
from .inputs import has_image_rows
from .loop import TrainingLoop
from .preflight import PreparedRun
from .samples import Prompt

HEADER = "# Written by halfbyte: the keys that were given."


@dataclass(frozen=True)
class OpenRun:
    """A run that writes into its folder, which is locked.

    Attributes:
        prepared: the prepared run.
        output: its folder.
        metrics: its metrics.jsonl.
        samples: its samples.jsonl.
        progress: state of the run, for its status.json.
    """

    prepared: PreparedRun
    output: Path
    metrics: MetricsFile
    samples: MetricsFile
    progress: Progress

    @classmethod
    def of(cls, prepared: PreparedRun, progress: Progress) -> OpenRun:
        output = prepared.config.output_path
        return cls(prepared, output, MetricsFile(output / METRICS), MetricsFile(output / SAMPLES), progress)


@contextlib.contextmanager
def open_run(prepared: PreparedRun, resume: str | bool | None, progress: Progress) -> Iterator[OpenRun]:
    """Write the `FIRST` files; remove them again if the run ends before its first step.

    Args:
        resume: the argument of `prepare_run`.
        progress: of the run's status.json.

    Raises:
        ConfigError: another run has written into the folder since `prepare_run`.
        TrainingError: a file cannot be written.
    """
    config = prepared.config
    run = OpenRun.of(prepared, progress)
    output = run.output
    if not prepared.mesh.is_main:
        yield run
        return
    # Comparing sizes is enough, except if a damaged checkpoint of the right size was skipped; so compare contents too.
    if all(checkpoints.starting_point(config, resume, contents=read) != prepared.checkpoint for read in (False, True)):
        wrong = f"output_dir: another run has saved a checkpoint in {output} since this one started"
        raise ConfigError(wrong, "start this run again")
    try:
        _write_first(run)
        yield run
    finally:
        if not (prepared.checkpoint or checkpoints.results_in(output)):
            generated = [GIVEN_CONFIG] if is_generated(output / GIVEN_CONFIG) else []
            for name in (*FIRST, COMPLETIONS, SAMPLES, ROW_LOSSES, *generated):
                (output / name).unlink(missing_ok=True)
            remove(output / INITIAL)
            remove(output / MOMENTS)


def finished_measures(prepared: PreparedRun) -> dict[str, int] | None:
    """Return the measured memory (bytes) of a run that has finished, with weights and numbers written; else None.

    environment.json is marked as finished after these files and before the pages made from them (`PAGES`).
    """
    output, checkpoint = prepared.config.output_path, prepared.checkpoint
    if checkpoint is None or not _is_last(checkpoint, prepared):
        return None
    if checkpoint.parent.resolve() != output.resolve() or not (output / saved_in(prepared.config)).is_dir():
        return None
    if not all((output / name).is_file() for name in LAST):
        return None
    environment, memory = (read_json(output / name, ConfigError, "remove it, and run again") for name in LAST[-2:])
    if not isinstance(environment, dict) or not environment.get("finished") or "stopped" in environment:
        return None
    measured = memory.get("measured") if isinstance(memory, dict) else None
    valid = isinstance(measured, dict) and "peak_bytes" in measured and all(type(n) is int for n in measured.values())
    return measured if valid else None


def _is_last(checkpoint: Path, prepared: PreparedRun) -> bool:
    """Return whether a run ends with this checkpoint: it has all steps, or early stopping ended it there."""
    if checkpoints.step_of(checkpoint) >= prepared.total_steps:
        return True
    best = BestEvaluation.of(prepared.config, prepared.method)
    if best is not None:
        best.load(checkpoints.read_state(checkpoint).get("best"))
    return best is not None and best.is_exhausted


def saved_in(config: RunConfig) -> str:
    """Return the folder name of a finished run's weights."""
    return WEIGHTS[0 if config.use_peft else 1]


def _write_first(run: OpenRun) -> None:
    output, checkpoint = run.output, run.prepared.checkpoint
    output.mkdir(parents=True, exist_ok=True)
    checkpoints.remove_leftovers(output)
    if checkpoint:
        checkpoints.rename_newer(output, checkpoint)
        if run.prepared.config.load_best_model_at_end:
            checkpoints.copy_best(output, checkpoint)
    step = checkpoints.step_of(checkpoint) if checkpoint else -1
    run.metrics.keep_until(step)
    if run.samples.path.exists():
        run.samples.keep_until(step)
    if checkpoint is None:
        (output / ROW_LOSSES).unlink(missing_ok=True)
    write_text(output / RESOLVED_CONFIG, dump_config(with_specs(run.prepared.config, KBit.names)))
    file = output / GIVEN_CONFIG  # one that a user wrote is not replaced
    if not file.exists() or is_generated(file):
        command = one_line(f"halfbyte train {file} output_dir=NEW")
        write_text(file, f"{HEADER} `{command}` does the same again.\n{dump_given(run.prepared.written)}")
    write_json(output / DATA_REPORT, run.prepared.data.report)
    write_memory(run, {})
    write_environment(run)


def is_generated(file: Path) -> bool:
    """Return whether halfbyte wrote this run.yaml."""
    try:
        return read_text(file, ConfigError).startswith(HEADER)
    except ConfigError:
        return False


def write_memory(run: OpenRun, measured: dict[str, int], ranks: Sequence[dict[str, int]] = ()) -> None:
    """Write memory.json: the plan, and the memory measured so far (bytes).

    Args:
        ranks: measured memory by rank.
    """
    plan = run.prepared.plan
    document = {
        "device": str(run.prepared.machine.device),
        "capacity_bytes": plan.capacity_bytes,
        "predicted": plan.predicted(),
        "measured": measured,
        "activation_checkpointing": plan.activation_checkpointing,
        "levels": describe_levels(plan.levels),
        "trains_all": plan.trains_all,
        "cuda_graphs": plan.use_graphs,
        "stays": list(plan.stays),
        "hosted": list(plan.hosted),
        "offloaded": list(plan.offloaded),
        "step_seconds": plan.seconds,
        "reason": plan.reason,
    }
    if plan.answering is not None:
        document["rollouts"] = asdict(plan.answering)
    if len(ranks) > 1:
        document["ranks"] = list(ranks)
    write_json(run.output / MEMORY, document)


def write_environment(run: OpenRun, **end_facts: Any) -> None:
    """Write environment.json, with all notices so far; `end_facts` are known at a run's end."""
    facts = run.prepared.machine.facts | {"finished": None, "inputs": run.prepared.identity} | end_facts
    mesh = run.prepared.mesh
    if mesh.size > 1:
        facts |= {"processes": mesh.size, "parallel": str(mesh.layout)}
    write_json(run.output / ENVIRONMENT, facts | {"notices": notices_so_far()})


# --- end of a run ----------------------------------------------------------------------------------------------------


@waiting("saving the weights and reading them back")
def save_trained(job: OpenRun, loop: TrainingLoop, ids: torch.Tensor) -> dict[str, Any]:
    """Write adapter/ (or model/) with the tokenizer, and compare the files with the trained weights.

    Ranks that compute one model together all compare; otherwise the main rank does.

    Args:
        ids: token ids [1, T] for logits of the reloaded adapter.

    Returns:
        Results for checks.json.
    """
    run, model = job.prepared, loop.model
    split = loop.pipeline_state
    weights = split.weights() if split else None
    folder = job.output / saved_in(run.config)
    initial = initial_adapter(job.output, run.config)
    if not run.config.use_peft and run.config.storage.qat_scheme is None:
        # Save in the base model's dtype. With QAT `halfbyte merge` rounds the trained weights, so they keep theirs.
        model.to(run.files.config.dtype or torch.float32)
    with full_parameters(trained_parameters(model).values()), loop.optimizer_shards.full():
        if run.mesh.is_main:
            with new_directory(folder) as temporary:
                save_weights(model, temporary, weights, scaled=bool(run.config.rope_scaling))
                if initial is not None:
                    initial.convert(temporary)
                run.tokenizer.save_pretrained(temporary)
                if has_image_rows(run.data):
                    save_processor_files(run.files.folder(), temporary, ImageProcessor(run.config, run.tokenizer))
                write_task_files(temporary, run.config, run.files.config, run.tokenizer.pad_token_id)
                if not run.config.use_peft:
                    write_json(temporary / GENERATION, generation_keys(temporary, run.tokenizer, run.data.report))
    run.mesh.barrier()
    if split:
        return {"adapter_file": checks.adapter_file(split.stages.model, folder, initial)}
    if not run.mesh.is_main and not run.mesh.is_model_parallel:
        return {}
    if run.config.use_peft:
        return {"adapter_reload": checks.adapter_reload(model, folder, ids, run.machine.compute_dtype, initial)}
    return {"model_reload": checks.model_reload(model, folder)}


def write_results(
    job: OpenRun,
    ranks: list[dict[str, int]],
    results: dict[str, Any],
    answers: list[tuple[Prompt, str, str]],
    best: dict[str, Any] | None,
) -> None:
    """Write memory.json, checks.json, generations.json and environment.json of a finished run.

    Args:
        ranks: measured memory by rank, bytes.
        results: for checks.json.
        answers: prompts with their answers before and after training.
        best: the best evaluation, if evaluations were compared.
    """
    write_memory(job, ranks[0], ranks)
    write_json(job.output / CHECKS, results)
    records = []
    for prompt, before, after in answers:
        record = {"prompt": prompt.text, "before": before, "after": after, "reference": prompt.reference}
        records.append(record | ({"images": [thumbnail(image) for image in prompt.images]} if prompt.images else {}))
    write_json(job.output / GENERATIONS, records)
    compared = {} if best is None else {"best": best}
    write_environment(job, reproducible=results["reproducible"], finished=time.time(), **compared)


def print_best(job: OpenRun, best: dict[str, Any] | None, console: Console) -> None:
    """Print the best evaluation if evaluations were compared, else the best checkpoint if there is one."""
    if best is not None:
        console.print(one_line(describe_best(best)), soft_wrap=True)
    elif (path := checkpoints.best(job.output)) is not None:
        console.print(one_line(f"best checkpoint: {path}, by its rewards on held-out prompts"), soft_wrap=True)


@waiting("writing the report")
def write_report_files(job: OpenRun, console: Console, card: bool = True) -> None:
    """Write report.html, and the model card if `card`."""
    from ..report.card import write_card
    from ..report.page import write_report

    if card:
        write_card(job.output)
    report = write_report(job.output)
    saved, metric = job.output / saved_in(job.prepared.config), job.prepared.method.numbers.trained[0]
    trained = [record for record in job.metrics.records() if record["kind"] == "train"]
    loss = final_loss(trained, metric.over)
    final = "" if loss is None else f" · final training {metric.label} {format(loss, metric.format)}"
    console.print(one_line(f"saved: {saved}{final} · report: {report}"), soft_wrap=True)


def write_missing_pages(job: OpenRun, console: Console) -> None:
    """Write the pages that a finished run lacks, and remove what an interrupted one has left."""
    checkpoints.remove_leftovers(job.output)
    if missing := [name for name in PAGES if not (job.output / name).is_file()]:
        write_report_files(job, console, card=PAGES[0] in missing)


def write_report_of_stopped(run: OpenRun, error: TrainingError, console: Console) -> None:
    """Write the report of the steps before `error`, if there are any; ignore a full disk, which `error` names."""
    if run.prepared.mesh.is_main and any(record["kind"] == "train" for record in run.metrics.records()):
        from ..report.page import write_report

        with contextlib.suppress(TrainingError):
            write_environment(run, finished=time.time(), stopped=error.message)
            console.print(one_line(f"report until then: {write_report(run.output)}"), soft_wrap=True)


def summarize(job: OpenRun, measured: dict[str, int]) -> dict[str, Any]:
    """Return the last numbers of a run; see `summarize_records`."""
    best = read_json(job.output / ENVIRONMENT, ConfigError).get("best")
    records, numbers = job.metrics.records(), job.prepared.method.numbers
    return summarize_records(records, numbers, job.prepared.total_steps, measured["peak_bytes"], best)


def summarize_records(
    records: Sequence[dict[str, Any]], numbers: Numbers, steps: int, peak_bytes: int, best: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the last numbers of a run; `loss` is the final loss of its model card.

    Args:
        records: of metrics.jsonl.
        numbers: of the run's method.
        steps: optimizer steps of the run.
        best: the best evaluation; None: the run compares none.
    """
    trained = [record for record in records if record["kind"] == "train"]
    evaluated = [record for record in records if record["kind"] == "eval"]
    summary: dict[str, Any] = {"steps": steps, "peak_bytes": peak_bytes}
    if trained:  # empty if a user removed metrics.jsonl
        seconds = sum(record["tokens"] / record["tokens_per_second"] for record in trained)
        summary["tokens_per_second"] = sum(record["tokens"] for record in trained) / seconds
        over = numbers.trained[0].over
        summary |= {"steps": trained[-1]["step"], "loss": final_loss(trained, over)}
    if evaluated:
        first, *names = (metric.name for metric in numbers.evaluated)
        last = evaluation_of_weights(evaluated, best)
        summary |= {f"eval_{first}": last[first], f"eval_{first}_before": evaluated[0][first]}
        summary |= {name: last[name] for name in names if name in last}
        summary |= {} if best is None else {"best_step": best["step"], "best_metric": best["value"]}
    return summary
