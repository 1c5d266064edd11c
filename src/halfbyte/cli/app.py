"""Commands and options. Each command imports its code when it runs, so that `halfbyte --help` is quick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..export.layouts import LAYOUTS
from ..utils.hardware import enable_expandable_segments, limit_primitive_caches
from ..utils.processes import LAUNCHER
from ..utils.versions import check_versions
from .arguments import check_option, check_order, check_sampling, finite, read_run
from .exits import RUN_FOLDER, Commands
from .queue import queue_app
from .startup import started

app = typer.Typer(
    cls=Commands,
    help="Fine-tune language models whose frozen weights are stored in 2 to 8 bits.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# `--learning_rate 1e-4` is an override like `learning_rate=1e-4`, so unknown options go to the overrides.
_TAKES_OVERRIDES = {"ignore_unknown_options": True}

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN.YAML | MODEL DATA | KEY=VALUE",
        help="the run's configuration, or a model and a dataset; and keys that override or extend the file",
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="keys that override the file")]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
LongestAnswer = Annotated[
    int | None,
    typer.Option(min=1, help="Longest answer, in tokens; default: 512, or as many as the model has positions for."),
]
TopK = Annotated[int, typer.Option(min=0, help="Draw among this many of the likeliest tokens; 0: all.")]
TopP = Annotated[
    float, typer.Option(callback=finite, min=1e-9, max=1.0, help="Draw among the likeliest tokens of this probability.")
]
MinP = Annotated[
    float,
    typer.Option(callback=finite, min=0.0, max=1.0, help="Draw among tokens this times as likely as the likeliest."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(callback=finite, min=0.01, max=100.0, help="Above 1: tokens that occurred become less likely."),
]
UpdateKept = Annotated[
    float | None,
    typer.Option(
        "--min-update-kept", callback=finite, min=0.0, max=1.0,
        help="Refuse to write a file that keeps a smaller share of the update, e.g. 0.99.",
    ),
]  # fmt: skip
RunOrModel = Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="a run's output_dir, an adapter, or a model")]


def _version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"halfbyte {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; allowed anywhere.")] = False,
) -> None:
    if ctx.invoked_subcommand != "env" and LAUNCHER not in os.environ:  # env prints first; the launcher has checked
        check_versions()
    enable_expandable_segments()
    limit_primitive_caches()


@app.command()
def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a model's folder or hub id")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="a dataset's file, folder or hub id")],
    method: Annotated[str, typer.Option(help="Training method: the key method.")] = "sft",
    teacher: Annotated[
        str | None, typer.Option(help="With gkd, a model or adapter: the key teacher_model_name_or_path.")
    ] = None,
) -> None:
    """Print a configuration for this machine."""
    from .init import starting_config

    check_order("init", model, data)
    typer.echo(starting_config(model, data, method, teacher), nl=False)


@app.command(context_settings=_TAKES_OVERRIDES)
def check(
    run: Words,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Plan for this number of GPUs, which need not be present.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(callback=finite, min=1.0, max=10_000.0, help="Memory of each of these GPUs, in GiB.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(callback=finite, min=0.0, help="Price of a GPU for an hour; prints that of the run.")
    ] = None,
) -> None:
    """Run all checks of train, without training."""
    config = read_run("check", run, ["--gpus", "--gpu-memory", "--price"])
    if gpus is not None or gpu_memory is not None:
        from .check import check_meshes

        return check_meshes(config, gpus, gpu_memory, price)
    from .check import check_run

    return check_run(config, price)


@app.command(context_settings=_TAKES_OVERRIDES)
def preview(
    run: Words,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Rows to show.")] = 3,
    rollouts: Annotated[
        int | None, typer.Option(min=1, help="Sample this number of answers per prompt, and show their rewards.")
    ] = None,
) -> None:
    """Show trained and masked tokens in colour."""
    config = read_run("preview", run, ["--count", "--rollouts"])
    if rollouts is not None:
        from .preview import preview_rollouts

        preview_rollouts(config, count, rollouts)
        return
    from .preview import preview_rows

    preview_rows(config, count)


@app.command(context_settings=_TAKES_OVERRIDES)
def train(
    ctx: typer.Context,
    run: Words,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print memory by part, versions and reasons.")] = False,
) -> None:
    """Fine-tune; all files go to output_dir."""
    from .train import train_run

    config = read_run("train", run, ["--resume", "--verbose"])
    ctx.meta[RUN_FOLDER] = config.output_path
    train_run(config, resume, ctx.obj, verbose)


@app.command()
def ps(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER…", help="folders with runs; default: the current one")
    ] = None,
) -> None:
    """List runs: state, step, process, error."""
    from .watch import print_runs

    print_runs(folders or [Path()])


@app.command()
def stop(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the output_dir of a run on this machine")],
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint of the last step.")] = False,
) -> None:
    """Save a checkpoint of a run, and end it."""
    from .watch import stop_run

    stop_run(run, now)


@app.command()
def board(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER…", help="folders with runs; default: the current one")
    ] = None,
    host: Annotated[str, typer.Option(help="Address of this machine to listen on: 127.0.0.1 or ::1.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8642,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show pages only; change nothing.")] = False,
    allow: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A further folder that new runs may name; may be repeated."),
    ] = None,
) -> None:
    """Show runs in a browser on this machine."""
    from .commands import show_board

    show_board(folders or [Path()], host, port, read_only, allow or [])


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the output_dir of a run")],
) -> None:
    """Name what to change in a run, and why."""
    from .watch import explain_run

    explain_run(run)


@app.command("eval", context_settings=_TAKES_OVERRIDES)
def evaluate(
    model: RunOrModel,
    data: Annotated[str, typer.Argument(metavar="DATA", help="a dataset's file, folder or hub id")],
    overrides: Overrides = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Print loss and perplexity on a dataset."""
    from .startup import import_models

    check_order("eval", model, data)
    for word in overrides or []:
        if word.startswith("--"):
            check_option(word, ["--trust-remote-code"])
    assignments = [*(overrides or []), *(["trust_remote_code=true"] if trust_remote_code else [])]
    with started(model, data):
        from ..runs.inputs import check_datasets
        from ..runs.saved import look_up

        check_datasets(data)
        look_up(model, assignments, data)
        import_models()
        from ..evaluation.held_out import evaluate as measure

        result = measure(model, data, assignments)
    measured = f"{result.tokens:,} tokens in {result.rows:,} rows · {result.seconds:.1f} s"
    typer.echo(f"{result.shown} · {measured} · {result.precision}")


@app.command()
def chat(
    model: RunOrModel,
    compare_base: Annotated[bool, typer.Option("--compare-base", help="Answer without the adapter as well.")] = False,
    max_new_tokens: LongestAnswer = None,
    temperature: Annotated[
        float, typer.Option(callback=finite, min=0.0, help="Sampling temperature; 0: the likeliest token.")
    ] = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    trust_remote_code: TrustCode = False,
) -> None:
    """Talk to a model; /reset starts over, /quit leaves."""
    check_sampling(temperature, top_k, top_p, min_p)
    with started(model):
        from ..runs.saved import look_up
        from .startup import import_models

        look_up(model, [f"trust_remote_code={trust_remote_code}"])
        import_models()
        from .answers import chat as talk

        talk(
            model,
            compare_base=compare_base,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            trust_remote_code=trust_remote_code,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )


@app.command()
def generate(
    model: RunOrModel,
    prompts: Annotated[Path, typer.Argument(metavar="PROMPTS", help="a text file, or .jsonl with prompt in each line")],
    max_new_tokens: LongestAnswer = None,
    temperature: Annotated[
        float, typer.Option(callback=finite, min=0.0, help="Sampling temperature; 0: the likeliest token.")
    ] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 8,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="An image to show before each prompt; may be repeated.")
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    trust_remote_code: TrustCode = False,
) -> None:
    """Answer the prompts of a file, as JSON lines."""
    check_sampling(temperature, top_k, top_p, min_p)
    draws = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    with started(model, prompts):
        from .answers import answer_file

        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "images": image or (), **draws}
        for line in answer_file(model, prompts, max_new_tokens, temperature, batch_size, **options):
            typer.echo(line)


@app.command()
def serve(
    model: RunOrModel,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines can reach it only with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A further adapter; may be repeated.")
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 2048,
    max_seconds: Annotated[
        float,
        typer.Option(
            callback=finite, min=0.1, help="Time limit of a request in seconds, including its time in the queue."
        ),
    ] = 300.0,
    max_queue: Annotated[int, typer.Option(min=0, help="Longest queue of requests; further ones get status 429.")] = 16,
    kv_cache: Annotated[
        str, typer.Option(metavar="auto|fp8|int4", help="What the KV cache stores; auto: the model's dtype.")
    ] = "auto",
    api_key: Annotated[
        str | None, typer.Option(envvar="HALFBYTE_API_KEY", metavar="KEY", help="Key that clients must send.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the key, which the list of processes does not show.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Host name of this server for clients; may be repeated.")
    ] = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Answer OpenAI's HTTP interface."""
    limits = {"prompt_tokens": max_prompt_tokens, "max_tokens": max_tokens, "seconds": max_seconds, "queue": max_queue}
    with started(model):
        from .commands import key_of, serve_model

        adapters, hosts = adapter or [], allowed_host or []
        api_key = key_of(api_key, api_key_file)
        serve_model(model, host, port, adapters, hosts, api_key, trust_remote_code, kv_cache, **limits)


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run's output_dir or an adapter")],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="new folder; default: RUN/merged")] = None,
    base: Annotated[str, typer.Option(metavar="auto|original|dequantized", help="Weights to merge onto.")] = "auto",
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"Format to store the linear layers in; default: 16 bits. For other tools: {', '.join(LAYOUTS)};"
            " for halfbyte: a format of quantization:, or PATTERN=FORMAT,PATTERN=FORMAT.",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Reload the merged model and compare logits.")] = True,
    min_update_kept: UpdateKept = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Write a merged model, in 16 bits or quantized."""
    with started(run, stderr=False):
        from .commands import merge_run

        merge_run(run, out, base, verify, quantize, trust_remote_code, min_update_kept)


@app.command()
def fit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run's output_dir, or one of its checkpoints")],
    to: Annotated[
        str, typer.Option("--to", metavar="BASE", help="q4_k_m, nf4, fp8, 16bit, …; or a checkpoint or GGUF file.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="New folder; default: RUN/adapter-BASE.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of the fitted adapter; default: the run's.")] = None,
    data: Annotated[str | None, typer.Option(metavar="DATA", help="Rows to read; default: the run's dataset.")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of these rows to read.")] = 16_384,
    trust_remote_code: TrustCode = False,
) -> None:
    """Fit an adapter to another base, without training."""
    with started(run, stderr=False):
        from .commands import fit_run

        fit_run(run, to, out, rank, data, tokens, trust_remote_code)


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run's output_dir or an adapter")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="merged models, adapters, GGUF files, Ollama Modelfiles")
    ],
    trust_remote_code: TrustCode = False,
) -> None:
    """Show how much of a run's training is in files made from it."""
    with started(run, stderr=False):
        from .commands import trace_files

        trace_files(run, files, trust_remote_code)


@app.command()
def mix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a 16-bit model's folder or hub id")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="calibration text: a dataset's file, folder or hub id")],
    bits: Annotated[
        float, typer.Option(callback=finite, min=1.0, max=16.0, help="Mean bits per weight, scales included.")
    ] = 4.5,
    formats: Annotated[str | None, typer.Option(help="Comma-separated candidates; default: all.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of DATA to measure on, and to hold out.")] = 8192,
) -> None:
    """Choose each layer's format within a memory budget."""
    from .commands import as_yaml, explain, mix_formats

    check_order("mix", model, data)
    mixture, losses = mix_formats(model, data, bits, formats, tokens)
    typer.echo(explain(mixture, losses), err=True)
    typer.echo(as_yaml(mixture), nl=False)


@app.command()
def export(
    source: RunOrModel,
    gguf: Annotated[str | None, typer.Option("--gguf", metavar="TYPE", help="f32, f16, bf16, q8_0, q4_k_m, …")] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="vllm", help="The adapter alone, for vLLM and SGLang.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file or folder; default: next to the model.")] = None,
    adapter_only: Annotated[bool, typer.Option("--adapter-only", help="The adapter, for a base in GGUF.")] = False,
    importance: Annotated[
        str | None,
        typer.Option("--importance", "--imatrix", metavar="TEXT|FILE", help="Calibration text, or an imatrix (.gguf)."),
    ] = None,
    min_update_kept: UpdateKept = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Write GGUF for llama.cpp, or adapters for vLLM."""
    with started(source, stderr=False):
        from .commands import export_for_servers, export_model

        if gguf is None or adapter is not None:
            values = {"--gguf": gguf, "--adapter-only": adapter_only, "--importance": importance}
            values |= {"--min-update-kept": min_update_kept is not None}
            flags = [name for name, value in values.items() if value]
            return export_for_servers(source, adapter, out, flags, trust_remote_code)
        export_model(source, gguf, out, adapter_only, importance, trust_remote_code, min_update_kept)


@app.command()
def env(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Print the kernel of each op, and why others cannot run it.")
    ] = (False),
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --kernels: another device, e.g. h100.")
    ] = None,
) -> None:
    """Print versions and hardware."""
    from .commands import print_environment, print_kernels

    if kernels or device:
        print_kernels(device)
    else:
        print_environment()
    check_versions()


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Argument(metavar="OUTPUT_DIR", help="folder of the run")] = Path("demo-out"),
) -> None:
    """Run everything on a small generated model."""
    from ..demo.run import main as run_demo

    run_demo(output_dir)


@app.command()
def schema() -> None:
    """Print the keys of a run as JSON Schema, for editors."""
    from .commands import print_schema

    print_schema()


app.add_typer(queue_app, name="queue")


@app.command("import-config")
def import_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a YAML file of Axolotl or LLaMA-Factory")],
) -> None:
    """Convert a YAML of Axolotl or LLaMA-Factory."""
    from .import_config import convert

    imported = convert(file)
    typer.echo(imported.explain(), err=True)
    typer.echo(imported.as_yaml(), nl=False)
