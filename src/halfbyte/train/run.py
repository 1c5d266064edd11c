"""Supervised fine-tuning from a configuration to a finished run directory.

`train` is the order of things; each step is a function of its own, here or in the modules beside. Whatever can be wrong
with the input is found by `prepare_run`, before any weight is loaded and any file is written.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from halfbyte.batch import to_device
from halfbyte.config import RunConfig, load_config
from halfbyte.data.collate import make_collator
from halfbyte.data.collate_answers import answer_collator, first_prompt, with_own_prompts
from halfbyte.generation.sampling import stop_tokens
from halfbyte.layers.plain import multiply_by_onednn
from halfbyte.loading.load import load_model
from halfbyte.memory.allocators import FIRST_KERNELS, HEAP_WASTE, memory_cap, return_large_blocks
from halfbyte.memory.expert_offload import offload_experts
from halfbyte.methods.answers import turn_dropout_off
from halfbyte.modeling.adapters import add_adapter, compute_autocast, no_input_casts, reads_base_weights
from halfbyte.modeling.attention import cudnn_lengths
from halfbyte.modeling.checkpointing import enable_checkpointing
from halfbyte.modeling.layer import decoder_layers
from halfbyte.modeling.packing import isolate_for_run, remove_isolation
from halfbyte.modeling.patch import patch, patch_attention, unpatch
from halfbyte.modeling.projections import configured_recipe
from halfbyte.modeling.routers import track_routers
from halfbyte.optim import trained_parameters
from halfbyte.parallel.context.model import context_parallel
from halfbyte.parallel.launch.launcher import notice_idle_gpus
from halfbyte.parallel.mesh import SHARD_AXES, present_mesh
from halfbyte.parallel.pipeline.model import LocalStages
from halfbyte.parallel.shard.model import shard_model
from halfbyte.parallel.tensor.layers import full_parameters
from halfbyte.parallel.tensor.model import apply_tensor_parallel
from halfbyte.plan.advice import advise_out_of_memory
from halfbyte.plan.estimate import GIB
from halfbyte.reading.model_config import GENERATION
from halfbyte.rl.rewards.specs import named
from halfbyte.utils.console import Console
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.files import new_directory, write_json
from halfbyte.utils.hardware import chosen_device, free_cached_memory, is_out_of_memory
from halfbyte.utils.notices import reset_notices, silent
from halfbyte.utils.terminal import LiveMetrics, expert_usage_line, print_memory
from halfbyte.utils.text import one_line

from ..auxiliary.reference import add_reference
from ..parallel.launch.agreement import check_agreement, check_shared
from ..parallel.pipeline.full_state import PipelineState
from ..parallel.pipeline.stepper import PipelinedStepper
from ..parallel.rank_sync import RankSync
from ..rl.setup import sampled_rollouts
from ..runs.layout import CHECKS, EXPERTS, GENERATIONS, METRICS, PAGES
from ..runs.lock import run_lock
from ..runs.stop_tokens import generation_keys
from . import checks, pipeline_run, samples
from .checkpoint import best, remove_leftovers
from .checkpoint_state import save_weights
from .determinism import repeatable, verdict
from .loop import TrainingLoop, seed_process
from .metrics import MetricsFile, memory_now, peak_memory, reserved_memory, restart_peak
from .pipeline_run import Ready
from .preflight import PreparedRun, lengths_worth_plans, prepare_run
from .run_folder import OpenRun, finished_measures, open_run, saved_in, write_environment, write_memory
from .stepper import GraphedStepper, Stepper, Sums, loss_scaler, sums_of


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
    """Fine-tune `model` on `dataset`; `keys` are those of the configuration file, with functions among reward_funcs.

    Raises:
        HalfbyteError: with the key, file, line or tensor at fault and the fix.
    """
    reset_notices()
    if (entries := keys.get("reward_funcs")) is not None:
        several = entries if isinstance(entries, list) else [entries]
        keys["reward_funcs"] = [named(entry) if callable(entry) else entry for entry in several]
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
    resume = config.resume_from_checkpoint if resume is None else resume
    with present_mesh(config.layout, chosen_device(config.device).type) as mesh:
        console = console if console is not None and mesh.is_main else Console(quiet=True)
        with contextlib.nullcontext() if mesh.is_main else silent():
            if mesh.size == 1:
                notice_idle_gpus(config)
            check_agreement(mesh, config)
            prepared = prepare_run(config, resume, console, mesh)
            with _locked(prepared):
                measured = mesh.from_main(finished_measures(prepared) if mesh.is_main else None)
                if measured is not None:
                    return _finished(prepared, measured, console)
                with open_run(prepared, resume) as run:
                    check_shared(mesh, run.output)
                    return _run_or_report(run, console)


def _finished(run: PreparedRun, measured: dict[str, int], console: Console) -> RunResult:
    """A run that has nothing left to compute: its files stay as they are, and what was not written of them is."""
    output = run.config.output_path
    job = OpenRun(run, output, MetricsFile(output / METRICS))
    console.print(one_line(f"finished already: {run.total_steps} of {run.total_steps} steps, {output}"), soft_wrap=True)
    if run.mesh.is_main:
        remove_leftovers(output)
        if missing := [name for name in PAGES if not (output / name).is_file()]:
            _report(job, console, card=PAGES[0] in missing)
    return RunResult(output, _summary(job, measured))


def _locked(run: PreparedRun) -> contextlib.AbstractContextManager[Any]:
    return run_lock(run.config.output_path) if run.mesh.is_main else contextlib.nullcontext()


def _run_or_report(run: OpenRun, console: Console) -> RunResult:
    prepared = run.prepared
    try:
        with _settings(prepared):
            return _run(run, console)
    except TrainingError as error:
        _report_stopped(run, error, console)
        raise
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        stopped = TrainingError(advise_out_of_memory(prepared.plan, error, prepared.config))
        _report_stopped(run, stopped, console)
        raise stopped from error
    finally:
        _release(prepared.machine.device)


@contextlib.contextmanager
def _settings(run: PreparedRun) -> Iterator[None]:
    """What holds for the whole process while a run trains: its share of memory, its algorithms."""
    with (
        memory_cap(run.machine.device, _most_bytes(run)),
        repeatable(run.config, run.machine.device),
        cudnn_lengths(lengths_worth_plans(run)),
    ):
        yield


def _most_bytes(run: PreparedRun) -> int | None:
    """That torch may take of the device. A run whose weights wait on the host fills it, and CUDA does not ask torch to
    give back what it only caches: the kernels that the first steps load must find room."""
    if run.plan.hosted or run.plan.offloaded:
        return run.plan.capacity_bytes - FIRST_KERNELS
    return None if run.config.memory_limit_gib is None else int(run.config.memory_limit_gib * GIB)


def _release(device: torch.device) -> None:
    """Give a finished run's memory back now: loop and model refer to each other, which waits for a collection."""
    gc.collect()
    free_cached_memory(device)


def _run(job: OpenRun, console: Console) -> RunResult:
    run, device, measured = job.prepared, job.prepared.machine.device, dict[str, int]()
    dtype = run.machine.compute_dtype
    model = _trainable_model(run, measured)
    stages = _own_part(run, model)
    sums, scaler = sums_of(run.method, model, dtype), loss_scaler(device, dtype)
    pipelined = None if stages is None else pipeline_run.pipelined_stepper(run, model, stages, sums, scaler)
    seed_process(run.config, run.mesh)
    ids = torch.tensor([run.data.train[0]["input_ids"][: checks.TOKENS]], device=device)
    rows, held_out = run.data.train, run.data.eval
    with no_input_casts(model, dtype):
        if pipelined is None:
            ready = _make_ready(run, model, ids, console)
        else:
            ready = pipeline_run.make_ready(run, model, pipelined, ids)
        results = ready.results
        if run.method.reference:
            rows, held_out, results["reference"] = add_reference(run, model, console)
        before = _answers(run, model, pipelined)
        with context_parallel(model, run.mesh), _counted_experts(job, model, sums, console) as sums:
            stepper = pipelined or make_stepper(run, model, sums, scaler, ready.graphs)
            with sampled_rollouts(job, model, stepper) as rollouts:
                loop = TrainingLoop(
                    config=run.config,
                    data=run.size,
                    metrics=job.metrics,
                    compute_dtype=dtype,
                    model=model,
                    args=run.arguments,
                    device=device,
                    rows=rows,
                    held_out=held_out,
                    collate=run.method.collator(run.config, run.tokenizer, device),
                    stepper=stepper,
                    mesh=run.mesh,
                    scaling=ready.scaling,
                    rollouts=rollouts,
                    pipeline_state=None if stages is None else PipelineState(run.mesh, stages),
                )
                _train(job, loop, console)
        after = _answers(run, model, pipelined)
        measured |= _peaks(device, stepper, measured["base_bytes"])
        remove_isolation(model)
        unpatch(model)
        results |= _save(job, loop, ids)
    found = results["reproducible"] = verdict(run.config, device, ready.report)
    console.print(f"a run with this seed {'has equal bytes' if found['equal'] else 'may differ'}: {found['why']}")
    ranks = run.mesh.gather(measured)
    if not run.mesh.is_main:
        return RunResult(job.output, {})
    _write_results(job, ranks, results, list(zip(run.prompts, before, after, strict=True)))
    print_memory(console, run.plan, measured)
    _report(job, console)
    return RunResult(job.output, _summary(job, measured))


def make_stepper(
    run: PreparedRun, model: Any, sums: Sums, scaler: torch.amp.GradScaler | None, graphs: bool
) -> Stepper:
    """Return the stepper of a run whose processes have all layers."""
    if not graphs:
        return Stepper(sums, scaler)
    return GraphedStepper(sums, list(trained_parameters(model).values()), RankSync(run.mesh))


@contextlib.contextmanager
def _counted_experts(job: OpenRun, model: Any, sums: Sums, console: Console) -> Iterator[Sums]:
    """Yield `sums`, which for a mixture also count the chosen experts; write and print the counts afterwards.

    The processes of a pipeline have some of the layers each, so nothing is counted there.
    """
    if job.prepared.cut is not None:
        yield sums
        return
    with track_routers(model, balanced=bool(job.prepared.config.router_aux_loss_coef)) as routers:
        yield sums if routers is None else routers.counted(sums)
        if routers is not None:
            found = routers.usage(job.prepared.mesh)
            if job.prepared.mesh.is_main:
                write_json(job.output / EXPERTS, found)
            console.print(expert_usage_line(found))


def _write_results(
    job: OpenRun, ranks: list[dict[str, int]], results: dict[str, Any], answers: list[tuple[samples.Prompt, str, str]]
) -> None:
    """The files of a finished run beside its adapter and report; `ranks`: what each process measured."""
    write_memory(job, ranks[0], ranks)
    write_json(job.output / CHECKS, results)
    write_json(
        job.output / GENERATIONS,
        [{"prompt": p.text, "before": b, "after": a, "reference": p.reference} for p, b, a in answers],
    )
    write_environment(job, reproducible=results["reproducible"], finished=time.time())


def _make_ready(run: PreparedRun, model: Any, ids: torch.Tensor, console: Console) -> Ready:
    """Patch the model and isolate packed documents; check the loss after each change against the loss before."""
    report, scaling, device, dtype = None, None, run.machine.device, run.machine.compute_dtype
    results = {"first_step": checks.loss_check(model, ids, dtype)}
    if run.config.use_kernels and device.type != "cpu":
        report = patch(model, run.plan.levels or None)
        console.print(str(report))
        loss = results["first_step"]["loss"]
        results["fused"] = checks.fused_check(model, ids, dtype, loss)
    elif run.config.use_kernels and run.config.precision.recipe == "bf16" and (said := patch_attention(model)):
        console.print(f"attention: {said}")
        results["fused"] = checks.fused_check(model, ids, dtype, results["first_step"]["loss"])
    plain = make_collator(run.config, run.tokenizer, device)
    isolation = isolate_for_run(model, run.config, plain, run.data.train, dtype, run.mesh)
    if isolation is not None:
        results["isolation"] = isolation.document()
    if run.data.shared:
        shared, alone = _shared_and_apart(run, device)
        results["shared_prompts"] = checks.shared_check(model, shared, alone, dtype)
    if run.mesh.degree("context") > 1:
        loss = results.get("fused", results["first_step"])["loss"]
        with context_parallel(model, run.mesh):
            results["divided"] = checks.divided_check(model, ids, dtype, loss, run.mesh)
    by_positions = isolation is None or isolation.way == "positions"  # other ways look at the batch
    if run.config.precision.recipe != "bf16":  # a CPU computes in it, too
        scaling = patch(model, run.plan.levels or None, configured_recipe(run.config.precision)).scaling
    return Ready(results, report, scaling, run.plan.use_graphs and by_positions)


def _shared_and_apart(run: PreparedRun, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Batches of the answers to the first prompt, sharing it and apart."""
    collate = answer_collator(run.config, run.tokenizer, device, answers=run.data.answers)
    row = first_prompt(run.data.train[0])
    return to_device(collate([row]), device), to_device(collate([with_own_prompts(row)]), device)


def _peaks(device: torch.device, stepper: Stepper, base_bytes: int) -> dict[str, int]:
    """What the run took; `run_bytes` is what the plan's prediction is of."""
    peak = peak_memory(device)
    graphs = {"graph_pool_bytes": held} if (held := stepper.most_graph_bytes) else {}
    return {"peak_bytes": peak, "run_bytes": peak - base_bytes} | graphs | reserved_memory(device)


def _trainable_model(run: PreparedRun, measured: dict[str, int]) -> Any:
    """Load the model, add the adapter, and set up recomputation; measures memory before and after loading."""
    device = run.machine.device
    if device.type == "cpu" and run.plan.total * HEAP_WASTE > run.plan.capacity_bytes:
        return_large_blocks()
    restart_peak(device)
    measured["base_bytes"] = memory_now(device)
    how: dict[str, Any] = {"device": device, "attn_implementation": run.config.attn_implementation, "mesh": run.mesh}
    adapter, storage = run.config.adapter, run.config.storage
    if adapter and storage.qat_scheme is None and not reads_base_weights(adapter):  # else all layers are looked at first
        slices = run.mesh.active(SHARD_AXES) if run.mesh.layout.slices > 1 else ()
        products = run.mesh.active(("tensor",))
        how["along"] = () if slices and products else slices or products  # what is cut twice is loaded whole
        how["elsewhere"] = run.cut.remote_filter if run.cut else None
    model = load_model(run.files, storage, dtype=run.machine.weights_dtype, experts_on_host=run.plan.offloaded, **how)
    if run.plan.offloaded:
        offload_experts([*decoder_layers(model)[1]], run.plan.offloaded, device)
    measured["after_load_bytes"] = memory_now(device)
    set_seed(run.config.seed)
    if run.config.method != "sft" and run.config.disable_dropout:
        turn_dropout_off(model)
    if run.plan.activation_checkpointing and not run.plan.levels:
        enable_checkpointing(model)
    if adapter:
        model = add_adapter(model, adapter, scores=run.method.scores)
        if run.mesh.size == 1:
            multiply_by_onednn(model)
    return model


def _own_part(run: PreparedRun, model: Any) -> LocalStages | None:
    """Leave this process its part of the model; the stages among it, where there are any."""
    stages = None if run.cut is None else run.cut.local_stages(model, run.mesh.coordinate("pipeline"))
    apply_tensor_parallel(model, run.mesh)
    shard_model(model, run.mesh, resident=run.plan.stays, on_host=run.plan.hosted)
    return stages


def _answers(run: PreparedRun, model: Any, pipelined: PipelinedStepper | None) -> list[str]:
    """Return the model's answers to the prompts of generations.json."""
    new, ends = run.config.sample_max_new_tokens, run.data.report.get("stop_tokens", [])
    stops = stop_tokens(run.tokenizer, model, ends)
    if pipelined is not None:
        around = partial(compute_autocast, model, run.machine.compute_dtype)
        how = run.tokenizer, run.prompts, around
        return pipeline_run.answer(pipelined, *how, max_new_tokens=new, stops=stops)
    return samples.answer(model, run.tokenizer, run.prompts, max_new_tokens=new, stops=stops)


def _train(job: OpenRun, loop: TrainingLoop, console: Console) -> None:
    """Evaluate, train, evaluate; a resumed run repeats none of it."""
    run, numbers = job.prepared, job.prepared.method.numbers
    with LiveMetrics(console, run.total_steps, numbers, capacity_bytes=run.plan.capacity_bytes) as live:
        job.metrics.listeners.append(live.update)
        if run.data.eval is not None and not _recorded(job):
            loop.evaluate()
        loop.train(run.checkpoint)
        evaluated = [record["step"] for record in _recorded(job) if record["kind"] == "eval"]
        if run.data.eval is not None and loop.state.global_step not in evaluated:
            loop.evaluate()
    if (path := best(job.output)) is not None:
        console.print(one_line(f"best checkpoint: {path}, by its rewards on held-out prompts"), soft_wrap=True)


def _recorded(job: OpenRun) -> list[dict[str, Any]]:
    """As the main process has written them, which the others may not see yet."""
    mesh = job.prepared.mesh
    return mesh.from_main(job.metrics.records() if mesh.is_main else [])


def _save(job: OpenRun, loop: TrainingLoop, ids: torch.Tensor) -> dict[str, Any]:
    """Write adapter/ (or model/) with the tokenizer, and check the files against what was trained.

    Processes that hold parts of a model compute together, so all of them check; else the main one does.
    """
    run, model = job.prepared, loop.model
    split = loop.pipeline_state
    weights = split.weights() if split else None
    folder = job.output / saved_in(run.config)
    if not run.config.use_peft and run.config.storage.qat_scheme is None:
        # as the base was stored; in quantization-aware training `halfbyte merge` rounds what was trained, and once
        model.to(run.files.config.dtype or torch.float32)
    with full_parameters(trained_parameters(model).values()), loop.units.full():
        if run.mesh.is_main:
            with new_directory(folder) as aside:
                save_weights(model, aside, weights)
                run.tokenizer.save_pretrained(aside)
                if not run.config.use_peft:
                    write_json(aside / GENERATION, generation_keys(aside, run.tokenizer, run.data.report))
    run.mesh.barrier()
    if split:
        return {"adapter_file": pipeline_run.adapter_file(split.stages, folder)}
    if not run.mesh.is_main and not run.mesh.is_model_parallel:
        return {}
    if run.config.use_peft:
        return {"adapter_reload": checks.adapter_reload(model, folder, ids, run.machine.compute_dtype)}
    return {"model_reload": checks.model_reload(model, folder)}


def _report(job: OpenRun, console: Console, card: bool = True) -> None:
    from halfbyte.report import write_card, write_report

    if card:
        write_card(job.output)
    report = write_report(job.output)
    saved = job.output / saved_in(job.prepared.config)
    console.print(one_line(f"saved: {saved} · report: {report}"), soft_wrap=True)


def _report_stopped(run: OpenRun, error: TrainingError, console: Console) -> None:
    """What the steps before it came to, where there were any; nothing where the disk is full, which the error says."""
    if run.prepared.mesh.is_main and any(record["kind"] == "train" for record in run.metrics.records()):
        from halfbyte.report import write_report

        with contextlib.suppress(TrainingError):
            write_environment(run, finished=time.time(), stopped=error.message)
            console.print(one_line(f"report until then: {write_report(run.output)}"), soft_wrap=True)


def _summary(job: OpenRun, measured: dict[str, int]) -> dict[str, Any]:
    """The last numbers of a run."""
    records = job.metrics.records()
    trained = [record for record in records if record["kind"] == "train"]
    evaluated = [record for record in records if record["kind"] == "eval"]
    summary = {"steps": job.prepared.total_steps, "peak_bytes": measured["peak_bytes"]}
    if trained:  # else somebody has removed metrics.jsonl
        seconds = sum(record["tokens"] / record["tokens_per_second"] for record in trained)
        summary["tokens_per_second"] = sum(record["tokens"] for record in trained) / seconds
        summary |= {"steps": trained[-1]["step"], "loss": trained[-1]["loss"]}
    if evaluated:
        first, *others = (metric.name for metric in job.prepared.method.numbers.evaluated)
        summary |= {f"eval_{first}": evaluated[-1][first], f"eval_{first}_before": evaluated[0][first]}
        summary |= {name: evaluated[-1][name] for name in others if name in evaluated[-1]}
    return summary
