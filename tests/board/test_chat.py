"""The page Chat and its engine, on a tiny model."""

import json
import time

import pytest
import torch

from halfbyte.board import chat
from halfbyte.config import RunConfig, dump_config
from tests.board.conftest import Pages
from tests.helpers.board_runs import write_run
from tests.helpers.serve_tiny import byte_tokenizer, random_adapter, random_model

ASK = {"messages": json.dumps([{"role": "user", "content": "What?"}]), "temperature": "0.9", "max_tokens": "8"}


@pytest.fixture
def talkers(tmp_path, queue):
    """A board over two runs with adapters of one base."""
    torch.manual_seed(0)
    root, base = tmp_path / "runs", tmp_path / "tiny"
    tokenizer = byte_tokenizer()
    random_model(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    for seed, name in enumerate(("poet", "clerk")):
        config = RunConfig(model_name_or_path=str(base), dataset="data.jsonl", output_dir=str(root / name))
        run = write_run(root / name, config_resolved_yaml=dump_config(config))
        random_adapter(base, run / "adapter", seed)
    board = Pages(root, tmp_path / "state")
    yield board
    board.app.state.board.actions.engines.stop()


def test_the_page_offers_runs_with_weights_and_their_command(pages):
    assert "has weights" in pages.page("/chat")
    (pages.root / "first" / "adapter").mkdir()
    html = pages.page(f"/chat?run={pages.number('first')}")
    assert f"halfbyte serve {pages.root / 'first'}" in html
    assert "chat-start" in html


def test_the_page_offers_complete_checkpoints(pages):
    run, number = pages.root / "first", pages.number("first")
    assert "chat-start" not in pages.page(f"/chat?run={number}")
    for step in (4, 12):
        (run / f"checkpoint-{step}").mkdir()
        (run / f"checkpoint-{step}" / "manifest.json").write_text("{}")
    (run / "checkpoint-20").mkdir()  # it is being written
    assert f"halfbyte serve {run / 'checkpoint-12'}" in pages.page(f"/chat?run={number}")
    html = pages.page(f"/chat?run={number}&step=4&with={number}:12")
    assert f"halfbyte serve {run / 'checkpoint-4'} --adapter first-checkpoint-12={run / 'checkpoint-12'}" in html
    assert "step 20" not in html
    for address in (f"run={number}&step=20", f"run={number}&with={number}:20", f"run={number}&step=x"):
        assert pages.client.get(f"/chat?{address}").status_code == 404
    assert pages.act("chat-start", run=number, step="20").status_code == 400


@pytest.mark.parametrize("fields", [{}, ASK, {**ASK, "messages": "[" * 100_000}])
def test_without_an_engine_nothing_is_answered(pages, fields):
    assert pages.act("chat", model="first", **fields).status_code == 400
    assert pages.act("chat-start", run=pages.number("first")).status_code == 400  # it has no weights


def engine_of(board):
    return board.app.state.board.actions.engines.engine


def until(board, state):
    deadline = time.monotonic() + 120
    while engine_of(board).state != state:
        assert time.monotonic() < deadline, engine_of(board).lines
        assert engine_of(board).state != "ended", engine_of(board).lines
        time.sleep(0.1)


@pytest.mark.slow
def test_two_adapters_answer_at_once_and_the_engine_leaves_when_idle(talkers, monkeypatch):
    chosen = {"run": talkers.number("poet"), "with": talkers.number("clerk")}
    assert talkers.act("chat-start", **chosen).status_code == 200
    assert "loading" in talkers.page(f"/chat?run={chosen['run']}&with={chosen['with']}")
    until(talkers, "ready")
    html = talkers.page(f"/chat?run={chosen['run']}&with={chosen['with']}")
    assert 'data-model="poet"' in html
    assert 'data-model="clerk"' in html

    def answer(model, seed):
        response = talkers.act("chat", model=model, seed=seed, **ASK)
        assert response.status_code == 200, response.text
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert events[-1]["usage"]["completion_tokens"] > 0
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])

    assert answer("poet", "1") == answer("poet", "1")
    assert len({answer(model, "1") for model in ("poet", "clerk", "tiny")}) == 3
    assert talkers.act("chat", model="nobody", **ASK).status_code == 400
    assert talkers.act("chat", model="poet", **ASK | {"max_tokens": "1e9"}).status_code == 400
    monkeypatch.setattr(chat, "IDLE_SECONDS", 0.5)
    until(talkers, "ended")
    assert engine_of(talkers).process.wait(30) is not None
    assert talkers.act("chat", model="poet", **ASK).status_code == 400


@pytest.mark.slow
def test_a_checkpoint_answers_beside_the_trained_weights(talkers):
    run = talkers.root / "poet"
    random_adapter(talkers.root.parent / "tiny", run / "checkpoint-4", 7)
    (run / "checkpoint-4" / "manifest.json").write_text("{}")
    number = talkers.number("poet")
    assert talkers.act("chat-start", run=number, step="4", **{"with": number}).status_code == 200
    until(talkers, "ready")
    html = talkers.page(f"/chat?run={number}&step=4&with={number}")
    answers = [talkers.act("chat", model=name, seed="1", **ASK).text for name in ("checkpoint-4", "poet")]
    assert all(f'data-model="{name}"' in html for name in ("checkpoint-4", "poet"))
    assert all('"content"' in answer for answer in answers)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_not_loaded(talkers):
    memory = {"device": "cpu", "predicted": {"weights": 2**50, "adapters": 0}}
    (talkers.root / "poet" / "memory.json").write_text(json.dumps(memory))
    assert talkers.act("chat-start", run=talkers.number("poet")).status_code == 200
    until(talkers, "ended")
    assert "1,048,577 GiB" in talkers.page(f"/chat?run={talkers.number('poet')}")
