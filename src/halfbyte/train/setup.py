"""Everything that happens before weights are loaded: where to start, data, the memory plan, and the first files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from halfbyte.adapters import check_adapter_files
from halfbyte.config import Resolved, RunConfig, dump_config, resolve
from halfbyte.data.batches import batches_of, widths_of
from halfbyte.data.prepare import PreparedData
from halfbyte.environment import environment
from halfbyte.errors import DataError
from halfbyte.files import write_json, write_text
from halfbyte.hardware import bound_cpu_primitives, chosen_device
from halfbyte.methods import Method, method_of
from halfbyte.models.find import ModelFiles, find_model
from halfbyte.models.load import check_attention, load_tokenizer, resolve_dtype
from halfbyte.models.recipes import check_recipe, configured_recipe
from halfbyte.notices import notice, said
from halfbyte.parallel import Mesh
from halfbyte.plan.estimate import MemoryPlan, estimate
from halfbyte.plan.policy import in_words
from halfbyte.qat.model import qat_format
from halfbyte.terminal import print_data, print_header, print_memory

from . import checkpoint as checkpoints
from .arguments import total_steps
from .metrics import MetricsFile

STEPS_A_LENGTH = 50  # a plan of cuDNN's takes 0.12 to 0.2 s and saves 3 to 30 ms a step, by the model's size


@dataclass(frozen=True)
class Job:
    """A run that is ready to load its model.

    Attributes:
        checkpoint: where to continue from; None for step 0.
        run: the sections that `config` comes to.
        compute_dtype: dtype of matrix products.
        weights_dtype: dtype of weights that are not quantized.
        files: the model, looked up once.
        size: rows, tokens and trained tokens of the training set.
    """

    config: RunConfig
    run: Resolved
    output: Path
    checkpoint: Path | None
    device: torch.device
    compute_dtype: torch.dtype
    weights_dtype: torch.dtype
    environment: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    files: ModelFiles
    plan: MemoryPlan
    metrics: MetricsFile
    method: Method
    mesh: Mesh

    @property
    def size(self) -> dict[str, int]:
        train = self.data.report["train"]
        return {name: train[name] for name in ("rows", "tokens", "trained_tokens")}

    @property
    def total_steps(self) -> int:
        return total_steps(self.config, len(self.data.train))


def prepare_job(config: RunConfig, resume: str | bool | None, console: Console, mesh: Mesh) -> Job:
    """Check, tokenize and plan, say what was found, and write config.resolved.yaml, data_report.json and memory.json.

    Raises:
        HalfbyteError: whatever is wrong with the configuration, the output folder, the data or the model's config.
    """
    method = method_of(config)
    bound_cpu_primitives()
    checkpoint = checkpoints.starting_point(config, resume)
    device = chosen_device(config.device)
    run = resolve(config)
    check_recipe(configured_recipe(run.precision), device)
    if run.storage.qat_scheme is not None:
        qat_format(run.storage.qat_scheme)
    compute_dtype = resolve_dtype(run.precision.compute, device)
    facts = {**environment(str(device)), "numbers": method.numbers.document(), "started": time.time()}
    print_header(console, facts, config)
    files = find_model(run.origin)  # damaged ones are found before the data is tokenized
    check_attention(files.config, config.attn_implementation, device, trains=True)
    if config.adapter_path:
        check_adapter_files(Path(config.adapter_path))
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    data = mesh.first(lambda: method.prepare(config, tokenizer))
    print_data(console, data.report)
    batches = batches_of(config, data, device)
    plan = estimate(config, files.config, device=device, batches=batches)
    print_memory(console, plan)
    if not plan.fits:
        notice("memory_plan", f"the plan needs {plan.total / 2**30:.2f} GiB, of {plan.capacity_bytes / 2**30:.2f} free")
    metrics = MetricsFile(config.output_path / "metrics.jsonl")
    job = Job(
        config,
        run,
        config.output_path,
        checkpoint,
        device,
        compute_dtype,
        resolve_dtype(run.precision.weights, device),
        facts,
        tokenizer,
        data,
        files,
        plan,
        metrics,
        method,
        mesh,
    )
    if not mesh.equal(job.size):
        raise DataError("the processes of this run read different data", "give each the same files")
    if mesh.is_main:
        _open_output(job)
    return job


def lengths_differ(job: Job) -> bool:
    """Whether rows that are one document each come in so many widths that planning for each does not pay."""
    if job.config.packing or job.config.padding_free:
        return False
    widths = widths_of(job.config, job.data)
    return len(widths) > 1 and job.total_steps < STEPS_A_LENGTH * len(widths)


def _open_output(job: Job) -> None:
    """Check the data against the checkpoint, clear what a killed run left half done or the resumed one makes again, and
    write the first files."""
    if job.checkpoint:
        checkpoints.check_same_data(job.size, job.checkpoint)
    job.output.mkdir(parents=True, exist_ok=True)
    checkpoints.remove_leftovers(job.output)
    if job.checkpoint:
        checkpoints.set_aside_newer(job.output, job.checkpoint)
    job.metrics.keep_until(checkpoints.step_of(job.checkpoint) if job.checkpoint else -1)
    write_text(job.output / "config.resolved.yaml", dump_config(job.config))
    write_json(job.output / "data_report.json", job.data.report)
    write_memory(job, {})
    write_environment(job)


def write_memory(job: Job, measured: dict[str, int]) -> None:
    """memory.json: what was planned, and what was measured so far (bytes)."""
    plan = job.plan
    document = {
        "device": str(job.device),
        "capacity_bytes": plan.capacity_bytes,
        "predicted": plan.predicted(),
        "measured": measured,
        "activation_checkpointing": plan.activation_checkpointing,
        "levels": in_words(plan.levels),
        "cuda_graphs": plan.use_graphs,
        "reason": plan.reason,
    }
    write_json(job.output / "memory.json", document)


def write_environment(job: Job, finished: float | None = None, stopped: str = "") -> None:
    """environment.json, with everything announced so far.

    Args:
        stopped: why the run was not finished.
    """
    ended = {"finished": finished, **({"stopped": stopped} if stopped else {})}
    write_json(job.output / "environment.json", {**job.environment, "notices": said(), **ended})
