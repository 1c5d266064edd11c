"""`halfbyte check`: everything that `halfbyte train` does before its first step, without writing a file.

With `--gpus` it plans every layout of the run for a number of GPUs, which need not be present.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..config import RunConfig
from ..config.schema import RunKeys
from ..report.terminal import print_facts, print_run
from ..utils.console import Console
from ..utils.errors import ConfigError, HalfbyteError
from ..utils.processes import is_main_rank, is_rank
from ..utils.text import one_line
from ..utils.waiting import showing_waits
from .startup import quick_imports

if TYPE_CHECKING:
    from ..config.resolved import Parallel
    from ..data.prepare import PreparedData
    from ..plan.memory_plan import MemoryPlan
    from ..plan.meshes import Device, Meshes, Option
    from ..train.preflight import PreparedRun

GIB = 2**30
CHOSEN_BY_INIT = {"max_length", "packing", "per_device_train_batch_size"}


def check_run(config: RunConfig, price: float | None = None) -> None:
    """Print the preparation of a run, without training.

    Uses the ranks of a launcher if there is one, else it plans for the number of ranks that `halfbyte train` starts.

    Args:
        price: of a GPU for an hour, in any currency.

    Raises:
        HalfbyteError: the error that `halfbyte train` would raise before its first step.
    """
    console = Console(quiet=not is_main_rank(), verbose=True)
    print_run(console, config)
    from ..runs.inputs import check_paths

    check_paths(config)
    with showing_waits(console):
        run = _prepared(config, console)
    if not CHOSEN_BY_INIT & config.model_fields_set:
        defaults = ", ".join(config.written(key) for key in sorted(CHOSEN_BY_INIT))
        print_facts(console, {"defaults": f"{defaults} · `halfbyte init` chooses these for this machine and data"})
    seconds = _step_seconds(run.plan) if run.machine.device.type == "cuda" else None
    print_facts(console, {"training": training_cost(run.config, run.data, run.plan.layout, seconds, price)})
    console.print(_readiness(config, run))


def _prepared(config: RunConfig, console: Console) -> PreparedRun:
    """Prepare a run as `train` does, and print what halfbyte does with its model."""
    with quick_imports():
        from ..mesh.mesh import present_mesh
        from ..parallel.launch.agreement import check_agreement
        from ..parallel.launch.launcher import layout_to_launch
        from ..train.preflight import prepare_run
        from ..train.several import prepare_adapters
        from ..utils.hardware import chosen_device
        from ..utils.notices import silent
        from .model_facts import GENERATING, model_facts

    layout = layout_to_launch(config)
    rank_layout = config.layout if is_rank() else None
    mesh_of_ranks = present_mesh(rank_layout, chosen_device(config.device).type)
    with mesh_of_ranks as mesh, contextlib.nullcontext() if mesh.is_main else silent():
        check_agreement(mesh, config)
        if config.trains_several:
            run, *_ = prepare_adapters(config, None, console, writes=False).values()
        else:
            run = prepare_run(config, None, console, mesh, layout if mesh.size == 1 else None, writes=False)
    if mesh.is_main:
        facts = model_facts(run.files.config, trust_remote_code=config.trust_remote_code)
        if run.method.scores is not None:  # it generates nothing
            facts = {name: fact for name, fact in facts.items() if name not in GENERATING}
        print_facts(console, facts)
    return run


def _readiness(config: RunConfig, run: PreparedRun) -> Text:
    """Describe whether the checked run can start, which also needs its output folder and space on the disk."""
    from ..runs.inputs import check_output
    from ..train.preflight import check_disk

    try:
        check_output(config)
        check_disk(run)
    except HalfbyteError as error:
        return Text.assemble(("ready", "green"), one_line(f", except for the output: {error.message}; {error.fix}"))
    return Text.assemble(("ready:", "green"), " `halfbyte train` can start")


def training_cost(
    config: RunKeys, data: PreparedData, layout: Parallel, seconds: float | None, price: float | None
) -> str:
    """Describe the steps and tokens of a run and, from the predicted seconds of a step, its hours and their price.

    Args:
        seconds: of a step; None: no time is predicted.
        price: of a GPU for an hour; None: none is shown.
    """
    from ..train.callbacks import steps_per_epoch, total_steps
    from ..utils.text import duration

    rows, degree = len(data.train), layout.data * layout.shard
    steps = total_steps(config, rows, degree)
    words = [f"{steps:,} steps"]
    if not config.streaming:
        tokens = data.report["train"]["tokens"] * steps / steps_per_epoch(config, rows, degree)
        words.append(f"{tokens:,.0f} tokens")
    if seconds is not None:
        words.append(f"about {duration(steps * seconds)} without evaluations, {seconds:.3g} s a step")
    if price is not None and seconds is not None:
        cost = layout.size * price * steps * seconds / 3600
        words.append(f"price {cost:,.2f}: {layout.size} GPU{'s' * (layout.size > 1)} at {price:g} an hour")
    elif price is not None:
        words.append("no price: times are predicted for GPUs, fused models, and methods that sample nothing")
    return " · ".join(words)


def _step_seconds(plan: MemoryPlan) -> float | None:
    """Return the predicted seconds of a step on a GPU; None if parts of a step are not predicted."""
    return plan.seconds if plan.answering is None else None


def check_meshes(config: RunConfig, gpus: int | None, gpu_memory: float | None, price: float | None = None) -> None:
    """Print memory per GPU, communication volume and seconds per step of each layout, and the chosen layout.

    Args:
        gpus: number of GPUs; default: the GPUs of this machine.
        gpu_memory: GiB of the smallest GPU; default: the memory of this machine's GPUs.
        price: of a GPU for an hour, in any currency.

    Raises:
        HalfbyteError: the run is not valid, GPUs are neither present nor described, or `parallel` has another size or
            does not support this run.
    """
    console = Console()
    print_run(console, config)
    from ..runs.inputs import check_paths

    check_paths(config)
    with showing_waits(console):
        _check_meshes(config, gpus, gpu_memory, price, console)


def _check_meshes(
    config: RunConfig, gpus: int | None, gpu_memory: float | None, price: float | None, console: Console
) -> None:
    with quick_imports():
        from ..plan.meshes import Meshes

    gpus, device = _device(gpus, gpu_memory)
    layout = config.layout
    if layout is not None and layout.size != gpus:
        raise ConfigError(
            f"parallel: {layout} needs {layout.size} GPUs, and --gpus is {gpus}",
            f"set parallel: auto, or degrees with the product {gpus}",
        )
    model_config, batches, data = _inputs(config, device)

    def print_cost(option: Option) -> None:
        seconds = None if option.plan is None else _step_seconds(option.plan)
        cost = training_cost(option.config, data, option.layout, seconds, price)
        console.print(one_line(f"training: {cost}"), soft_wrap=True)

    meshes = Meshes(config, model_config, device, batches)
    _table(console, meshes, gpus, device)
    if layout is not None:
        option = meshes.option(layout, config.gradient_accumulation_steps)
        if option.plan is None:
            raise ConfigError(option.refused, "set parallel: auto, or a layout above that fits")
        fits = "fits" if option.fits else "does not fit; `halfbyte check` on that machine suggests changes"
        console.print(one_line(f"the run sets parallel: {layout}, which {fits}"), soft_wrap=True)
        print_cost(option)
        return
    chosen, reason = meshes.choose(gpus)
    if gpus > 1:
        console.print(one_line(f"auto chooses parallel: {chosen.layout}: {reason}"), soft_wrap=True)
    print_cost(chosen)


def _device(gpus: int | None, gpu_memory: float | None) -> tuple[int, Device]:
    """Return the number of GPUs, and the smallest one."""
    import torch

    from ..plan.cards import card_of, card_of_memory, usable_bytes
    from ..plan.meshes import Device

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices and (gpus is None or gpu_memory is None):
        missing = "--gpu-memory" if gpus is not None else "--gpus"
        raise ConfigError(f"{missing} is missing, and this machine has no GPU", f"add {missing} NUMBER")
    gpus = gpus or len(devices)
    if gpu_memory is not None:
        card = card_of_memory(gpu_memory)
        cards = [card_of(device) for device in devices if _gib(device) <= 1.1 * gpu_memory]
        return gpus, Device(torch.device("cuda"), usable_bytes(gpu_memory, gpus), cards[0] if cards else card)
    smallest = min(devices[:gpus], key=_gib)
    return gpus, Device(smallest, usable_bytes(_gib(smallest), gpus), card_of(smallest))


def _gib(device: Any) -> float:
    import torch

    return torch.cuda.get_device_properties(device).total_memory / GIB


def _inputs(config: RunKeys, device: Device) -> tuple[Any, Any, PreparedData]:
    """Return the model's config, a function from a configuration to its micro-batches, and the data."""
    from ..data.batches import batches_of
    from ..loading.find import find_model
    from ..loading.tokenizers import load_run_tokenizer
    from ..methods import method_of

    files = find_model(config.origin)
    tokenizer = load_run_tokenizer(config, files.origin)
    data = method_of(config).ready(config, tokenizer, files.config)
    return files.config, lambda changed: batches_of(changed, data, device.torch), data


def _table(console: Console, meshes: Meshes, gpus: int, device: Device) -> None:
    """Print a line for each layout as soon as it is planned."""
    memory = f"{gpus} GPU{'s' * (gpus > 1)}, {device.capacity_bytes / GIB:.1f} GiB for torch on each"
    console.print(one_line(f"{memory}; seconds estimated for {device.card.name}"), soft_wrap=True)
    for option in meshes.options(gpus):
        console.print(one_line(_line(option)), soft_wrap=True)


def _line(option: Option) -> str:
    """Describe memory per GPU by part, gathered bytes and seconds per step of a layout."""
    from ..plan.memory_plan import component_names, flat_plan
    from ..utils.text import size

    plan, name = option.plan, str(option.layout)
    if plan is None:
        return f"{name}: not possible: {option.refused}"
    names = component_names(flat_plan(plan))
    counts = {names[key]: count for key, count in plan.predicted().items() if key != "total" and count}
    components = ", ".join(f"{component} {size(count)}" for component, count in counts.items())
    words = [f"{name}: {'fits' if plan.fits else 'does NOT fit'}: {size(plan.total)} a GPU ({components})"]
    if plan.layout.slices > 1:
        resident = f", {len(plan.stays)} blocks stay gathered" if plan.stays else ""
        host = f", shards of {len(plan.hosted)} blocks in host memory" if plan.hosted else ""
        words.append(f"{size(plan.gathers)} gathered per step{resident}{host}")
    if not plan.fits_host:
        words.append(f"{size(plan.host_bytes)} of host memory a GPU, of {size(plan.host_share)}")
    if plan.seconds is not None:
        words.append(f"{plan.seconds:.3g} s per step")
    return " · ".join(words)
