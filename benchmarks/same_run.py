"""One run on one GPU and on several, through `halfbyte train`: the difference of losses, step by step.

    python -m benchmarks.same_run [WAY…] [--steps 50] [--gpus 2] [--json FILE] [--device cpu --hidden 128]

A Llama of 0.16B in NF4 with random weights, which learns fast, so that differences show: packed rows of 512 tokens in
bfloat16. A WAY is an axis of `parallel` that takes all GPUs, several with their degrees (`data=2,shard=2`), or
`kernels`: one GPU with transformers' operations instead of the fused ones, which shows the effect of another order of
roundings without any parallelism.

`hosts-WAY` is a way on `--hosts` hosts, emulated by as many torchrun agents: `NCCL_HOSTID` makes NCCL use the loopback
device between them, whose bytes are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import parser_of, write_result

VOCABULARY, WORDS = 2048, 600
WAYS = ("kernels", "data", "shard", "tensor", "pipeline", "context")
WINDOW = 4  # micro-batches per step on one GPU


def write_place(folder: Path, hidden: int, layers: int = 12, texts: int = 3000) -> None:
    """Write a checkpoint with a tokenizer to `model`, and rows of random words to `data.jsonl`."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(WORDS)]
    rows = [" ".join(drawn.choices(words[: 20 + n % 60], k=drawn.randint(20, 200))) for n in range(texts)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(rows, vocab_size=VOCABULARY, special_tokens=["</s>", "<pad>"], show_progress=False)
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names).save_pretrained(folder / "model")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    ))  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    lines = ({"prompt": text[:40], "completion": text[40:]} for text in rows)
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def degrees(way: str, gpus: int) -> dict[str, int]:
    """Return the degree of each axis of a WAY; an axis without one takes all GPUs."""
    pairs = (axis.partition("=") for axis in way.split(","))
    return {axis: int(degree or gpus) for axis, _, degree in pairs}


def losses(given: argparse.Namespace, way: str) -> tuple[list[float], dict[str, Any]]:
    """Return the loss of each step and the traffic between hosts."""
    output, hosts = given.work / f"run-{way}", way.startswith("hosts-")
    ways = degrees(way.removeprefix("hosts-"), given.gpus)
    if way in ("alone", "kernels"):
        keys = {"use_kernels": str(way == "alone").lower()}
        command = train_command(given, output, None, WINDOW, save_steps=100000, **keys)
    else:
        rows = WINDOW // (ways.get("data", 1) * ways.get("shard", 1))
        command = train_command(given, output, ways, rows, save_steps=100000)
    began, seen = time.perf_counter(), dict[str, Any]()
    if hosts:
        seen = on_hosts(command, output, given)
    else:
        ran = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"{way}: exit {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    print(f"{way}: {time.perf_counter() - began:.0f} s {seen or ''}", flush=True)
    return [record["loss"] for record in trained(output)], seen


def train_command(
    given: argparse.Namespace, output: Path, ways: dict[str, int] | None, rows: int, **more: Any
) -> list[str]:
    """Return the arguments of python that train on the files of `write_place`.

    Args:
        given: the options `work`, `steps`, `rate` and `device`.
        ways: degree of each axis; None: one device.
        rows: gradient_accumulation_steps.
        more: further keys of the configuration.
    """
    keys: dict[str, Any] = {
        "output_dir": output, "packing": "true", "max_length": 512, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": rows, "max_steps": given.steps, "learning_rate": given.rate, "seed": 0,
        "logging_steps": 1, "sample_prompts": 0, "eval_split_size": 0, "dtype": "bfloat16",
    }  # fmt: skip
    if given.device == "cpu":
        keys["device"] = "cpu"
    elif ways is None:
        keys["device"] = "cuda:0"
    if ways is not None:
        keys["parallel"] = json.dumps(ways)
    command = ["-m", "halfbyte", "train", str(given.work / "model"), str(given.work / "data.jsonl")]
    return [*command, *(f"{key}={value}" for key, value in (keys | more).items())]


def trained(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps so far."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["kind"] == "train"]


def on_hosts(command: list[str], output: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run a program on emulated hosts. Returns the bytes per step between them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    each = given.gpus // given.hosts
    meeting = ["--nnodes", str(given.hosts), "--nproc-per-node", str(each), "--master-addr", "127.0.0.1"]
    agents = []
    for host in range(given.hosts):
        own = {"NCCL_HOSTID": f"host{host}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        gpus = map(str, range(host * each, (host + 1) * each))
        own |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "NCCL_IB_DISABLE": "1"}
        place = [*meeting, "--master-port", str(port), "--node-rank", str(host)]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *place, *command], env=os.environ | own,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    samples: dict[int, int] = {}  # recorded steps → loopback bytes at that time
    while any(agent.poll() is None for agent in agents):
        samples.setdefault(len(trained(output)), loopback_bytes())
        time.sleep(0.02)
    for host, agent in enumerate(agents):
        said = agent.communicate()[0]
        if agent.returncode:
            raise SystemExit(f"host {host}: exit {agent.returncode}\n{said[-3000:]}")
    from safetensors.torch import load_file

    numbers = sum(tensor.numel() for tensor in load_file(output / "adapter" / "adapter_model.safetensors").values())
    steps = sorted(at for at in samples if at >= 2)
    first, last = steps[0], steps[-1]
    sent = (samples[last] - samples[first]) / (last - first)
    return {"bytes_of_a_step": sent, "gradients": 4 * numbers, "of_both_ways": sent / (8 * numbers)}


def loopback_bytes() -> int:
    """Return the bytes that the loopback device has received."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("ways", nargs="*", default=WAYS)
    made.add_argument("--steps", type=int, default=50)
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--hosts", type=int, default=2)
    made.add_argument("--rate", type=float, default=2e-4)
    made.add_argument("--hidden", type=int, default=1024)
    made.add_argument("--device", default="cuda")
    made.add_argument("--work", type=Path, default=Path("/tmp/same-run"))
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    write_place(given.work, given.hidden)
    found: dict[str, Any] = {"alone": {"losses": losses(given, "alone")[0]}}
    for way in given.ways:
        own, seen = losses(given, way)
        apart = [abs(one / other - 1) for one, other in zip(own, found["alone"]["losses"], strict=True)]
        found[way] = {"losses": own, "first_apart": apart[0], "most_apart": max(apart), **seen}
        print(f"  first step {apart[0]:.1e} apart, the farthest {max(apart):.1e}", flush=True)
        keys = {"steps": given.steps, "gpus": given.gpus, "learning_rate": given.rate, "hidden": given.hidden}
        write_result(given.json, {**keys, "runs": found})


if __name__ == "__main__":
    main()
