"""Memory of `halfbyte serve` over many requests of random lengths, some at a time.

    python -m benchmarks.serve_soak [--requests 10000] [--at-once 50] [--json FILE]

A tiny model with a tokenizer of bytes; chats and completions, streamed and whole, of one and of several prompts, some
kept, echoed or with penalties, and some that are refused or left by their client. The server runs in a process of its
own; its resident memory is read between requests. It levels off if it stays within a few percent of what it was after
the first 500.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

CONTEXT, SETTLED, SAMPLE = 512, 500, 100
LONGEST = 3600  # seconds that a request may take: on a busy machine nothing is given up
JSON = {"content-type": "application/json"}


def tiny_model(folder: Path) -> None:
    """A Llama of random weights, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=fast.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def request_of(chance: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A path and a body; about one in twenty asks for what is refused."""
    body: dict[str, Any] = {"model": model, "max_tokens": chance.randint(1, 24), "stream": chance.random() < 0.3}
    body |= {"temperature": chance.choice([0, 1]), "n": chance.choice([1, 1, 1, 2])}
    if chance.random() < 0.05:
        body["max_tokens"] = chance.choice([-5, 10**9, "many"])
    length = chance.randint(1, CONTEXT - 64)
    if chance.random() < 0.5:
        messages = [{"role": "user", "content": "x" * length}]
        more = {"logprobs": chance.random() < 0.2, "store": chance.random() < 0.3}
        return "/v1/chat/completions", body | {"messages": messages} | more
    prompts = ["x" * chance.randint(1, length) for _ in range(chance.choice([1, 1, 1, 2, 5]))]
    more = {"echo": chance.random() < 0.2, "logprobs": chance.choice([None, None, None, 2])}
    more["presence_penalty"] = chance.choice([0, 0, 0, 0.5])
    return "/v1/completions", body | {"prompt": prompts} | more


def ask(port: int, path: str, body: dict[str, Any], leave: bool) -> int:
    """The status of an answer, which is read to its end, or to its beginning if the client is to `leave`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), JSON)
        if leave:
            return 0
        answer = connection.getresponse()
        answer.read()
        return answer.status


def resident(pid: int) -> int:
    """Bytes of a process's resident memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def soak(server: subprocess.Popen[str], port: int, model: str, requests: int, at_once: int) -> dict[str, Any]:
    """Ask; resident memory at the start and after every `SAMPLE` requests, statuses, and seconds."""
    chance, lock = random.Random(0), threading.Lock()
    memory, statuses, begun = [resident(server.pid)], Counter[int](), 0

    def client() -> None:
        nonlocal begun
        while True:
            with lock:
                if begun == requests:
                    return
                begun += 1
                asked, leave = request_of(chance, model), chance.random() < 0.02
            status = ask(port, *asked, leave)
            with lock:
                statuses[status] += 1
                if (done := sum(statuses.values())) % SAMPLE == 0:
                    memory.append(resident(server.pid))
                    print(f"{done:6} requests, {memory[-1] / 2**20:7.1f} MiB", file=sys.stderr, flush=True)

    began = time.perf_counter()
    clients = [threading.Thread(target=client) for _ in range(at_once)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    settled = memory[SETTLED // SAMPLE]
    return {
        "requests": requests,
        "at_once": at_once,
        "seconds": time.perf_counter() - began,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "mib": [round(each / 2**20, 1) for each in memory],
        "sampled_every": SAMPLE,
        f"growth_after_{SETTLED}": max(memory[SETTLED // SAMPLE :]) / settled - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--json", help="where to write the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        tiny_model(model)
        words = ["serve", str(model), "--port", "0", "--max-queue", str(given.at_once), "--max-seconds", str(LONGEST)]
        server = subprocess.Popen([sys.executable, "-m", "halfbyte", *words], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", server.stdout.readline())
            assert found, "the server did not start"
            result = soak(server, int(found[1]), "tiny", given.requests, given.at_once)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    print(json.dumps(result, indent=1))
    from benchmarks.common import cpu_name, write_result

    write_result(given.json, {"device": cpu_name(), **result})


if __name__ == "__main__":
    main()
