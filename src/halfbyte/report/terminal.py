"""Terminal output of a run: header, memory bar, data line and live metrics.

Everything here takes plain dicts (the records of environment.json, memory.json, data_report.json and metrics.jsonl) and
a rich console. Torch is never imported.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..adapter_kinds import find_adapter_kind
from ..config import SIXTEEN
from ..plan.memory_plan import COMPONENT_NAMES, component_names, flat_plan
from ..utils.console import has_colours, is_verbose
from ..utils.text import duration, one_line, size
from ..utils.waiting import drawing_waits, renew_wait, spinner, waiting

if TYPE_CHECKING:
    from ..config.schema import RunKeys, TrainingSection
    from ..methods import Metric, Numbers


class Part(NamedTuple):
    """Display of a memory component: name, colour, and letter for terminals without colours."""

    name: str
    colour: str
    letter: str


RECENT_SECONDS = 30.0  # of training steps that the ETA is estimated from
HEAP_GROWTH = 1.15  # measured over planned memory on a CPU from which the heap is named as the reason
# Colour and letter of the components of a memory plan, in the order of allocation: process, loading, training.
MEMORY_PARTS = {
    component: Part(COMPONENT_NAMES[component], colour, letter)
    for component, colour, letter in (
        ("runtime", "bright_black", "r"),
        ("weights", "blue", "w"),
        ("gathered", "bright_blue", "W"),
        ("adapters", "cyan", "a"),
        ("gradients", "green", "g"),
        ("optimizer", "yellow", "o"),
        ("activations", "magenta", "A"),
        ("logits", "red", "l"),
        ("vision", "bright_yellow", "i"),
        ("graphs", "bright_magenta", "G"),
        ("rollouts", "bright_cyan", "R"),
    )
}
MEASURED_PARTS = {
    "base": Part("process", "bright_black", "p"),
    "loading": Part("loading", "blue", "L"),
    "training": Part("training", "magenta", "t"),
}


def method(config: RunKeys | Mapping[str, Any]) -> str:
    """Describe how weights are trained: '4-bit NF4 + LoRA r=16', 'full fine-tuning'."""
    keys = config if isinstance(config, Mapping) else config.model_dump()
    if not keys.get("use_peft", True):
        return "full fine-tuning"
    row = find_adapter_kind(keys)
    rank = keys.get("r", "?") if row is None or "r" in row.keys else (keys.get("peft_config") or {}).get("r")
    return f"{storage(keys)} + {row.name if row else 'adapter'}" + (f" r={rank}" if rank else "")


def storage(keys: Mapping[str, Any]) -> str:
    """Describe how frozen weights are stored: '16-bit', '4-bit NF4', 'kbit5', 'mixed (3)'."""
    chosen = keys.get("quantization")
    if not keys.get("load_in_4bit", True) or chosen == SIXTEEN:
        return "16-bit"
    if isinstance(chosen, Mapping):
        formats = sorted(set(chosen.values()))
        return " and ".join(formats) if len(formats) < 3 else f"mixed ({len(formats)})"
    return chosen or f"4-bit {str(keys.get('bnb_4bit_quant_type', 'nf4')).upper()}"


def print_run(console: Console, config: RunKeys) -> None:
    """Print the version, and the model, data and output of a run: the first lines, which need no other library."""
    datasets = [entry.path for entry in config.datasets]
    lines = {
        "model": f"{config.model_name_or_path} · {method(config)}",
        "data": f"{', '.join(datasets)} · up to {config.max_length:,} tokens{' · packed' if config.packing else ''}",
        "output": config.output_dir,
    }
    console.print(Text.assemble(("halfbyte ", "bold"), (__version__, "bold cyan")))
    console.print(_facts(lines))


def print_header(console: Console, environment: Mapping[str, Any]) -> None:
    """Print the device of a run; a verbose console also prints choices with their reasons."""
    machine = _machine(environment)
    gpus, device = environment["gpus"], environment["device"] or "cpu"
    if gpus and not device.startswith("cpu"):
        device_type, _, index = device.partition(":")
        device = f"{device_type}: {_gpu(gpus[int(index or 0)])}"
    else:
        device = _cpu(environment["cpu"])
    device += f" · {environment['compute_dtype']['dtype']}"
    reasons = ["compute", "kernels", "versions"] if is_verbose(console) else []
    if not reasons and not environment["kernels"]["enabled"]:
        reasons = ["kernels"]
    console.print(_facts({"device": device} | {name: machine[name] for name in reasons}))


def print_processes(console: Console, layout: object, size: int, config: TrainingSection, data_degree: int) -> None:
    """Print the layout of a run and the micro-batches of its steps.

    Args:
        layout: as the key `parallel` is written.
        data_degree: number of ranks with different sequences.
    """
    rows, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    step = f"a step has {data_degree} × {steps} micro-batches of {rows} row{'s' if rows > 1 else ''}"
    console.print(_facts({"processes": f"{size}, as parallel: {layout} · {step}"}))


def expert_usage_line(use: Mapping[str, Any]) -> str:
    """Describe how evenly a mixture's experts were used, from experts.json."""
    dead = {name: usage["dead"] for name, usage in use["layers"].items() if usage["dead"]}
    line = f"experts: routed with {use['entropy']:.0%} of the entropy of uniform use"
    if not dead:
        return f"{line}, each of {use['experts']} at least once"
    name, first = next(iter(dead.items()))
    return one_line(f"{line}; {use['dead']} of {use['experts']} never, first {first[0]} of {name}")


def print_facts(console: Console, lines: Mapping[str, str]) -> None:
    """Print named facts, one per line."""
    console.print(_facts(lines))


def print_environment(console: Console, environment: Mapping[str, Any]) -> None:
    """Print the facts of `environment`, one per line."""
    console.print(_facts(_machine(environment) | {"bitsandbytes": _bitsandbytes(environment["bitsandbytes"])}))


def _machine(environment: Mapping[str, Any]) -> dict[str, str]:
    halfbyte, cpu = environment["halfbyte"], environment["cpu"]
    kernels, compute = environment["kernels"], environment["compute_dtype"]
    versions = {"python": environment["python"], **environment["versions"]}
    gpus = [_gpu(gpu) for gpu in environment["gpus"]]
    return {
        "halfbyte": halfbyte["version"] + (f" ({halfbyte['commit']})" if halfbyte["commit"] else ""),
        "system": environment["platform"],
        "cpu": _cpu(cpu),
        **({f"gpu {index}": gpu for index, gpu in enumerate(gpus)} or {"gpu": "none that torch sees"}),
        "device": str(environment["device"] or "none: torch is not installed"),
        "compute": f"{compute['dtype']}: {compute['reason']}" if compute["dtype"] else compute["reason"],
        "kernels": f"{'on' if kernels['enabled'] else 'off'}: {kernels['reason']}",
        "versions": " · ".join(f"{name} {version}" for name, version in versions.items() if version),
    }


def _bitsandbytes(state: Mapping[str, Any]) -> str:
    modes = {
        "install": "install: halfbyte answers the import",
        "override": "override: the real package runs halfbyte's kernels",
        "none": "none: halfbyte replaces nothing",
    }
    real = f"the real package is {state['real']}" if state["real"] else "the real package is not installed"
    return f"{modes[state['mode']]} · {real}"


def _gpu(gpu: Mapping[str, Any]) -> str:
    facts = [gpu["name"], size(gpu["memory_bytes"]), gpu["capability"] and f"capability {gpu['capability']}"]
    return " · ".join(fact for fact in (*facts, gpu["driver"] and f"driver {gpu['driver']}") if fact)


def threads(cpu: Mapping[str, Any]) -> str:
    """Return the number of threads that torch computes with, and of processors if there are more."""
    number = cpu.get("threads")
    processors = cpu.get("processors", number)
    return f"{number} thread{'' if number == 1 else 's'}" + ("" if processors == number else f" of {processors}")


def _cpu(cpu: Mapping[str, Any]) -> str:
    instructions = ", ".join(cpu["instruction_sets"]) or "no vector extensions known"
    return f"{cpu['model'] or 'CPU'} · {threads(cpu)} · {size(cpu['memory_bytes'])} · {instructions}"


def _facts(lines: Mapping[str, str | RenderableType]) -> Table:
    """Return a table with names on the left and wrapped values on the right."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    for name, value in lines.items():
        table.add_row(name, Text(one_line(value)) if isinstance(value, str) else value)
    return table


def bar_widths(values: Sequence[float], width: int) -> list[int]:
    """Return the cells of each of `values` in a bar of `width` cells; they add up to `width`.

    Cells are assigned by largest remainder, so that bars of one scale are comparable; a value may have no cell.
    """
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    shares = [value / total * width for value in values]
    cells = [int(share) for share in shares]
    by_remainder = sorted(range(len(values)), key=lambda index: cells[index] - shares[index])
    for index in by_remainder[: width - sum(cells)]:
        cells[index] += 1
    return cells


def memory_parts(flat: Mapping[str, Any]) -> dict[str, Part]:
    """Component → how it is shown, of a plan and of what was measured.

    Args:
        flat: as `flat_plan` returns it.
    """
    names = component_names(flat)
    return MEASURED_PARTS | {name: shown._replace(name=names[name]) for name, shown in MEMORY_PARTS.items()}


def measured_parts(measured: Mapping[str, Any]) -> dict[str, float]:
    """Split the measured peak into what process, loading and training added (bytes, never negative)."""
    base = measured.get("base_bytes") or 0
    loaded = max(measured.get("after_load_bytes") or base, base)
    peak = max(measured.get("peak_bytes") or loaded, loaded)
    return {"base": base, "loading": loaded - base, "training": peak - loaded}


def comparable_bytes(flat: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[float, float]:
    """Return predicted and measured bytes that a run adds to its process, with equal scope.

    On a CPU the process and its libraries existed before the model. The plan's reserve for shapes outside of CUDA
    graphs is not part of the peak of torch's allocator.

    Args:
        flat: as `flat_plan` returns it.
    """
    predicted = flat.get("total") or sum(flat.get(name) or 0 for name in MEMORY_PARTS)
    shown = measured_parts(measured)
    return predicted - (flat.get("graphs") or 0), shown["loading"] + shown["training"]


def deviation(predicted: float, measured: float) -> str:
    """Format the deviation of a measurement: "4.2% above"."""
    return f"{abs(measured - predicted) / predicted:.1%} {'above' if measured > predicted else 'below'}"


def excess_reason(predicted: float, measured: float, flat: Mapping[str, Any]) -> str:
    """Return why a CPU run's memory far exceeds the plan: its heap keeps freed blocks (`memory.allocators`)."""
    heap = str(flat.get("device")).startswith("cpu") and measured > HEAP_GROWTH * predicted
    return "including freed blocks that the C library keeps" if heap else ""


def print_memory(console: Console, plan: Any, measured: Mapping[str, Any] | None = None) -> None:
    """Print predicted memory, and with `measured` the peak, in a line.

    A verbose console prints a stacked bar by component and the free rest, and with `measured` a second bar to scale.

    Args:
        plan: a MemoryPlan, its dict (bytes by part, total), or memory.json; `capacity_bytes` gives the free part.
        measured: base_bytes, after_load_bytes, peak_bytes.
    """
    flat = flat_plan(plan)
    components = {name: flat.get(name) or 0 for name in MEMORY_PARTS}
    total = flat.get("total") or sum(components.values())
    if not is_verbose(console):
        console.print(_facts({"memory": _memory_line(total, measured or {}, flat)}))
        return
    shown = measured_parts(measured) if measured else {}
    bar_parts = {"base": shown.get("base", 0), **components}  # the process is in the peak, so it is in both bars
    scale = max((flat.get("capacity_bytes") or 0) + bar_parts["base"], sum(bar_parts.values()), sum(shown.values()))
    has_capacity = bool(flat.get("capacity_bytes"))
    lines: dict[str, RenderableType] = {"memory": _stack(console, bar_parts, memory_parts(flat), scale, has_capacity)}
    if measured:
        lines["measured"] = _stack(console, shown, MEASURED_PARTS, scale, has_capacity)
    lines["total"] = _totals(total, measured or {}, flat)
    console.print(_facts(lines))


def _memory_line(total: float, measured: Mapping[str, Any], flat: Mapping[str, Any]) -> str:
    """Describe predicted memory, the device's, and the measured peak: "5.1 GiB at the peak, 5.2 GiB predicted"."""
    predicted, peak = comparable_bytes(flat, measured)
    if peak:
        return f"{size(peak)} at the peak, {size(predicted)} predicted"
    capacity = f" of {size(flat['capacity_bytes'])}" if flat.get("capacity_bytes") else ""
    on = flat.get("activation_checkpointing")
    return f"{size(total)}{capacity} predicted" + (f" · activations {_saved(flat)}" if on is not None else "")


def _saved(flat: Mapping[str, Any]) -> str:
    """Describe what happens with activations: "saved", "recomputed", "offloaded"."""
    if not flat["activation_checkpointing"]:
        return "saved"
    return "offloaded" if any(str(level).startswith("offload") for level in flat.get("levels") or ()) else "recomputed"


def _stack(
    console: Console, components: Mapping[str, float], names: Mapping[str, Part], scale: float, capacity_known: bool
) -> Group:
    """Return a stacked bar and its legend; the rest of a known capacity is free."""
    in_colours = has_colours(console)
    free, cells = max(scale - sum(components.values()), 0), max(4, min(console.width - 14, 72))
    used, _ = bar_widths([sum(components.values()), free], cells)
    widths = bar_widths(list(components.values()), used)
    bar, legend = Text(no_wrap=True), []
    for (component, count), width in zip(components.items(), widths, strict=True):
        name, colour, letter = names[component]
        bar.append(("█" if in_colours else letter) * width, colour)
        if count > 0:
            legend.append(
                Text.assemble(("■" if in_colours else letter, colour), f" {name} {size(count)}", no_wrap=True)
            )
    if capacity_known:
        bar.append("░" * (cells - used), "bright_black")
        legend.append(Text(f"░ free {size(free)}", "bright_black", no_wrap=True))
    return Group(bar, Columns(legend, padding=(0, 2)))


def _totals(total: float, measured: Mapping[str, Any], flat: Mapping[str, Any]) -> str:
    capacity, (predicted, peak) = flat.get("capacity_bytes"), comparable_bytes(flat, measured)
    words = [f"predicted {size(predicted if peak else total)}"]
    if peak:
        base = f" in addition to the process's {size(measured['base_bytes'])}" if measured.get("base_bytes") else ""
        remarks = [deviation(predicted, peak), excess_reason(predicted, peak, flat)]
        words.append(", ".join([f"measured {size(peak)}{base}", *filter(None, remarks)]))
    if capacity:
        words.append(f"device {size(capacity)}")
    if flat.get("activation_checkpointing") is not None:
        reason = f": {flat['reason']}" if flat.get("reason") else ""
        words.append(f"activation checkpointing {'on' if flat['activation_checkpointing'] else 'off'}{reason}")
    return " · ".join(words)


def print_data(console: Console, report: Mapping[str, Any]) -> None:
    """Print a line per split: rows, dropped, truncated and trained tokens, packing, and whether EOS is trained."""
    lines: dict[str, Text] = {}
    for name in ("train", "eval"):
        if report.get(name):
            eos_trained = report.get("eos_trained") if name == "train" or is_verbose(console) else None
            line = data_line(report[name], eos_trained, details=is_verbose(console))
            lines["data" if name == "train" else "held out"] = line
    if mixture := report["train"].get("mixture"):
        lines["mixture"] = Text(" · ".join(f"{entry['path']} {entry['share']:.1%}" for entry in mixture))
    console.print(_facts(lines))


def data_line(split: Mapping[str, Any], eos_trained: bool | None, *, details: bool = True) -> Text:
    """Describe one split of data_report.json.

    Args:
        details: add mean lengths, and how much shared prompts save.
    """
    tokens, trained = split["tokens"], split["trained_tokens"]
    dropped = {reason: count for reason, count in split["dropped"].items() if count}
    words = [*_rows(split, details), f"{tokens:,} tokens"]
    words.append(f"{trained / tokens:.1%} trained" if tokens and trained else "none trained")
    if images := split.get("images"):
        mean = images["tokens"] / images["count"]
        words.append(f"{images['count']:,} images of {mean:.0f} tokens, at most {images['largest']:,}")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    if dropped:
        words.append(f"{sum(dropped.values()):,} dropped ({reasons})")
    if split["truncated"]:
        words.append(f"{split['truncated']:,} truncated")
    if split.get("empty_answers"):
        words.append(f"{split['empty_answers']:,} empty answers")
    if split.get("computed_tokens") and details:
        saved = 1 - split["computed_tokens"] / split["tokens_apart"]
        words.append(f"each prompt once: {saved:.0%} fewer computed")
    if split.get("packing_efficiency") is not None:
        words.append(f"packing {split['packing_efficiency']:.1%} full")
    line = Text(" · ".join(words))
    if eos_trained is not None:
        verdict, style = ("EOS trained ✓", "green") if eos_trained else ("EOS NOT trained ✗", "bold red")
        line.append(" · ").append(verdict, style)
    return line


def _rows(split: Mapping[str, Any], details: bool) -> list[str]:
    """Describe the number of rows of a split and, for answers, their kind and, with `details`, mean length."""
    means = split.get("mean_tokens")
    if means is None:
        first = "a stream, first " if split.get("streamed") else ""
        return [f"{first}{split['documents']:,} documents in {split['rows']:,} rows"]
    nouns = {"chosen": "pairs", "completion": "answers", "steps": "answers in steps"}
    noun = next((noun for name, noun in nouns.items() if name in means), "prompts")
    words = [f"{split['rows']:,} {noun}"]
    if "desirable" in split:
        words.append(f"{split['desirable']:,} desirable")
    if "steps" in split:
        words.append(f"{split['right_steps']:,} of {split['steps']:,} steps right")
    if details:
        words.append("mean tokens: " + ", ".join(f"{name} {mean:,.0f}" for name, mean in means.items()))
    if split.get("contradicting"):
        words.append(f"{split['contradicting']:,} contradicting")
    return words


class LiveMetrics:
    """Live display of a run, fed with the records of metrics.jsonl.

    On a terminal it is a progress bar with the latest numbers, redrawn in place; evaluations remain as lines above. In
    a log file it prints plain lines: the first and last step, every evaluation, and otherwise one every
    `every_seconds`.

    Args:
        console: where to print.
        total_steps: optimizer steps of the whole run.
        numbers: of its method.
        capacity_bytes: memory of the device, printed next to the peak.
        every_seconds: minimum time between plain lines, by the records' clock.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        numbers: Numbers,
        *,
        capacity_bytes: int | None = None,
        every_seconds: float = 10.0,
    ):
        self.console = console
        self.total_steps = total_steps
        self.method_numbers = numbers
        self.capacity_bytes, self.every_seconds = capacity_bytes, every_seconds
        self._paces: deque[tuple[float, float]] = deque(maxlen=20)  # seconds of a step, and of all in a record
        self._last_step = 0
        self._first_evaluation: Mapping[str, Any] | None = None
        self._printed_at = -math.inf
        self._shown: list[RenderableType] = []
        self._live = (
            Live(console=console, get_renderable=self._screen) if console.is_terminal and not console.is_dumb_terminal
            else None
        )  # fmt: skip
        self._wait = contextlib.ExitStack()

    def __enter__(self) -> LiveMetrics:
        if self._live:
            self._live.start()
        self._wait.enter_context(drawing_waits())
        self._wait.enter_context(waiting("the first step"))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._wait.close()
        if self._live:
            self._live.stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one record of metrics.jsonl, of kind train or eval; other kinds are ignored."""
        if record["kind"] == "eval":
            self.console.print(evaluation_line(record, self.method_numbers, self._first_evaluation))
            self._first_evaluation = self._first_evaluation or record
        elif record["kind"] == "train":
            steps = max(1, record["step"] - self._last_step) if self._last_step else 1
            self._paces.append((record["step_seconds"], steps * record["step_seconds"]))
            self._last_step = record["step"]
            if self._live:
                progress = Table.grid(padding=(0, 2))
                progress.add_row(
                    ProgressBar(total=self.total_steps, completed=record["step"], width=32),
                    f"step {record['step']}/{self.total_steps} · epoch {record['epoch']:.2f} · ETA {self._eta(record)}",
                )
                self._shown = [progress, Text(self._numbers(record))]
                self._live.refresh()
            else:
                self._print_plain(record)
            renew_wait(f"step {record['step'] + 1}")

    def _screen(self) -> Group:
        wait = spinner()
        return Group(*self._shown, *([] if wait is None else [wait]))

    def _print_plain(self, record: Mapping[str, Any]) -> None:
        now = record.get("time", time.time())
        if record["step"] >= self.total_steps or now - self._printed_at >= self.every_seconds:
            self._printed_at = now
            line = f"step {record['step']}/{self.total_steps} · {self._numbers(record)} · ETA {self._eta(record)}"
            self.console.print(Text(line), soft_wrap=True)

    def _metrics(self) -> list[Metric]:
        return [metric for metric in (*self.method_numbers.trained, *self.method_numbers.beside) if metric.brief]

    def _numbers(self, record: Mapping[str, Any]) -> str:
        capacity = f" of {size(self.capacity_bytes)}" if self.capacity_bytes else ""
        numbers = [f"{metric.label} {metric.shown(record)}" for metric in self._metrics()]
        if record.get("grad_norm") is not None:
            numbers.append(f"grad-norm {record['grad_norm']:.3g}")
        numbers.append(f"lr {record['learning_rate']:.2e}")
        numbers.append(f"{record['tokens_per_second']:,.0f} tok/s")
        if record.get("memory_bytes"):
            numbers.append(f"memory {size(record['memory_bytes'])}{capacity}")
        if "slowest_seconds" in record:
            numbers.append(f"processes {record['fastest_seconds']:.3g}–{record['slowest_seconds']:.3g} s")
        return " · ".join(numbers)

    def _eta(self, record: Mapping[str, Any]) -> str:
        """Return the remaining time at the recent pace, excluding evaluations and saves.

        The pace is the median over the last 30 seconds of steps, at least 3 records, so that a first step that compiles
        does not count, and changes in the machine's load show within that time.
        """
        recent: list[float] = []
        covered = 0.0
        for step_seconds, seconds in reversed(self._paces):
            if len(recent) >= 3 and covered >= RECENT_SECONDS:
                break
            recent.append(step_seconds)
            covered += seconds
        return duration((self.total_steps - record["step"]) * statistics.median(recent))


def evaluation_line(record: Mapping[str, Any], numbers: Numbers, first: Mapping[str, Any] | None = None) -> Text:
    """Describe an evaluation: step, held-out loss (and the first one), the method's other numbers, and time."""
    loss, *metrics = numbers.evaluated
    was = f" (from {loss.shown(first)} at step {first['step']})" if first else ""
    words = [f"step {record['step']}", f"{loss.label} {loss.shown(record)}{was}"]
    words += [f"{metric.label} {metric.shown(record)}" for metric in metrics]
    return Text.assemble(("eval ", "bold cyan"), " · ".join([*words, duration(record.get("seconds"))]))
