"""A server with a tiny model for openai-python's own test suite, under the model names that it uses.

    python -m tests.helpers.openai_calls [--port 8917]
    pip download --no-deps --no-binary openai openai==3.54.0     # its tests come with its source
    TEST_API_BASE_URL=http://127.0.0.1:8917/v1 pytest -o addopts= tests/api_resources/test_models.py \
        tests/api_resources/test_completions.py tests/api_resources/chat

The calls name a stored chat and a fine-tuned model that nobody has made, so before each of those there is one. The
stored chat's message is an assistant's, the only role that the client's types let a stored message have.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.types import Receive, Scope, Send

from halfbyte.adapters.lora import load_adapter
from halfbyte.serve.app import Endpoints, application
from halfbyte.serve.model import Served, load
from halfbyte.serve.requests import ChatRequest

CHAT, TUNED = "completion_id", "ft:gpt-4o-mini:acemeco:suffix:abc123"
NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "gpt-4o-mini", TUNED)
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def served(place: Path) -> tuple[Served, Path]:
    """A tiny model, its adapter by all the names; and the adapter's folder."""
    import serve_tiny as tiny

    torch.manual_seed(0)
    tokenizer: Any = tiny.byte_tokenizer()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tiny.random_model(tokenizer).save_pretrained(place / "tiny")
    tokenizer.save_pretrained(place / "tiny")
    adapter = tiny.random_adapter(place / "tiny", place / "adapter", 1)
    return load(str(place / "tiny"), {name: str(adapter) for name in NAMES}), adapter


def seeded(endpoints: Endpoints, adapter: Path) -> Any:
    """The application, with the chat and the model that a call names."""
    inner, chats, model = application(endpoints), endpoints.chats, endpoints.served
    request = ChatRequest.model_validate({"model": NAMES[0], "messages": [{"role": "assistant", "content": "a"}]})
    message = {"index": 0, "message": {"role": "assistant", "content": "b"}, "logprobs": None, "finish_reason": "stop"}
    answer = {"id": CHAT, "object": "chat.completion", "created": 1, "model": NAMES[0], "choices": [message]}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if f"/{CHAT}" in path and CHAT not in chats.chats:
            chats.add(request, answer)
        if path.endswith(TUNED) and TUNED not in model.names:
            model.names[TUNED] = "again"
            model.saved.model = load_adapter(model.saved.model, adapter, model.saved.config.model_name_or_path, "again")
        await inner(scope, receive, send)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8917)
    port = parser.parse_args().port
    with tempfile.TemporaryDirectory() as folder:
        model, adapter = served(Path(folder))
        uvicorn.run(seeded(Endpoints(model), adapter), port=port, log_level="error", lifespan="off")


if __name__ == "__main__":
    main()
