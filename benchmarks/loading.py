"""Loading of a 70B-shaped bf16 checkpoint into NF4: bytes read from disk, and peak memory of devices and host.

    python -m benchmarks.loading PART… [--layers 20] [--gpus 4] [--work DIR] [--json FILE]

    write   write the checkpoint, a file per layer, with random weights (every layer has the same)
    one     load it in one process
    ranks   load it in --gpus processes, which keep their share of each layer, like `parallel: {shard: N}`

Parts keep their results in DIR, so that each can be a command of its own. Files are evicted from the page cache before
each load. In bf16 a layer of the 70B has 1.71 GB, embedding and head have 2.10 GB each, so a checkpoint has
4.20 + 1.71 · layers GB: 38.4 with 20 layers, 141.1 with 80. Everything but embedding and head grows in
proportion to the layers.

    read            bytes of the checkpoint's entries that all ranks read, / bytes of all entries; 1: each once
    disk            bytes that the system read from disk for all processes, / bytes of all entries (/proc/PID/io)
    excess_tensors  (device peak - share) / largest entry; the bar is 2
    host            peak of anonymous and shared memory, summed over the ranks, and the bar: that of one process and
                    0.5 GiB for each rank. `growth` counts from the start of loading
    equal_share     whether each rank's bytes are those of its piece of the model that one process loaded
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import parser_of, peak_gib, reset_peak, synchronize, write_result
from benchmarks.several_gpus import SEVENTY
from benchmarks.step_model import model_config
from halfbyte.config import Parallel
from halfbyte.loading import sharded
from halfbyte.loading.load import load_model
from halfbyte.modeling.layer import decoder_layers
from halfbyte.parallel.mesh import present_mesh
from halfbyte.parallel.shard.placement import Placement
from halfbyte.reading.tensors import read_header, safetensors_files
from halfbyte.tensor import QuantizedShard, QuantizedTensor

GIB = 2**30
RANK_GIB = 0.5  # host memory that each rank may add to one process's
THREADS = 8
RESULT = "RESULT "
PARTS = ("write", "one", "ranks")


# --- the checkpoint --------------------------------------------------------------------------------------------------


def write(given: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint of `--layers` layers, in several threads."""
    from transformers import AutoModelForCausalLM

    began, folder = time.perf_counter(), given.work / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = model_config(given.model)
    config.num_hidden_layers = given.layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    prefix, files = decoder_layers(model)[0], dict[str, dict[str, Tensor]]()
    for name, tensor in model.state_dict().items():
        part = name.removeprefix(f"{prefix}.").partition(".")[0] if name.startswith(f"{prefix}.") else name
        files.setdefault(f"model-{part}.safetensors", {})[name] = tensor
    block = torch.empty(2**25, dtype=torch.bfloat16).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda file: _write_file(folder / file, files[file], block), files))
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    size = sum(file.stat().st_size for file in safetensors_files(folder))
    return {"gb": size / 1e9, "files": len(files), "seconds": time.perf_counter() - began}


def _write_file(path: Path, tensors: dict[str, Tensor], block: Tensor) -> None:
    """Write a safetensors file whose tensors have the repeated bytes of `block`."""
    header, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = memoryview(block.view(torch.uint8).numpy())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, end, len(data)):
            file.write(data[: min(len(data), end - first)])
        file.flush()
        os.fsync(file.fileno())


def evict(folder: Path) -> None:
    """Evict a checkpoint's files from the page cache."""
    for path in safetensors_files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- one process -----------------------------------------------------------------------------------------------------


class HostPeak:
    """Samples this process's anonymous and shared memory in a thread, within its context.

    Attributes:
        kind: fields of /proc/self/status that are summed. Without RssAnon and RssShmem it is VmRSS, which includes
            pages of the mapped checkpoint.
        before, peak: bytes.
    """

    def __enter__(self) -> HostPeak:
        self.kind: tuple[str, ...] = ("RssAnon", "RssShmem") if "RssAnon" in _status() else ("VmRSS",)
        self.before = self.peak = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        status = _status()
        return sum(status[name] for name in self.kind)

    def _sample(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, self.now())


def _status() -> dict[str, int]:
    """Return the fields of /proc/self/status that count memory, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def disk_bytes() -> int | None:
    """Return the bytes that this process has caused to be read from disk; None if the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class CountedSlice:
    """An entry of a checkpoint that adds the bytes read from it to `read`."""

    def __init__(self, entry: Any, read: Callable[[int], None]):
        self.entry, self.read = entry, read

    def get_dtype(self) -> str:
        return str(self.entry.get_dtype())

    def get_shape(self) -> list[int]:
        return list(self.entry.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self.entry[index]
        self.read(tensor.nbytes)
        return tensor


@contextlib.contextmanager
def counted_entries() -> Iterator[list[int]]:
    """Within the context, append the bytes of each read of sharded loading to the list."""
    sizes, original = list[int](), sharded._entries

    def entries(*args: Any) -> dict[str, Any]:
        return {
            name: entry if isinstance(entry, sharded.AbsentSlice) else CountedSlice(entry, sizes.append)
            for name, entry in original(*args).items()
        }

    with mock.patch.object(sharded, "_entries", entries):
        yield sizes


def load(given: argparse.Namespace) -> None:
    """Load the checkpoint in this process, one of a mesh or alone, and print the measurements on the main rank."""
    with present_mesh(kind=given.device) as mesh:
        mesh, folder = mesh.with_layout(Parallel(shard=mesh.size)), given.work / "model"
        device = mesh.device(torch.device(given.device))
        torch.zeros(1, device=device)
        held = functools.partial(torch.cuda.memory_allocated, device) if device.type == "cuda" else lambda: 0
        mesh.barrier()
        reset_peak(device.type)
        disk, base, began = disk_bytes(), held(), time.perf_counter()
        along = ("shard",) if mesh.size > 1 else ()
        with HostPeak() as host, counted_entries() as sizes:
            model = load_model(str(folder), quantization="nf4", dtype="bfloat16", device=device, mesh=mesh, along=along)
            synchronize(device.type)
        after = disk_bytes()
        own = {
            "seconds": time.perf_counter() - began,
            "entries_bytes": sum(sizes),
            "disk_bytes": None if disk is None or after is None else after - disk,
            "share_gib": (held() - base) / GIB,
            "peak_gib": peak_gib(device.type)["peak_gib"] - base / GIB,
            "host_gib": host.peak / GIB,
            "host_growth_gib": (host.peak - host.before) / GIB,
            "host_kind": "+".join(host.kind),
        }
        if mesh.size == 1:
            (given.work / "digests.json").write_text(json.dumps(piece_digests(model, given.gpus)))
        else:
            expected = json.loads((given.work / "digests.json").read_text())[mesh.rank]
            own["equal_share"] = digests(dict(model.named_parameters())) == expected
        every = mesh.gather(own)
        if mesh.is_main:
            print(RESULT + json.dumps(every), flush=True)


def piece_digests(model: Any, ranks: int) -> list[dict[str, str]]:
    """Return for each rank the digests of its pieces of a full model."""
    layers, pieces = f"{decoder_layers(model)[0]}.", [dict[str, Any]() for _ in range(ranks)]
    for name, parameter in model.named_parameters():
        split = Placement(("shard",)) if name.startswith(layers) else Placement()
        for own, piece in zip(pieces, split.split(parameter.detach(), ranks if split.axes else 1) * ranks):  # noqa: B905
            own[name] = piece
    return [digests(own) for own in pieces]


def digests(tensors: dict[str, Any]) -> dict[str, str]:
    """Return name → SHA-256 of a tensor's bytes, quantized or not, in several threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Any) -> str:
    if isinstance(tensor, QuantizedTensor):
        held = [tensor.parts[name] for name in sorted(tensor.parts)]
    else:
        held = [tensor.raw if isinstance(tensor, QuantizedShard) else tensor]
    found = hashlib.sha256()
    for each in held:
        found.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


# --- all processes ---------------------------------------------------------------------------------------------------


def start(given: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """Evict the checkpoint, load it in `ranks` new processes, and return the measurements of each.

    Raises:
        SystemExit: they failed; the message has the end of their output.
    """
    evict(given.work / "model")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    own = ["load", "--work", str(given.work), "--device", given.device, "--gpus", str(given.gpus)]
    ran = subprocess.run(
        [sys.executable, *torchrun, "-m", "benchmarks.loading", *own], capture_output=True, text=True, check=False
    )
    found = [line for line in ran.stdout.splitlines() if line.startswith(RESULT)]
    if ran.returncode or not found:
        raise SystemExit(f"{ranks} ranks: exit {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}")
    return list(json.loads(found[0].removeprefix(RESULT)))


def summary(ranks: list[dict[str, Any]], one: dict[str, Any] | None, entries: Sequence[int]) -> dict[str, Any]:
    """Return the measurements of all ranks next to the bars, as the module's docstring defines them.

    Args:
        ranks: the measurements of each rank.
        one: those of one process, if it was measured.
        entries: bytes of each entry of the checkpoint.
    """
    total, largest = sum(entries), max(entries)
    disk = [rank["disk_bytes"] for rank in ranks]
    found = {
        "read": sum(rank["entries_bytes"] for rank in ranks) / total,
        "disk": None if None in disk else sum(disk) / total,
        "excess_tensors": max(rank["peak_gib"] - rank["share_gib"] for rank in ranks) * GIB / largest,
    }
    if one is not None:
        for name in ("host_gib", "host_growth_gib"):
            found |= {name: sum(rank[name] for rank in ranks), f"{name}_bar": one[name] + RANK_GIB * len(ranks)}
    return found


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("parts", nargs="+", choices=(*PARTS, "load"))
    made.add_argument("--layers", type=int, default=20)
    made.add_argument("--gpus", type=int, default=4)
    made.add_argument("--model", default=SEVENTY)
    made.add_argument("--device", default="cuda")
    made.add_argument("--work", type=Path, default=Path("/tmp/loading"))
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    if "load" in given.parts:  # in a process that `start` has started
        return load(given)
    results = given.work / "results.json"  # of earlier commands over the same checkpoint
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() and "write" not in given.parts else {}
    for part in PARTS:
        if part not in given.parts:
            continue
        if part == "write":
            found = {"model": given.model, "layers": given.layers, "device_kind": given.device, "write": write(given)}
        else:
            found[part] = start(given, 1 if part == "one" else given.gpus)
        if part == "ranks":
            headers = map(read_header, safetensors_files(given.work / "model"))
            bounds = (entry["data_offsets"] for header in headers for entry in header.values())
            one = found["one"][0] if "one" in found else None
            found["summary"] = summary(found["ranks"], one, [end - begin for begin, end in bounds])
        print(part, json.dumps(found[part]), *([json.dumps(found["summary"])] if part == "ranks" else []), flush=True)
        results.write_text(json.dumps(found))
        write_result(given.json, found)


if __name__ == "__main__":
    main()
