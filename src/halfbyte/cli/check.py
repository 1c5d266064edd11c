"""`halfbyte check`: everything that `halfbyte train` does before its first step, without writing a file.

With `--gpus` it plans every layout of the run for a number of GPUs, which need not be present.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..config import Parallel, RunConfig
from ..config.schema import RunKeys, TrainingSection
from ..utils.console import Console
from ..utils.errors import ConfigError
from ..utils.processes import is_main_rank, is_rank
from ..utils.terminal import print_run
from ..utils.text import one_line
from ..utils.waiting import showing_waits
from .startup import quick_imports

if TYPE_CHECKING:
    from ..plan.meshes import Device, Meshes, Option

GIB = 2**30
# GiB of each GPU for CUDA (0.5) and NCCL outside torch's allocator, measured in a sharded step of a 70B model on two
# H200s. Connections with fewer channels, such as PCIe, need less.
CUDA_AND_NCCL_GIB = 1.6


def check_run(config: RunConfig) -> None:
    """Print the preparation of a run, without training.

    Uses the ranks of a launcher if there is one, else it plans for the number of ranks that `halfbyte train` starts.

    Raises:
        HalfbyteError: the error that `halfbyte train` would raise before its first step.
    """
    console = Console(quiet=not is_main_rank())
    print_run(console, config)
    from ..runs.inputs import check_paths

    check_paths(config)
    with showing_waits(console):
        _check(config, console)
    console.print(Text.assemble(("ready:", "green"), " `halfbyte train` can start"))


def _check(config: RunConfig, console: Console) -> None:
    with quick_imports():
        from ..parallel.launch.agreement import check_agreement
        from ..parallel.launch.launcher import layout_to_launch
        from ..parallel.mesh import present_mesh
        from ..train.preflight import prepare_run
        from ..utils.hardware import chosen_device
        from ..utils.notices import silent

    layout = layout_to_launch(config)
    asked = config.layout if is_rank() else None
    mesh_of_ranks = present_mesh(asked, chosen_device(config.device).type)
    with mesh_of_ranks as mesh, contextlib.nullcontext() if mesh.is_main else silent():
        check_agreement(mesh, config)
        prepare_run(config, console=console, mesh=mesh, layout=layout if mesh.size == 1 else None)


def check_meshes(config: RunConfig, gpus: int | None, gpu_memory: float | None) -> None:
    """Print memory per GPU, communication volume and seconds per step of each layout, and the chosen layout.

    Args:
        gpus: number of GPUs; default: the GPUs of this machine.
        gpu_memory: GiB of the smallest GPU; default: the memory of this machine's GPUs.

    Raises:
        HalfbyteError: the run is not valid, GPUs are neither present nor described, or `parallel` has another size or
            does not support this run.
    """
    console = Console()
    print_run(console, config)
    from ..runs.inputs import check_paths

    check_paths(config)
    with showing_waits(console):
        _check_meshes(config, gpus, gpu_memory, console)


def _check_meshes(config: RunConfig, gpus: int | None, gpu_memory: float | None, console: Console) -> None:
    with quick_imports():
        from ..plan.meshes import Meshes

    gpus, device = _device(gpus, gpu_memory)
    asked = config.layout
    if asked is not None and asked.size != gpus:
        raise ConfigError(
            f"parallel: {asked} needs {asked.size} GPUs, and --gpus is {gpus}",
            f"set parallel: auto, or degrees with the product {gpus}",
        )
    model_config, batches = _inputs(config, device)
    meshes = Meshes(config, model_config, device, batches)
    _table(console, meshes, gpus, device)
    if asked is not None:
        _print_asked(console, meshes, asked, config)
        return
    chosen, reason = meshes.choose(gpus)
    console.print(one_line(f"auto chooses parallel: {chosen.layout}: {reason}"), soft_wrap=True)


def _device(gpus: int | None, gpu_memory: float | None) -> tuple[int, Device]:
    """Return the number of GPUs, and the smallest one."""
    import torch

    from ..plan.cards import card_of, card_of_memory
    from ..plan.meshes import Device

    here = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not here and (gpus is None or gpu_memory is None):
        missing = "--gpu-memory" if gpus is not None else "--gpus"
        raise ConfigError(f"{missing} is missing, and this machine has no GPU", f"add {missing} NUMBER")
    gpus = gpus or len(here)
    if gpu_memory is not None:
        card = card_of_memory(gpu_memory)
        known = [card_of(device) for device in here if _gib(device) <= 1.1 * gpu_memory]
        return gpus, Device(
            torch.device("cuda"), int((gpu_memory - CUDA_AND_NCCL_GIB) * GIB), known[0] if known else card
        )
    smallest = min(here[:gpus], key=_gib)
    return gpus, Device(smallest, int((_gib(smallest) - CUDA_AND_NCCL_GIB) * GIB), card_of(smallest))


def _gib(device: Any) -> float:
    import torch

    return torch.cuda.get_device_properties(device).total_memory / GIB


def _inputs(config: RunKeys, device: Device) -> tuple[Any, Any]:
    """Return the model's config, and a function from a configuration to its micro-batches."""
    from ..data.batches import batches_of
    from ..loading.find import find_model
    from ..loading.load import load_tokenizer
    from ..methods import method_of

    files = find_model(config.origin)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    data = method_of(config).ready(config, tokenizer, files.config)
    return files.config, lambda changed: batches_of(changed, data, device.torch)


def _table(console: Console, meshes: Meshes, gpus: int, device: Device) -> None:
    """Print a line for each layout as soon as it is planned."""
    each = f"{device.capacity_bytes / GIB:.1f} GiB for torch on each"
    console.print(one_line(f"{gpus} GPUs, {each}; seconds estimated for {device.card.name}"), soft_wrap=True)
    for option in meshes.options(gpus):
        console.print(one_line(_line(option)), soft_wrap=True)


def _line(option: Option) -> str:
    """Describe memory per GPU by part, gathered bytes and seconds per step of a layout."""
    from ..utils.terminal import MEMORY_PARTS, size

    plan, name = option.plan, str(option.layout)
    if plan is None:
        return f"{name}: not possible: {option.refused}"
    parts = ", ".join(f"{MEMORY_PARTS[part].name} {size(n)}" for part, n in plan.predicted().items() if part in
                      MEMORY_PARTS and n)  # fmt: skip
    words = [f"{name}: {'fits' if plan.fits else 'does NOT fit'}: {size(plan.total)} a GPU ({parts})"]
    if plan.layout.slices > 1:
        resident = f", {len(plan.stays)} blocks stay gathered" if plan.stays else ""
        host = f", shards of {len(plan.hosted)} blocks in host memory" if plan.hosted else ""
        words.append(f"{size(plan.gathers)} gathered per step{resident}{host}")
    if not plan.fits_host:
        words.append(f"{size(plan.host_bytes)} of host memory a GPU, of {size(plan.host_share)}")
    if plan.seconds is not None:
        words.append(f"{plan.seconds:.3g} s per step")
    return " · ".join(words)


def _print_asked(console: Console, meshes: Meshes, asked: Parallel, config: TrainingSection) -> None:
    option = meshes.option(asked, config.gradient_accumulation_steps)
    if option.plan is None:
        raise ConfigError(option.refused, "set parallel: auto, or a layout above that fits")
    fits = "fits" if option.fits else "does not fit; `halfbyte check` on that machine suggests changes"
    console.print(one_line(f"the run sets parallel: {asked}, which {fits}"), soft_wrap=True)
