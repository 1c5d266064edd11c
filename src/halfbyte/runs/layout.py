"""Names of the files and folders that a run writes. Standard library only; every reader and writer imports from here.

output_dir/
    run.yaml  config.resolved.yaml                      configuration: given keys, all keys
    environment.json  data_report.json  memory.json     written before the first step, completed at the end
    metrics.jsonl  completions.jsonl  samples.jsonl     written line by line
    row_losses.jsonl                                    losses of single documents before and after training
    checkpoint-N/                                       state after N optimizer steps
    checkpoint-N.set-aside/                             a checkpoint newer than the one a run continued from
    adapter/ or model/                                  trained weights
    initial_adapter/                                    adapter before the first step, if the base is stored without it
    moments.safetensors                                 mean squares of the inputs of linear layers
    checks.json  experts.json  generations.json         results of a finished run
    README.md  report.html  picture-*.jpg               model card and report, made from the files above
    merged/  merged-FORMAT/                             merged models, unless another folder was given
    merge.json  merge-FORMAT.json                       numbers of each merge
    .lock                                               held while a process writes into the folder
    trackers.json                                       ids of the run in trackers
    status.json                                         what the run is doing, at most 2 s ago
    notes.json                                          notes of users from the board
    adapters/NAME/                                      the run of each adapter, if `adapters` or `sweep` trains several
    adapters.json                                       numbers of these runs, beside one another
"""

from __future__ import annotations

import re

# --- configuration and environment -----------------------------------------------------------------------------------

GIVEN_CONFIG = "run.yaml"
"""The keys that the user gave, as a file that `halfbyte train` accepts."""

RESOLVED_CONFIG = "config.resolved.yaml"
"""Every key with its value."""

ENVIRONMENT = "environment.json"
"""Machine, versions, notices; `started`, `finished` and `stopped` of the run."""

DATA_REPORT = "data_report.json"
"""Sources and their formats, numbers of rows and tokens, samples with their loss masks, stop tokens."""

MEMORY = "memory.json"
"""Planned bytes by component (`predicted`), and `measured` bytes."""

LOCK = ".lock"
"""Names the process that writes into the folder, and is locked by it."""

NOTES = "notes.json"
"""Notes of users from the board: `text`, `tags`, `hidden`. The board writes no other file of a run."""

TRACKERS = "trackers.json"
"""Tracker of `report_to` → its id of the run, which a resumed run continues."""

STATUS = "status.json"
"""State, step, process and heartbeat of the run, or its end; see `runs.status`."""

# --- records ---------------------------------------------------------------------------------------------------------

METRICS = "metrics.jsonl"
"""One JSON object per line: `kind` ("train" or "eval"), `step`, `epoch`, `time`, and the method's numbers.

Lines of kind "train" have at least `loss`, `tokens` and `tokens_per_second`.
"""

TRAIN, EVAL = "train", "eval"
"""Kinds of lines in `METRICS`."""

COMPLETIONS = "completions.jsonl"
"""One JSON object per sampled completion, with its prompt, rewards and advantage (policy optimization)."""

COMPLETIONS_PER_GENERATION = 64
"""Most lines of `COMPLETIONS` for one generation."""

SAMPLES = "samples.jsonl"
"""One JSON object per answer to a sample prompt: `step`, `prompt`, `answer`, `reference` (`sample_steps`)."""

ROW_LOSSES = "row_losses.jsonl"
"""One JSON object per document: `split`, `row`, `hash`, `tokens`, `trained_tokens`, `start`, `end`, `text`."""

# --- results ---------------------------------------------------------------------------------------------------------

ADAPTER, MODEL = "adapter", "model"
"""Folder of the trained weights: a PEFT adapter, or a full model."""

WEIGHTS = (ADAPTER, MODEL)

INITIAL = "initial_adapter"
"""Folder of the adapter before the first step, if `init_lora_weights` computed it; see `adapters.initial`."""

CHECKS = "checks.json"
"""Self-checks with their numbers."""

EXPERTS = "experts.json"
"""Number of times that each expert of a mixture was chosen."""

GENERATIONS = "generations.json"
"""Answers to held-out prompts before and after training."""

ADAPTERS = "adapters"
"""Folder of the runs of several adapters, one folder each."""

COMPARISON = "adapters.json"
"""Adapter → the keys in which it differs, its folder, and its last numbers or the error that stopped it."""

MODEL_CARD, REPORT = "README.md", "report.html"

MERGE = "merge.json"
"""Numbers of a merge into 16 bits; `merge_report` names those of other formats."""

MERGE_REPORTS = "merge-*.json"
"""Pattern of the merge reports of other formats."""

MERGED = "merged"
"""Default folder of a merged model; `merged_folder` names those of other formats."""

MOMENTS = "moments.safetensors"
"""Module → mean squares of its inputs on training rows, fp32 [K], if `init_lora_weights` measured them."""

# --- by the time of writing ------------------------------------------------------------------------------------------

FIRST = (RESOLVED_CONFIG, DATA_REPORT, MEMORY, ENVIRONMENT, METRICS)
"""Written before the first step, and removed if the run ends without one."""

LAST = (CHECKS, GENERATIONS, ENVIRONMENT, MEMORY)
"""Present in every finished run."""

PAGES = (MODEL_CARD, REPORT)
"""Made from the other files after the run has finished."""

# --- checkpoints -----------------------------------------------------------------------------------------------------

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
"""Name of a checkpoint's folder, with its number of optimizer steps."""

CHECKPOINTS = "checkpoint-*"
"""Pattern of the checkpoints in a run's folder."""

CHECKPOINT_STATE = "halfbyte.json"
"""Configuration, size of the data and the open metrics window."""

TRAINER_STATE = "trainer_state.json"
"""transformers' TrainerState."""

OPTIMIZER_STATE, SCHEDULER_STATE = "optimizer.pt", "scheduler.pt"
RANDOM_STATE = "rng_state.pth"
"""transformers' names; `random_state` names the random state of each rank."""

SCALER_STATE = "scaler.pt"
"""State of fp16 loss scaling."""

FP8_SCALING = "fp8_scaling.safetensors"
"""Delayed scaling factors of an fp8 recipe."""

GENERATION_STATE = "generation.json"
"""The sampled completions that the run is training on."""

MANIFEST = "manifest.json"
"""Every file of the checkpoint with its size and hash; written last."""


def checkpoint_folder(step: int) -> str:
    """Name of the checkpoint after `step` optimizer steps."""
    return f"checkpoint-{step}"


def random_state(rank: int) -> str:
    """Name of the file with a rank's random state."""
    return f"rng_state_{rank}.pth" if rank else RANDOM_STATE


def merge_report(format_slug: str = "") -> str:
    """Name of the report of a merge into a format; empty: 16 bits."""
    return f"merge-{format_slug}.json" if format_slug else MERGE


def merged_folder(format_slug: str = "") -> str:
    """Name of the default folder of a model merged into a format; empty: 16 bits."""
    return f"{MERGED}-{format_slug}" if format_slug else MERGED
