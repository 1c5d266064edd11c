"""`halfbyte check --gpus`: every way to divide a run among so many GPUs, none of which need be here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import Parallel, RunConfig
from ..runs.inputs import check_paths
from ..utils.console import Console
from ..utils.errors import ConfigError
from ..utils.text import one_line
from .imports import quick_imports

if TYPE_CHECKING:
    from ..plan.meshes import Device, Meshes, Option

GIB = 2**30
# GiB that CUDA and NCCL take of each GPU, beside torch's allocator: in a 70B's sharded step on two H200s, of which CUDA
# takes 0.5. Links with fewer channels, as PCIe, need less.
BESIDE = 1.6


def check_meshes(config: RunConfig, gpus: int | None, gpu_memory: float | None) -> None:
    """Print, for each mesh of so many GPUs, what one of them holds, what is exchanged and how long a step takes; and
    which mesh the run takes, and why.

    Args:
        gpus: default: those that are here.
        gpu_memory: GiB of the smallest; default: what those that are here have.

    Raises:
        HalfbyteError: what is wrong with the run, or there is no GPU to ask; `parallel` is of another number, or cannot
            divide this run.
    """
    check_paths(config)
    with quick_imports():
        from ..plan.meshes import Meshes

    gpus, device = _device(gpus, gpu_memory)
    asked = config.layout
    if asked is not None and asked.size != gpus:
        raise ConfigError(
            f"parallel: {asked} takes {asked.size} GPUs, and --gpus is {gpus}",
            f"set parallel: auto, or one whose numbers multiply to {gpus}",
        )
    model_config, batches = _inputs(config, device)
    meshes, console = Meshes(config, model_config, device, batches), Console()
    _table(console, meshes, gpus, device)
    if asked is not None:
        _print_asked(console, meshes, asked, config)
        return
    chosen, reason = meshes.choose(gpus)
    console.print(one_line(f"auto takes parallel: {chosen.layout}: {reason}"), soft_wrap=True)


def _device(gpus: int | None, gpu_memory: float | None) -> tuple[int, Device]:
    """How many GPUs are meant, and what the smallest is."""
    import torch

    from ..plan.cards import card_of, card_of_memory
    from ..plan.meshes import Device

    here = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not here and (gpus is None or gpu_memory is None):
        missing = "--gpu-memory" if gpus is not None else "--gpus"
        raise ConfigError(f"{missing} is missing, and there is no GPU here to ask", f"add {missing} NUMBER")
    gpus = gpus or len(here)
    if gpu_memory is not None:
        card = card_of_memory(gpu_memory)
        known = [card_of(device) for device in here if _gib(device) <= 1.1 * gpu_memory]
        return gpus, Device(torch.device("cuda"), int((gpu_memory - BESIDE) * GIB), known[0] if known else card)
    smallest = min(here[:gpus], key=_gib)
    return gpus, Device(smallest, int((_gib(smallest) - BESIDE) * GIB), card_of(smallest))


def _gib(device: Any) -> float:
    import torch

    return torch.cuda.get_device_properties(device).total_memory / GIB


def _inputs(config: RunConfig, device: Device) -> tuple[Any, Any]:
    """The model's config, and the micro-batches of a configuration."""
    from ..data.batches import batches_of
    from ..loading.find import find_model
    from ..loading.load import load_tokenizer
    from ..methods import method_of

    files = find_model(config.origin)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    data = method_of(config).ready(config, tokenizer, files.config)
    return files.config, lambda changed: batches_of(changed, data, device.torch)


def _table(console: Console, meshes: Meshes, gpus: int, device: Device) -> None:
    """A line for each mesh as soon as it is planned."""
    each = f"{device.capacity_bytes / GIB:.1f} GiB for torch on each"
    console.print(one_line(f"{gpus} GPUs, {each}; seconds as of an {device.card.name}"), soft_wrap=True)
    for option in meshes.options(gpus):
        console.print(one_line(_line(option)), soft_wrap=True)


def _line(option: Option) -> str:
    """What one GPU holds by part, what is gathered, and the seconds of a step."""
    from ..utils.terminal import MEMORY_PARTS, size

    plan, name = option.plan, str(option.layout)
    if plan is None:
        return f"{name}: not possible: {option.refused}"
    parts = ", ".join(f"{MEMORY_PARTS[part].name} {size(n)}" for part, n in plan.predicted().items() if part in
                      MEMORY_PARTS and n)  # fmt: skip
    words = [f"{name}: {'fits' if plan.fits else 'does NOT fit'}: {size(plan.total)} a GPU ({parts})"]
    if plan.layout.slices > 1:
        stay = f", {len(plan.stays)} of its blocks stay" if plan.stays else ""
        host = f", slices of {len(plan.hosted)} blocks on the host" if plan.hosted else ""
        words.append(f"{size(plan.gathers)} gathered a step{stay}{host}")
    if plan.seconds is not None:
        words.append(f"{plan.seconds:.3g} s a step")
    return " · ".join(words)


def _print_asked(console: Console, meshes: Meshes, asked: Parallel, config: RunConfig) -> None:
    option = meshes.option(asked, config.gradient_accumulation_steps)
    if option.plan is None:
        raise ConfigError(option.refused, "set parallel: auto, or one of those above that fit")
    fits = "fits" if option.fits else "does not fit; `halfbyte check` there says what would"
    console.print(one_line(f"the run asks for parallel: {asked}, which {fits}"), soft_wrap=True)
