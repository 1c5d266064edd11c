"""A checkpoint loaded by the GPUs of one host together, against one of them alone, in the same run.

    torchrun --nproc-per-node 2 -m benchmarks.loading_together PART… [--work DIR] [--json FILE]

Checkpoints have random weights and are written first, where they are not there: 16 GB for the 8B, 39 GB for the 70B in
NF4. PARTs:

    eight       8B, bf16 to NF4, page cache warm: one process alone, then all under data and under shard; then cold,
                with what the disk gave each. All bytes are compared with those of the one.
    seventy     70B, NF4 as stored, in slices, with 24 GiB a GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import benchmarks.sharded  # noqa: F401 (its 70B among the models)
from benchmarks.several_gpus import Results, used_bytes
from benchmarks.step_model import TARGETS, empty_model, model_config, random_weight
from halfbyte.config import Parallel
from halfbyte.formats import named
from halfbyte.formats.base import entry_name
from halfbyte.parallel.mesh import SINGLE_PROCESS, Mesh, present_mesh
from halfbyte.parallel.shard.placement import Placement
from halfbyte.tensor import QuantizedShard, QuantizedTensor

GIB = 2**30
SHARD = ("shard",)
NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


# --- checkpoints -----------------------------------------------------------------------------------------------------


def write_checkpoint(name: str, folder: Path, packed: bool) -> Path:
    """A file for each layer and one for the rest, as save_pretrained names what is in them."""
    done = folder / "done"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(name)
    config.architectures, config.dtype = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    if packed:
        document = json.loads((folder / "config.json").read_text()) | {"quantization_config": NF4}
        (folder / "config.json").write_text(json.dumps(document))
    files: dict[str, dict[str, torch.Size]] = {}
    for key, tensor in empty_model(name).state_dict().items():
        layer = key.split(".")[2] if ".layers." in key else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[key] = tensor.shape
    index: dict[str, str] = {}
    for file, shapes in files.items():
        tensors = dict(entry for key, shape in shapes.items() for entry in _entries(key, shape, packed))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    document = {"metadata": {"total_size": 0}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    done.touch()
    return folder


def _entries(key: str, shape: torch.Size, packed: bool) -> Iterator[tuple[str, Tensor]]:
    weight = random_weight(shape, "cuda")
    if not packed or key.split(".")[-2] not in TARGETS:
        yield key, weight.cpu()
        return
    stored = QuantizedTensor.quantize(weight, named("nf4"))
    for suffix, value in stored.format.to_state(stored.parts, tuple(shape), torch.bfloat16).items():
        yield entry_name(key, suffix), value.cpu()


def warm(folder: Path) -> int:
    """Bytes of the weights, which are in the page cache then."""
    size = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(2**24):
                size += len(block)
    return size


def forget(folder: Path) -> None:
    """Let go of the page cache's copy."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- measuring -------------------------------------------------------------------------------------------------------


def _status(file: str, key: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def measured(load: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Seconds and memory of loading, and the model; mapped pages of the checkpoint are not the process's own."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    base, most, running = _status("status", "RssAnon"), [0], [True]

    def watch() -> None:
        while running:
            most.append(max(most.pop(), _status("status", "RssAnon")))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    held, read = torch.cuda.memory_allocated(), _status("io", "read_bytes")
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = load()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    running.clear()
    watcher.join()
    return {
        "seconds": seconds,
        "kept_gib": (torch.cuda.memory_allocated() - held) / GIB,
        "peak_gib": (torch.cuda.max_memory_allocated() - held) / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "used_gib": used_bytes() / GIB,
        "host_gib": (most[0] - base) / 2**20,
        "disk_gb": (_status("io", "read_bytes") - read) / 1e9,
    }, model


def load(folder: Path, mesh: Mesh, along: tuple[str, ...] = ()) -> Any:
    from halfbyte.loading.load import load_model

    return load_model(
        str(folder), dtype="bfloat16", device=f"cuda:{torch.cuda.current_device()}", mesh=mesh, along=along
    )


def check_sum(tensor: Tensor) -> int:
    """Of all bytes of a parameter or of a piece, by their places."""
    if isinstance(tensor, QuantizedTensor):
        return sum(check_sum(part) * (2 * at + 1) for at, (_, part) in enumerate(sorted(tensor.parts.items())))
    plain = tensor.raw if isinstance(tensor, QuantizedShard) else tensor
    raw, total = plain.detach().contiguous().view(-1).view(torch.uint8), 0
    for at, block in enumerate(raw.split(2**26)):
        places = torch.arange(len(block), device=block.device) % 65521 + 1
        total += int((block * places).sum()) * (at + 1)
    return total


def check_sums(model: Any, mesh: Mesh | None = None) -> list[list[int]]:
    """Of every parameter, what each process is to hold of it; with no mesh, what this one holds."""
    found = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if mesh is None:
                found.append([check_sum(parameter)])
            else:
                placement = Placement(SHARD if ".layers." in name else ())
                ways = mesh.degree(*placement.axes)
                pieces = [check_sum(piece) for piece in placement.split(parameter, ways)]
                found.append(pieces if ways > 1 else pieces * mesh.size)
    return found


# --- parts -----------------------------------------------------------------------------------------------------------


def eight(mesh: Mesh, results: Results, work: Path) -> None:
    name = "llama-3.1-8b"
    meshes = {"data": mesh.with_layout(Parallel(data=mesh.size)), "shard": mesh.with_layout(Parallel(shard=mesh.size))}
    if mesh.is_main:
        write_checkpoint(name, work / name, packed=False)
    mesh.barrier()
    size = warm(work / name)
    wanted: dict[str, list[list[int]]] = {}
    best: dict[str, float] = {}
    for turn in range(3):  # the first is warm-up
        if mesh.is_main:
            found, model = measured(lambda: load(work / name, SINGLE_PROCESS))
            best["alone"] = min(best.get("alone", found["seconds"]), found["seconds"]) if turn else found["seconds"]
            results.add("eight", way="alone", turn=turn, **found)
            if not wanted:
                wanted = {way: check_sums(model, laid) for way, laid in meshes.items()}
            del model
        mesh.barrier()
        wanted = mesh.from_main(wanted)
        for way, laid in meshes.items():
            together(laid, results, work / name, way, turn, best, wanted[way])
    forget(work / name)
    mesh.barrier()
    together(meshes["shard"], results, work / name, "shard", "cold", dict(best), wanted["shard"])
    results.add("eight", way="all", checkpoint_gb=size / 1e9, best=best)


def together(
    mesh: Mesh, results: Results, folder: Path, way: str, turn: Any, best: dict[str, float], wanted: list[list[int]]
) -> None:
    found, model = measured(lambda: load(folder, mesh, SHARD if way == "shard" else ()))
    own = check_sums(model)
    equal = [each[0] for each in own] == [each[mesh.rank] for each in wanted]
    ranks = mesh.gather({**found, "equal": equal})
    slowest = max(each["seconds"] for each in ranks)
    best[way] = min(best.get(way, slowest), slowest) if turn else slowest
    largest = max(p.numel() * 2 for p in model.parameters() if type(p.data) is Tensor) / GIB
    over = [(each["peak_gib"] - each["kept_gib"]) / largest for each in ranks]
    alone = best.get("alone", 0.0)
    results.add(
        "eight", way=way, turn=turn, of_alone=slowest / alone if alone else None, over_in_tensors=over, ranks=ranks
    )
    if not all(each["equal"] for each in ranks):
        raise SystemExit(f"{way}: bytes differ from one process's")
    del model


def seventy(mesh: Mesh, results: Results, work: Path) -> None:
    name = "llama-3.1-70b"
    if mesh.is_main:
        write_checkpoint(name, work / name, packed=True)
        torch.cuda.empty_cache()
    mesh.barrier()
    before = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    other = (used_bytes() - torch.cuda.memory_reserved()) / GIB
    torch.cuda.set_per_process_memory_fraction((24 - other) * GIB / total)
    try:
        found, model = measured(lambda: load(work / name, mesh.with_layout(Parallel(shard=mesh.size)), SHARD))
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
    results.add("seventy", ranks=mesh.gather(found), parameters=sum(1 for _ in model.parameters()))


PARTS = {"eight": eight, "seventy": seventy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--work", type=Path, default=Path("/tmp/loading"))
    parser.add_argument("--json")
    given = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with present_mesh(kind="cuda") as mesh:
        results = Results(mesh, given.json)
        for part in given.parts:
            PARTS[part](mesh, results, given.work)


if __name__ == "__main__":
    main()
