"""A board over made-up runs, in this process."""

import json

import pytest
from starlette.testclient import TestClient

from halfbyte.board.actions import Actions
from halfbyte.board.app import application
from halfbyte.board.folders import Runs, run_id
from tests.helpers.board_runs import document_line, write_run

TOKEN = "t" * 43
PORT = 8642
HOST = f"127.0.0.1:{PORT}"
ORIGIN = {"origin": f"http://{HOST}"}


class Pages:
    """Requests to a board."""

    def __init__(self, root, state, read_only=False, allowed=(), port=PORT):
        self.root = root
        actions = None if read_only else Actions(Runs([root]), list(allowed), state)
        self.app = application([root], TOKEN, port=port, actions=actions)
        self.client = TestClient(self.app, base_url=f"http://{HOST}", raise_server_exceptions=False)
        self.client.cookies.set(f"halfbyte-board-{PORT}", TOKEN)

    def number(self, name):
        return run_id(self.root / name)

    def get(self, path, **keys):
        return self.client.get(path, **keys)

    def page(self, path):
        response = self.get(path)
        assert response.status_code == 200, response.text
        return response.text

    def act(self, action, **fields):
        return self.client.post(f"/api/{action}", json=fields, headers=ORIGIN)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    folder = tmp_path / "state" / "queue"
    monkeypatch.setenv("HALFBYTE_QUEUE", str(folder))
    return folder


@pytest.fixture
def pages(tmp_path, queue):
    root = tmp_path / "runs"
    losses = [document_line("eval", 0, 2.0, 1.0, "seven", "a"), document_line("train", 3, 3.0, 2.9, "eleven", "b")]
    write_run(root / "first", row_losses_jsonl="".join(map(_json, losses)))
    samples = [{"kind": "sample", "step": step, "prompt": "Why?", "answer": f"at {step}"} for step in (0, 20, 40)]
    write_run(root / "grid" / "second", 90, r=16, samples_jsonl="".join(map(_json, samples)))
    return Pages(root, tmp_path / "state")


def _json(value):
    return json.dumps(value) + "\n"
