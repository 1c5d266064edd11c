"""Training on images on one device: steps against peers, packing, cached features, the tower, and planned memory.

    python -m benchmarks.image_step step --shape qwen2.5-vl-7b [--layers N] [--checkpointing]
    python -m benchmarks.image_step packing|cache|tower|memory [--layers N]
    python -m benchmarks.image_step prepare --device cpu [--pictures N]

Models have public shapes and random weights (`benchmarks.image_models`); their folders stay under --work for the next
call. Frozen weights are NF4 with nested scales, LoRA of rank 16 is on the seven linears of the language model, and the
tower is frozen in 16 bits.

- step: four rows with one picture of a megapixel each and about 160 characters, one per token. halfbyte, also without
  CUDA graphs, and Hugging Face with PEFT and bitsandbytes run in their own processes, on the same weights. All save all
  activations; a peer that runs out of memory is run again with its gradient checkpointing.
- packing: `halfbyte train` on uneven pictures and texts, packed and padded. Speeds are of the second epoch, in tokens
  without padding.
- cache: `halfbyte train` on pictures in every step, on cached features, and on text rows of equal length.
- tower: the features of 16 uneven pictures by transformers' loop, by halfbyte's tower, and from an NF4 tower; and their
  forward and backward with LoRA on the tower's linears, by PEFT's forward of linears and by halfbyte's.
- memory: planned and measured bytes of eight runs of `halfbyte train`.
- prepare: pictures per second from JPEG files to a batch, on two cores of the CPU, and the memory that they take.
  halfbyte collates in threads, TRL in the main process (its default) and in two processes of torch's DataLoader; both
  with transformers' processor and the PIL backend.

--tiny runs the same on small models, also on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import (
    free_memory,
    parser_of,
    peak_gib,
    reset_peak,
    run_peer,
    synchronize,
    timing_event,
    write_result,
)
from benchmarks.image_models import SHAPES, uneven, write_image_rows, write_model, write_text_rows
from benchmarks.step_model import RANK, TARGETS, timed

SIDE, TINY_SIDE = 1024, 128  # pixels of the side of a picture
CHARACTERS = 160
AROUND_IMAGE = 2  # tokens before and after an image
ROWS = 4  # of a step
TOWER_PICTURES = 16
CORES = 2  # of `prepare`
FREE_STEPS = 4  # steps of a run that are not timed
# A trained tower's memory follows the largest pictures of a batch, which a few random batches need not draw together.
TRAINED: dict[str, Any] = {"freeze_vision_tower": False, "per_device_train_batch_size": 1, "max_steps": 12}
# Runs whose memory is planned: model, and keys.
MEMORY_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-VL": ("qwen2.5-vl-7b", {}),
    "Qwen2.5-VL, packed": ("qwen2.5-vl-7b", {"packing": True, "per_device_train_batch_size": 2}),
    "Qwen2.5-VL, tower trained": ("qwen2.5-vl-7b", TRAINED),
    "Qwen2.5-VL, tower trained, recomputed": ("qwen2.5-vl-7b", TRAINED | {"activation_checkpointing": True}),
    "Qwen3-VL": ("qwen3-vl-8b", {}),
    "Qwen3.5, cached features": ("qwen3.5-9b", {"vision_cache": True}),
    "Gemma 3": ("gemma3-4b", {}),
    "LLaVA, NF4 tower": ("llava-1.5-7b", {"quantize_vision_tower": True}),
}  # fmt: skip
MEMORY_LAYERS = 4


class Place:
    """The folders of a call.

    Attributes:
        options: of the command line.
        side: pixels of the side of a picture.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.side = TINY_SIDE if options.tiny else SIDE

    def model(self, shape: str, layers: int | None, weights: bool = True) -> Path:
        """Return a model's folder, written in its own process if it is new."""
        size = "tiny" if self.options.tiny else f"{layers or 'all'}-layers"
        folder = self.options.work / f"{shape}-{size}{'' if weights else '-config'}"
        if not (folder / "processor_config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            spawned = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))  # its memory is free afterwards
            with spawned as processes:
                device = self.options.device if weights else None
                processes.submit(write_model, folder, SHAPES[shape], layers, self.options.tiny, device).result()
        return folder

    def rows(self, name: str, count: int, is_uneven: bool = False) -> Path:
        """Write rows with a picture each to a new folder, and return their file."""
        folder = self.options.work / f"rows-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        sizes, characters = [(self.side, self.side)] * count, [CHARACTERS] * count
        if is_uneven:
            sides = uneven(count, self.side / 1.5, seed=1), uneven(count, self.side / 1.5, seed=2)
            sizes, characters = list(zip(*sides, strict=True)), uneven(count, 2 * CHARACTERS, seed=3)
        return write_image_rows(folder, sizes, characters)

    def config(self, folder: Path, data: Path, **keys: Any) -> dict[str, Any]:
        """Return the keys of a run."""
        return {
            "model_name_or_path": str(folder), "dataset": str(data), "output_dir": str(self.options.work / "out"),
            "device": self.options.device, "dtype": "bfloat16", "r": RANK, "lora_alpha": RANK,
            "target_modules": TARGETS, "max_length": 4096, "per_device_train_batch_size": ROWS, "logging_steps": 1,
            "sample_prompts": 0, "learning_rate": 2e-4, "vision_cache": False, "activation_checkpointing": False,
            "save_total_limit": 1, **keys,
        }  # fmt: skip

    def run(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Run `halfbyte train` in its own process; returns its records and files, or its error."""
        output = Path(keys["output_dir"])
        shutil.rmtree(output, ignore_errors=True)
        file = self.options.work / "run.json"
        file.write_text(json.dumps(keys))  # JSON is YAML
        environment = os.environ | {"HALFBYTE_CACHE": str(self.options.work / "cache")}
        shutil.rmtree(environment["HALFBYTE_CACHE"], ignore_errors=True)
        command = [sys.executable, "-m", "halfbyte", "train", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": (done.stderr or done.stdout).strip()[-1500:]}
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        read = {name: json.loads((output / f"{name}.json").read_text()) for name in ("memory", "checks")}
        return {"steps": [record for record in records if record["kind"] == "train"], **read}


# --- step ------------------------------------------------------------------------------------------------------------


def step(place: Place, save: Callable[..., None]) -> None:
    """Time a step of halfbyte and of its peers."""
    options = place.options
    place.model(options.shape, options.layers)
    place.rows("step", ROWS)
    runs: dict[str, Any] = {}
    for name in ("halfbyte", "halfbyte, eager", *filter(None, options.peers.split(","))):
        modes = (True,) if options.checkpointing else (False, True)
        for checkpointing in modes[:1] if name.startswith("halfbyte") else modes:
            label = f"{name}, checkpointed" if checkpointing else name
            runs[label] = run = run_peer([*own_command(options), "--part", name, *["--checkpointing"] * checkpointing])
            save(runs=runs)
            show(label, run)
            if "error" not in run or "out of memory" not in run["error"].lower():
                break


def own_command(options: argparse.Namespace) -> list[str]:
    """Return the words that run a part of this call in another process."""
    words = ["benchmarks.image_step", options.measure, "--shape", options.shape, "--device", options.device]
    words += ["--work", str(options.work), "--steps", str(options.steps)]
    words += ["--layers", str(options.layers)] if options.layers else []
    return words + ["--tiny"] * options.tiny


def prepared(keys: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the configuration of a run, its tokenizer and its training rows."""
    from halfbyte.config import load_config
    from halfbyte.data.prepare import prepare
    from halfbyte.loading.tokenizers import load_run_tokenizer

    config = load_config(None, keys)
    tokenizer = load_run_tokenizer(config)
    return config, tokenizer, prepare(config, tokenizer).train


def collated(place: Place, folder: Path, data: Path, count: int, device: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of a run and its first `count` rows as a batch, on the device.

    Args:
        device: whose batches halfbyte's collator makes; None: as peers take them, with an attention mask.
    """
    from halfbyte.batch import to_device
    from halfbyte.data.collate import head_share, make_collator, with_head_rows

    config, tokenizer, rows = prepared(place.config(folder, data))
    collate: Any = make_collator(config, tokenizer, None if device is None else torch.device(device))
    collate = collate if device is None else with_head_rows(collate, head_share(rows))
    return config, to_device(collate([rows[number] for number in range(count)]), torch.device(place.options.device))


def halfbyte(place: Place, graphs: bool = True) -> dict[str, Any]:
    """Time halfbyte's step; on a GPU with `graphs`, as `halfbyte train` runs it: the tower, then a CUDA graph."""
    import halfbyte as library
    from halfbyte.adapters.lora import add_adapter
    from halfbyte.loading.load import load_model
    from halfbyte.modeling.compute_dtype import compute_autocast, no_input_casts
    from halfbyte.modeling.head import causal_lm_loss
    from halfbyte.modeling.language_inputs import LanguageInputs
    from halfbyte.modeling.vision import bind_vision
    from halfbyte.train.stepper import GraphedStepper

    folder, data = place.model(place.options.shape, place.options.layers), place.options.work / "rows-step/data.jsonl"
    config, batch = collated(place, folder, data, ROWS, place.options.device)
    model = load_model(str(folder), device=place.options.device, dtype="bfloat16")
    model = add_adapter(model, config).train()
    if place.options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    report = library.patch(model)
    bind_vision(model)
    print(report)
    count = (batch["labels"][..., 1:] != -100).sum()

    def loss_of(columns: Any = batch) -> Any:
        with compute_autocast(model, torch.bfloat16):
            return causal_lm_loss(model, columns)[0] / count

    def with_sums(columns: Any, _: Any) -> Any:
        loss = loss_of(columns)
        return loss, loss.detach()[None]

    with no_input_casts(model, torch.bfloat16):
        if not graphs or place.options.device == "cpu":
            return timed_step(place, model, loss_of, batch)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        stepper = GraphedStepper(trained, language_inputs=LanguageInputs(model))
        backward = partial(stepper.forward_backward, with_sums, [batch], count, may_capture=True)
        return timed_step(place, model, backward, batch) | {"captured": stepper.holds_graphs}


def bitsandbytes(place: Place) -> dict[str, Any]:
    """Time the step of transformers, PEFT and bitsandbytes; norms, embedding and head stay in bf16."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    folder, data = place.model(place.options.shape, place.options.layers), place.options.work / "rows-step/data.jsonl"
    _, batch = collated(place, folder, data, ROWS, None)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["model.visual", "model.vision_tower", "model.multi_modal_projector", "lm_head"],
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": place.options.device},
        attn_implementation="sdpa",
    )  # fmt: skip
    model.requires_grad_(False)
    if place.options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    targets = rf".*language_model.*\.({'|'.join(TARGETS)})"
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, task_type="CAUSAL_LM"))

    def loss_of() -> Any:
        with torch.autocast(torch.device(place.options.device).type, dtype=torch.bfloat16):
            return model(**batch, use_cache=False).loss

    return timed_step(place, model.train(), loss_of, batch)


def prepare(place: Place, save: Callable[..., None]) -> None:
    """Compare the pictures per second of halfbyte's collator with TRL's."""
    options = place.options
    place.model(options.shape, 1, weights=False)
    place.rows("prepare", options.pictures)
    runs = {}
    for name in ("halfbyte, prepared", "TRL, prepared", "TRL, prepared by processes"):
        runs[name] = run_peer([*own_command(options), "--part", name, "--pictures", str(options.pictures)])
        save(runs=runs)
        print(name, runs[name])
    if all("error" not in run for run in runs.values()):
        halfbyte_speed, *others = (run["pictures_per_second"] for run in runs.values())
        save(runs=runs, speedup=halfbyte_speed / max(others))
        print(f"halfbyte: {halfbyte_speed / max(others):.2f} times the faster one")


def prepared_pictures(place: Place) -> dict[str, Any]:
    """Time halfbyte's batches of the pictures of `prepare`."""
    from halfbyte.data.collate import make_collator
    from halfbyte.data.rows import RowTable

    config, tokenizer, rows = _pictures(place)
    order = {"seed": None, "skip": 0, "rank": 0, "ranks": 1, "pinned": False}
    return _timed_pictures(place, RowTable(rows).load(ROWS, make_collator(config, tokenizer), **order).loader)


def prepared_by_trl(place: Place, processes: int = 0) -> dict[str, Any]:
    """Time TRL's batches of the pictures of `prepare`, by a number of processes in addition to the main one."""
    from datasets import Dataset, Image, List
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from halfbyte.data.image_processor import ImageProcessor

    config, tokenizer, _ = _pictures(place)
    processor = ImageProcessor(config, tokenizer).processor
    processor.chat_template = tokenizer.chat_template
    lines = [json.loads(line) for line in Path(config.dataset).read_text().splitlines()]
    folder = Path(config.dataset).parent
    rows = []
    for user, answer in (line["messages"] for line in lines):
        picture, question = user["content"]
        content = [{"type": "image"}, question]
        turns = [
            {"role": "user", "content": content},
            {**answer, "content": [{"type": "text", "text": answer["content"]}]},
        ]
        rows.append({"images": [str(folder / picture["image"])], "messages": turns})
    table = Dataset.from_list(rows).cast_column("images", List(Image()))
    collate = DataCollatorForVisionLanguageModeling(processor)
    return _timed_pictures(place, DataLoader(table, ROWS, collate_fn=collate, num_workers=processes))


def _pictures(place: Place) -> tuple[Any, Any, Any]:
    """Return configuration, tokenizer and rows of `prepare`, and use two cores from here on."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)
    folder = place.model(place.options.shape, 1, weights=False)
    return prepared(place.config(folder, place.options.work / "rows-prepare/data.jsonl"))


def _timed_pictures(place: Place, batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the pictures per second after the first batches, and the process's memory after a tenth and at the end."""
    process, sizes, count = psutil.Process(), [], 0
    total = place.options.pictures
    for number, batch in enumerate(batches):
        if number == FREE_STEPS:
            begin, cpu, count = time.perf_counter(), time.process_time(), 0
        count += len(batch["input_ids"])
        if number >= total / ROWS / 10:
            sizes.append(process.memory_info().rss)
    return {
        "pictures_per_second": count / (time.perf_counter() - begin),
        "cpu_ms_of_a_picture": 1e3 * (time.process_time() - cpu) / count,  # of the main process
        "rss_mib": [size / 2**20 for size in (sizes[0], sizes[-1])],
    }


PARTS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "halfbyte": halfbyte,
    "halfbyte, eager": partial(halfbyte, graphs=False),
    "bitsandbytes": bitsandbytes,
    "halfbyte, prepared": prepared_pictures,
    "TRL, prepared": prepared_by_trl,
    "TRL, prepared by processes": partial(prepared_by_trl, processes=CORES),
}


def timed_step(place: Place, model: Any, loss_of: Callable[[], Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Time the training step of a loss, and describe model and batch.

    Args:
        loss_of: returns the loss; without a graph if it has added the gradients itself.
    """
    from benchmarks.step_peers import training_step
    from halfbyte.train.reference import plain_tensors

    ids, options = batch["input_ids"], place.options
    weights = sum(plain.nbytes for parameter in model.parameters() for plain in plain_tensors(parameter))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    facts = {"shape": list(ids.shape), "weights_gib": weights / 2**30, "trained_parameters": trained}
    device = torch.device(options.device).type
    return facts | timed(training_step(model, loss_of), ids.numel(), options.steps, device=device)


# --- runs ------------------------------------------------------------------------------------------------------------


def packing(place: Place, save: Callable[..., None]) -> None:
    """Compare packed and padded rows of uneven pictures."""
    folder = place.model(place.options.shape, place.options.layers)
    data = place.rows("uneven", 16 if place.options.tiny else 96, is_uneven=True)
    runs: dict[str, Any] = {}
    for name, keys in (
        ("padded", {}),
        ("packed", {"packing": True, "max_length": 512 if place.options.tiny else 8192}),
    ):
        keys = place.config(folder, data, num_train_epochs=2) | keys
        keys["per_device_train_batch_size"] = 1 if name == "packed" else ROWS
        done = place.run(keys)
        if "error" not in done:
            timed_steps = done["steps"][len(done["steps"]) // 2 :]
            tokens, seconds = (sum(record[key] for record in timed_steps) for key in ("tokens", "step_seconds"))
            done = {
                "tokens": tokens, "steps": len(timed_steps), "seconds": seconds, "tokens_per_second": tokens / seconds,
                "padding": padding(keys), "peak_gib": done["memory"]["measured"]["peak_bytes"] / 2**30,
                "isolation": done["checks"].get("isolation"),
            }  # fmt: skip
        runs[name] = done
        save(runs=runs)
        print(name, done)
    if all("error" not in run for run in runs.values()):
        speedup = runs["packed"]["tokens_per_second"] / runs["padded"]["tokens_per_second"]
        save(runs=runs, speedup=speedup)
        print(f"packed: {speedup:.2f} times the tokens per second")


def padding(keys: dict[str, Any]) -> float:
    """Return the share of padding in the batches of a run's first epoch."""
    from torch.utils.data import BatchSampler, RandomSampler

    from halfbyte.data.collate import make_collator

    config, tokenizer, rows = prepared(keys)
    tokens = sum(map(len, rows["input_ids"]))
    collate = make_collator(config, tokenizer, torch.device(keys["device"]))
    rows = rows.remove_columns("images")
    order = RandomSampler(range(len(rows)), generator=torch.Generator().manual_seed(config.seed))
    batches = BatchSampler(order, config.per_device_train_batch_size, drop_last=False)
    computed = sum(collate([rows[number] for number in batch])["input_ids"].numel() for batch in batches)
    return 1 - tokens / computed


def cache(place: Place, save: Callable[..., None]) -> None:
    """Compare steps on pictures, on cached features and on text, and the first epoch with and without the cache."""
    tiny = place.options.tiny
    folder, count = place.model(place.options.shape, place.options.layers), 16 if tiny else 128
    data = place.rows("cache", count)
    stored = prepared(place.config(folder, data))[2][0]["images"][0]
    texts = write_text_rows(data.parent, CHARACTERS, count, stored["tokens"] + AROUND_IMAGE)
    runs: dict[str, Any] = {}
    for name, keys in (("pixels", {}), ("cached", {"vision_cache": True}), ("text", {})):
        done = place.run(place.config(folder, texts if name == "text" else data, num_train_epochs=1, **keys))
        if "error" not in done:
            times = [record["step_seconds"] for record in done["steps"]]
            features = done["checks"].get("image_features")
            done = {
                "median_ms": 1e3 * statistics.median(times[FREE_STEPS // 2 :]), "seconds": sum(times),
                "steps": len(times), "tokens": sum(record["tokens"] for record in done["steps"]), "features": features,
                "graphs": done["memory"]["cuda_graphs"],
                "peak_gib": done["memory"]["measured"]["peak_bytes"] / 2**30,
            }  # fmt: skip
        runs[name] = done
        save(runs=runs)
        print(name, done)
    if any("error" in run for run in runs.values()):
        return
    pixels, cached, text = (runs[name] for name in ("pixels", "cached", "text"))
    first = cached["features"]["seconds"] + 1e-3 * cached["median_ms"] * cached["steps"]
    per_token = [1e-3 * run["median_ms"] * run["steps"] / run["tokens"] for run in (cached, text)]
    ratios = {
        "second_epoch_to_text": cached["median_ms"] / text["median_ms"],
        "second_epoch_to_text_per_token": per_token[0] / per_token[1],
        "first_epoch_to_uncached": first / (1e-3 * pixels["median_ms"] * pixels["steps"]),
        "second_epoch_to_uncached": cached["median_ms"] / pixels["median_ms"],
    }
    save(runs=runs, ratios=ratios)
    print(ratios)


def memory(place: Place, save: Callable[..., None]) -> None:
    """Compare planned and measured bytes of runs of several models."""
    from halfbyte.plan.memory_plan import flat_plan
    from halfbyte.report.terminal import comparable_bytes

    data, runs = place.rows("memory", TRAINED["max_steps"], is_uneven=True), {}
    for name, (shape, keys) in MEMORY_RUNS.items():
        folder = place.model(shape, place.options.layers or MEMORY_LAYERS)
        done = place.run(place.config(folder, data, **{"max_steps": 4, **keys}))
        if "error" not in done:
            predicted, measured = comparable_bytes(flat_plan(done["memory"]), done["memory"]["measured"])
            done = {
                "predicted_gib": predicted / 2**30, "measured_gib": measured / 2**30, "ratio": predicted / measured,
                "memory": done["memory"],
            }  # fmt: skip
            print(f"{name}: {predicted / 2**30:.2f} GiB predicted, {measured / 2**30:.2f} measured")
        else:
            print(name, done)
        runs[name] = done
        save(runs=runs)


# --- tower -----------------------------------------------------------------------------------------------------------


def tower(place: Place, save: Callable[..., None]) -> None:
    """Compare the tower with transformers' loop, and its NF4 weights with bf16."""
    from halfbyte.loading.load import load_model
    from halfbyte.modeling.architectures import FREEZE_PROJECTOR, FREEZE_TOWER, vision_parts
    from halfbyte.modeling.vision import bind_vision
    from halfbyte.train.reference import plain_tensors

    options = place.options
    folder = place.model(options.shape, 4 if options.shape == "qwen3.5-9b" else 1)
    data = place.rows("tower", TOWER_PICTURES, is_uneven=True)
    _, batch = collated(place, folder, data, TOWER_PICTURES, options.device)
    images = {name: batch[name] for name in ("pixel_values", "image_grid_thw")}

    def loaded(**keys: Any) -> tuple[Any, int]:
        model = load_model(str(folder), load_in_4bit=bool(keys), device=options.device, dtype="bfloat16", **keys)
        parts = vision_parts(model)
        projector = tuple(f"{name}." for name in parts[FREEZE_PROJECTOR])  # which stays in 16 bits
        named = [pair for name in parts[FREEZE_TOWER] for pair in model.get_submodule(name).named_parameters(name)]
        tower = [parameter for name, parameter in named if not name.startswith(projector)]
        return model, sum(plain.nbytes for parameter in tower for plain in plain_tensors(parameter))

    @torch.no_grad()
    def features(model: Any) -> Any:
        outputs = model.model.get_image_features(**images).pooler_output
        return torch.cat([*outputs]).float()

    model, nbytes = loaded()
    facts = {"patches": images["pixel_values"].shape[0], "grids": images["image_grid_thw"].tolist()}
    runs = {"transformers": forward_ms(options, partial(features, model))}
    exact = features(model)
    print(bind_vision(model))
    runs["halfbyte"] = forward_ms(options, partial(features, model))
    result: dict[str, Any] = {
        **facts, "runs": runs, "speedup": runs["transformers"]["ms"] / runs["halfbyte"]["ms"],
        "relative_difference": float((features(model) - exact).norm() / exact.norm()),
    }  # fmt: skip
    save(**result)
    exact = features(model)
    runs |= adapted_runs(options, model, images)
    save(**result)
    del model
    free_memory()
    for name in ("nf4", "int8"):
        quantized, stored = loaded(quantize_vision_tower=name)
        bind_vision(quantized)
        noise = (features(quantized) - exact).square().sum() / exact.square().sum()
        runs[name] = forward_ms(options, partial(features, quantized)) | {
            "bytes_share": stored / nbytes, "sqnr_db": -10 * math.log10(float(noise)),
        }  # fmt: skip
        del quantized
        free_memory()
        save(**result)
    print(json.dumps({name: value for name, value in result.items() if name != "grids"}, indent=1))


def adapted_runs(options: argparse.Namespace, model: Any, images: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the times of forward and backward of a tower with LoRA, by PEFT's and by halfbyte's forward of linears.

    Args:
        model: bound by `bind_vision`; it has the adapters afterwards.
    """
    from peft import LoraConfig, get_peft_model

    from halfbyte.layers.plain import is_plain_lora
    from halfbyte.modeling.architectures import FREEZE_TOWER, all_linear, vision_part, vision_parts
    from halfbyte.modeling.vision import bind_vision, unbind_vision

    parts = vision_parts(model)
    targets = [name for name in all_linear(model, [FREEZE_TOWER]) if vision_part(name, parts) == FREEZE_TOWER]
    unbind_vision(model)
    get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))
    bind_vision(model)
    device = torch.device(options.device).type

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            features = torch.cat([*model.model.get_image_features(**images).pooler_output])
        features.float().square().sum().backward()

    runs = {"LoRA, halfbyte": forward_ms(options, step)}
    for module in filter(is_plain_lora, model.modules()):
        vars(module).pop("forward", None)
    return runs | {"LoRA, PEFT": forward_ms(options, step)}


def forward_ms(options: argparse.Namespace, forward: Callable[[], Any]) -> dict[str, float]:
    """Return the median ms of a forward, and its peak memory."""
    device = torch.device(options.device).type
    for _ in range(2):
        forward()
    reset_peak(device)
    times = []
    for _ in range(max(options.steps, 1)):
        events = timing_event(device), timing_event(device)
        synchronize(device)
        events[0].record()
        forward()
        events[1].record()
        synchronize(device)
        times.append(events[0].elapsed_time(events[1]))
    return {"ms": statistics.median(times), **peak_gib(device)}


MEASURES = {"step": step, "packing": packing, "cache": cache, "tower": tower, "memory": memory, "prepare": prepare}


def show(name: str, run: dict[str, Any]) -> None:
    """Print a line for a run of `step`."""
    if "error" in run:
        print(f"{name}: failed: {run['error']}")
        return
    speed = f"{run['tokens_per_second'] / 1e3:.2f}k tok/s"
    print(f"{name}: {run['ms']:.1f} ms, {speed}, {run['peak_gib']:.2f} GiB, losses {run['losses'][:2]}")


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__)
    result.add_argument("measure", choices=MEASURES)
    result.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-7b", help="(not for memory)")
    result.add_argument("--layers", type=int, help="decoder layers instead of the model's number; memory: 4")
    result.add_argument("--checkpointing", action="store_true", help="step: recompute activations")
    result.add_argument("--peers", default="bitsandbytes", help="step: '' for none")
    result.add_argument("--steps", type=int, default=10, help="timed steps, or forwards of the tower")
    result.add_argument("--pictures", type=int, default=96, help="prepare: number of pictures")
    result.add_argument("--tiny", action="store_true", help="small models and pictures")
    result.add_argument("--device", default="cuda")
    result.add_argument("--work", type=Path, default=Path("/tmp/image-step"), help="folder for models and runs")
    result.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return result


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    options.work.mkdir(parents=True, exist_ok=True)
    place = Place(options)
    if options.part:
        print("RESULT", json.dumps(PARTS[options.part](place)))
        return
    keys = ("measure", "shape", "layers", "checkpointing", "tiny")
    facts = {key: getattr(options, key) for key in keys}

    def save(**result: Any) -> None:
        write_result(options.json, facts | result)

    MEASURES[options.measure](place, save)


if __name__ == "__main__":
    main()
