"""Access to the board and what it changes: the token, other pages, read-only boards, notes, the trash, the queue."""

import json
import os

import pytest
from starlette.testclient import TestClient

from halfbyte.board import actions
from halfbyte.board.guard import load_token
from halfbyte.board.run import serve_board
from halfbyte.runs.lock import run_lock
from halfbyte.runs.queue import Queue
from halfbyte.utils.errors import ConfigError
from tests.board.conftest import HOST, ORIGIN, PORT, TOKEN, Pages
from tests.helpers.board_runs import status, write_run

JSON = {"content-type": "application/json"}


def stranger(pages, **headers):
    return TestClient(pages.app, base_url=f"http://{HOST}", headers=headers, raise_server_exceptions=False)


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(pages):
    client = stranger(pages)
    assert client.get("/").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    entered = client.get(f"/?token={TOKEN}")
    assert entered.status_code == 200
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/compare", "/queue", "/new", "/run/0123456789ab", "/nothing", "/api/stop"])
def test_nothing_is_read_without_the_token(pages, path):
    response = stranger(pages).get(path)
    assert response.status_code == 401
    assert "first" not in response.text


def test_the_tokens_file_is_only_the_users(tmp_path):
    token = load_token(tmp_path / "state")
    assert len(token) >= 43
    assert load_token(tmp_path / "state") == token
    path = tmp_path / "state" / "board.token"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"board\.token"):
        load_token(tmp_path / "state")


@pytest.mark.parametrize("host", ["evil.example:8642", "127.0.0.1.evil.example", "", "[::1", "a@localhost"])
def test_other_names_are_refused(pages, host):
    assert pages.get("/", headers={"host": host}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        JSON,  # no origin
        {**JSON, "origin": "http://evil.example"},
        {**JSON, "origin": "null"},
        {**JSON, "origin": f"http://127.0.0.1:{PORT + 1}"},
        {**JSON, "origin": f"http://localhost:{PORT}"},
        {**JSON, **ORIGIN, "sec-fetch-site": "cross-site"},
        {**JSON, **ORIGIN, "sec-fetch-site": "same-site"},
        {**ORIGIN, "content-type": "text/plain"},
        {**ORIGIN, "content-type": "application/x-www-form-urlencoded"},
    ],
)
def test_writes_of_other_pages_are_refused(pages, headers):
    body = json.dumps({"run": pages.number("first"), "text": "evil"})
    assert pages.client.post("/api/notes", content=body, headers=headers).status_code == 403
    assert not (pages.root / "first" / "notes.json").exists()


def test_every_response_has_the_policy(pages):
    for path in ("/", "/static/board.js", "/nothing", f"/run/{pages.number('first')}"):
        headers = pages.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe-inline" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert pages.get("/").headers["cache-control"] == "no-store"


def test_notes_are_saved_in_the_run_and_hide_it(pages):
    answer = pages.act("notes", run=pages.number("first"), text="the good one", tags="a, b,", hidden="")
    assert answer.status_code == 200
    notes = json.loads((pages.root / "first" / "notes.json").read_text())
    assert notes == {"text": "the good one", "tags": ["a", "b"], "hidden": False}
    assert "first</a>" in pages.page("/?tag=a")
    assert "first</a>" not in pages.page("/?tag=c")
    assert pages.act("notes", run=pages.number("first"), hidden="1").status_code == 200
    assert "first</a>" not in pages.page("/")
    assert "first</a>" in pages.page("/?hidden=1")
    assert pages.act("notes", run=pages.number("first"), text="x" * 30_000).status_code == 400


def test_a_run_is_moved_into_the_trash_and_never_deleted(pages):
    assert pages.act("trash", run=pages.number("first")).status_code == 200
    (moved,) = (pages.root / ".halfbyte-trash").iterdir()
    assert (moved / "metrics.jsonl").exists()
    assert not (pages.root / "first").exists()
    assert "first</a>" not in pages.page("/")


def test_a_run_that_runs_is_not_moved(pages):
    write_run(pages.root / "live", status_json=status("training"))
    pages.page("/")
    answer = pages.act("trash", run=pages.number("live"))
    assert answer.status_code == 400
    assert "training" in answer.json()["message"]
    with run_lock(pages.root / "first"):
        assert pages.act("trash", run=pages.number("first")).status_code == 400
    assert (pages.root / "live" / "metrics.jsonl").exists()
    assert (pages.root / "first" / "metrics.jsonl").exists()


def test_a_read_only_board_changes_nothing_and_has_no_buttons(pages, tmp_path):
    board = Pages(pages.root, tmp_path / "state", read_only=True)
    for action in actions.ACTIONS:
        assert board.act(action, run=board.number("first")).status_code == 403
    for path in ("/", f"/run/{board.number('first')}", "/queue", "/new"):
        assert "data-post" not in board.page(path)


def test_stop_runs_the_command_with_the_folder_as_one_argument(pages, monkeypatch):
    asked = []
    monkeypatch.setattr(actions.Actions, "command", lambda _, *words, **keys: asked.append(words) or "stopped")
    assert pages.act("stop", run=pages.number("first"), now="1").json()["message"] == "stopped"
    assert asked == [("stop", str(pages.root / "first"), "--now")]


def test_a_command_that_fails_says_so(pages, monkeypatch):
    monkeypatch.setattr(actions, "ANSWER_SECONDS", 200.0)
    answer = pages.act("stop", run=pages.number("first"))
    assert answer.status_code == 400
    assert "finished" in answer.json()["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"run": 1}', b"[" * 100_000, b'{"a": "' + b"x" * 300_000 + b'"}'])
def test_malformed_requests_are_refused(pages, body):
    response = pages.client.post("/api/notes", content=body, headers={**JSON, **ORIGIN})
    assert response.status_code in (400, 413)
    assert pages.act("nothing").status_code == 404
    assert pages.act("notes", run="000000000000").status_code == 404
    assert pages.act("notes").status_code == 400


# --- the queue and new runs ------------------------------------------------------------------------------------------


def add_jobs(queue, folder, count=2):
    job = {"command": ["-c", ""], "folder": str(folder), "keys": "r=8", "file": "", "planned": 2**30, "on_gpu": 0}
    return Queue(queue).add([{**job, "output": str(folder / f"out{at}")} for at in range(count)])


def test_the_queue_is_shown_and_changed(pages, queue, tmp_path):
    assert not queue.exists()
    assert "empty" in pages.page("/queue")
    assert not queue.exists()  # looking makes no queue
    first, second = add_jobs(queue, tmp_path)
    html = pages.page("/queue")
    assert "out0" in html
    assert "1.0 GiB" in html
    assert pages.act("queue-move", job=str(second), place="1").status_code == 200
    assert [job.id for job in Queue(queue).jobs()] == [second, first]
    assert pages.act("queue-remove", job=str(first)).status_code == 200
    assert [job.id for job in Queue(queue).jobs()] == [second]
    for fields in ({}, {"job": "x"}, {"job": "-1"}, {"job": "99"}):
        assert pages.act("queue-remove", **fields).status_code == 400


def new_run(pages, **changed):
    values = {"model_name_or_path": pages.root / "model", "dataset": pages.root / "data.jsonl"}
    values |= {"output_dir": pages.root / "new", **changed}
    return "".join(f"{key}: {value}\n" for key, value in values.items())


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"trust_remote_code": "true"}, "trust_remote_code"),
        ({"output_dir": "/tmp/elsewhere"}, "output_dir"),
        ({"dataset": "/etc/passwd"}, "dataset"),
        ({"dataset": "../outside.jsonl"}, "dataset"),
        ({"dataset": "[{path: /etc/passwd}]"}, "dataset"),
        ({"model_name_or_path": "~/model"}, "model_name_or_path"),
        ({"adapter_path": "/srv/adapter"}, "adapter_path"),
        ({"chat_template_path": "/srv/template"}, "chat_template_path"),
        ({"method": "grpo", "per_device_train_batch_size": 8, "reward_funcs": "[/srv/evil.py:run]"}, "reward_funcs"),
        ({"push_to_hub": "true"}, "push_to_hub"),
        ({"no_such_key": "1"}, "no_such_key"),
        ({"r": "many"}, "r"),
    ],
)
def test_new_runs_cannot_leave_the_folders_or_run_code(pages, monkeypatch, changed, key):
    monkeypatch.setattr(actions.Actions, "command", lambda *_, **__: pytest.fail("it was run"))
    for action in ("check", "queue-add", "start"):
        answer = pages.act(action, keys=new_run(pages, **changed))
        assert answer.status_code == 400
        assert key in answer.json()["message"]


def test_a_new_run_is_checked_compared_and_queued(pages, monkeypatch):
    asked = []
    monkeypatch.setattr(actions.Actions, "command", lambda _, *words, **keys: asked.append(words) or "fits")
    (pages.root / "first" / "run.yaml").write_text(new_run(pages, r=4))
    page = pages.page(f"/new?from={pages.number('first')}")
    assert "r: 4" in page
    assert "learning_rate" in page
    answer = pages.act("check", run=pages.number("first"), keys=new_run(pages, r=8))
    assert answer.status_code == 200, answer.text
    assert "r: 4 → 8" in answer.json()["message"]
    assert "fits" in answer.json()["message"]
    assert pages.act("queue-add", keys=new_run(pages)).json()["location"] == "/queue"
    assert pages.act("start", keys=new_run(pages)).status_code == 200
    assert [words[:2] for words in asked][1:] == [("queue", "add"), ("queue", "add"), ("queue", "run")]
    assert os.path.isfile(asked[1][2])


def test_folders_that_are_allowed_may_be_named(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(actions.Actions, "command", lambda *_, **__: "fits")
    (tmp_path / "data").mkdir()
    keys = new_run(pages, dataset=tmp_path / "data" / "rows.jsonl")
    assert pages.act("check", keys=keys).status_code == 400
    board = Pages(pages.root, tmp_path / "state", allowed=[tmp_path / "data"])
    assert board.act("check", keys=keys).status_code == 200
    assert (
        board.act("check", keys=new_run(pages, dataset="org/rows", model_name_or_path="org/model")).status_code == 200
    )


def test_other_machines_and_missing_folders_are_refused(tmp_path, queue):
    with pytest.raises(ConfigError, match="--host"):
        serve_board([tmp_path], "0.0.0.0", 0, False, [])
    with pytest.raises(ConfigError, match="is not a folder"):
        serve_board([tmp_path / "none"], "127.0.0.1", 0, False, [])
