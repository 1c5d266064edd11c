"""A server that answers as vLLM 0.33 documents, from a tiny model in this process, with faults on demand.

It has two properties of vLLM's that cost runs their meaning: prefixes are cached by an adapter's name and the request's
salt, so that another adapter of that name answers as the former where the salt is the same; and an adapter that was
loaded in place is read again from its folder with each request.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

GONE = {"detail": "Not Found"}


def problem(message, kind="BadRequestError", code=400):
    return code, {"error": {"message": message, "type": kind, "param": None, "code": code}}


class FakeVllm:
    """`faults` are names of what goes wrong, `asked` the bodies of completions, `loads` those of adapters."""

    def __init__(self, folder, name=None, processed=False, faults=()):
        self.folder, self.name, self.processed, self.faults = folder, name or str(folder), processed, {*faults}
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.adapters, self.cached, self.level, self.loads, self.unloads = {}, {}, [], [], []
        self.longest, self.keys, self.most_rank, self.lock = 2048, set(), 16, threading.Lock()
        self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    # --- routes ------------------------------------------------------------------------------------------------------

    def get(self, path):
        if path == "/version":
            return 200, {"version": "0.33.0"}
        if path == "/v1/models" and "not vllm" not in self.faults:
            cards = [{"id": self.name, "object": "model", "root": self.name, "parent": None}]
            cards[0]["max_model_len"] = self.longest
            cards += [{"id": name, "object": "model", "parent": self.name} for name in self.adapters]
            return 200, {"object": "list", "data": cards}
        return 404, GONE

    def post(self, path, body):
        routes = {"/v1/completions": self.complete, "/detokenize": self.detokenize}
        if "no updating" not in self.faults:
            routes |= {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}
        return routes[path](body) if path in routes else (404, GONE)

    def detokenize(self, body):
        ids = [at ^ 1 for at in body["tokens"]] if "other vocabulary" in self.faults else body["tokens"]
        return 200, {"prompt": self.tokenizer.decode(ids)}

    def load(self, body):
        name, folder = body["lora_name"], Path(body["lora_path"])
        self.loads.append(body)
        if name in self.adapters and not body.get("load_inplace"):
            said = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
            return problem(f"{said} 'load_inplace' to True.", "InvalidUserInput")
        if not folder.is_absolute() or "another disk" in self.faults:
            return problem(f"Loading lora {name} failed: No adapter found for {folder}", "NotFoundError", 404)
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.most_rank:
            return problem(f"LoRA rank {rank} is greater than max_lora_rank {self.most_rank}.", code=500)
        if "deaf" not in self.faults or not self.loads[1:]:
            base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            self.adapters[name] = PeftModel.from_pretrained(base, folder).eval()
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body):
        name = body["lora_name"]
        self.unloads.append(name)
        if name not in self.adapters:
            return problem(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        if "keeps adapters" in self.faults:
            return problem(f"Failed to remove lora adapter '{name}' from the engine.", code=500)
        if "deaf" not in self.faults:
            del self.adapters[name]
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def complete(self, body):
        self.level.append(body)
        if "slow" in self.faults:
            time.sleep(1)
        with self.lock:
            model = self.base if body["model"] == self.name else self.adapters.get(body["model"])
            if model is None:
                return problem(f"The model `{body['model']}` does not exist.", "NotFoundError", 404)
            prefix = body["model"], body.get("cache_salt"), tuple(body["prompt"])
            model = self.cached.setdefault(prefix, model)
            return 200, {"choices": [self.choice(model, body, at) for at in range(body["n"])]}

    @torch.no_grad()
    def choice(self, model, body, at):
        draws, ids, logs, tops = torch.Generator().manual_seed(body["seed"] + at), [], [], []
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
            logits = model(torch.tensor([body["prompt"] + ids])).logits[0, -1].float()
            drawn_from = (logits / body["temperature"]).log_softmax(-1)
            known = drawn_from if self.processed else logits.log_softmax(-1)
            ids.append(int(torch.multinomial(drawn_from.exp(), 1, generator=draws)))
            logs.append(float(known[ids[-1]]))
            tops.append({str(ids[-1]): logs[-1], "likeliest": float(known.max())})
        ended = ids[-1] in body["stop_token_ids"]
        found = {"index": at, "text": self.tokenizer.decode(ids), "finish_reason": "stop" if ended else "length"}
        found["logprobs"] = {"token_logprobs": logs, "top_logprobs": tops if body["logprobs"] else [{}] * len(ids)}
        if "no ids" in self.faults:
            return found
        if "more tokens" in self.faults:
            ids = [*ids[:-1], 10**6]
        if "nan" in self.faults:
            logs[0] = float("nan")
        given = body["prompt"][1:] if "cuts prompts" in self.faults else body["prompt"]
        return found | {"token_ids": ids, "prompt_token_ids": given}


@contextmanager
def served(fake):
    """The address of a server of `fake`, until the end."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status, found):
            raw = (found if isinstance(found, str) else json.dumps(found)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def allowed(self):
            known = not fake.keys or self.headers.get("Authorization") in {f"Bearer {key}" for key in fake.keys}
            return known or self.answer(401, {"error": "Unauthorized"})

        def do_GET(self):
            if self.allowed():
                self.answer(*fake.get(self.path))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.allowed():
                self.answer(*fake.post(self.path, body))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
