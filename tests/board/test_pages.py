"""Pages of the board: what they show, and that damaged or hostile runs neither break nor inject anything."""

import json
import math
import os
import re
import threading
from html import escape

import pytest

from halfbyte.board import app, folders
from halfbyte.board.curves import Line, chart, reduced
from halfbyte.board.series import MetricsFile, glance
from tests.board.conftest import Pages
from tests.helpers.board_runs import eval_record, lost_process, status, train_record, write_run

ATTACK = '<script>alert("x")</script>'


def test_the_list_shows_each_run_with_its_numbers(pages):
    html = pages.page("/")
    assert "first" in html
    assert "grid/second" in html
    assert "tiny-model, sft" in html
    assert html.count('class="spark"') == 2
    assert "1.3" in html  # held-out loss


@pytest.mark.parametrize(
    ("query", "names"),
    [("q=second", {"second"}), ("q=r: 8", {"first"}), ("state=finished", {"first", "second"}), ("state=failed", set())],
)
def test_the_list_is_searched(pages, query, names):
    html = pages.page(f"/?{query.replace('r: 8', 'first')}")
    assert {name for name in ("first", "second") if f"{name}</a>" in html} == names


def test_a_killed_run_is_lost_and_a_failed_one_says_why(tmp_path, queue):
    root = tmp_path / "runs"
    write_run(root / "killed", status_json=status("training", **lost_process()))
    write_run(root / "failed", status_json=status("failed", error="loss is NaN"))
    html = Pages(root, tmp_path).page("/")
    assert 'class="state lost"' in html
    assert "loss is NaN" in html


def test_a_run_shows_curves_and_sections_of_its_report(pages):
    html = pages.page(f"/run/{pages.number('first')}")
    assert html.count('class="chart"') >= 5
    for words in (
        "Training loss",
        "held out",
        "What stands out",
        "two by 8",
        "config.resolved.yaml",
        "halfbyte explain",
    ):
        assert words in html
    assert "style=" not in html.replace('rel="stylesheet"', "")


def test_answers_are_shown_by_step(pages):
    html = pages.page(f"/run/{pages.number('grid/second')}")
    assert [html.index(f"at {step}") for step in (0, 20, 40)] == sorted(
        html.index(f"at {step}") for step in (0, 20, 40)
    )


@pytest.mark.parametrize("axis", ["step", "tokens", "time", "epoch", "nonsense"])
def test_curves_have_axes_ranges_and_scales(pages, axis):
    path = f"/run/{pages.number('first')}?x={axis}&log=1&raw=1&from=0&to=nan"
    assert 'class="chart"' in pages.page(path)


def test_two_runs_are_compared(pages):
    numbers = [pages.number("first"), pages.number("grid/second")]
    query = "&".join(f"run={number}" for number in numbers)
    html = pages.page(f"/compare?{query}")
    assert "<code>r</code>" in html
    assert "two by 16" in html
    assert "not on one axis" not in html
    markdown = pages.get(f"/compare?{query}&format=md")
    assert markdown.headers["content-type"].startswith("text/markdown")
    assert "| grid/second |" in markdown.text
    saved = pages.get(f"/compare?{query}&format=html")
    assert "<script" not in saved.text
    assert "<link" not in saved.text


def test_losses_on_different_held_out_data_are_not_on_one_axis(pages):
    write_run(pages.root / "third", environment_json={"inputs": {"eval_dataset": "another"}})
    query = "&".join(f"run={pages.number(name)}" for name in ("first", "third"))
    html = pages.page(f"/compare?{query}")
    assert "not on one axis" in html
    assert "data 2 of 2" in html


def test_documents_are_sorted_and_filtered_by_their_losses(pages):
    path = f"/run/{pages.number('first')}/data"
    html = pages.page(path)
    assert html.index("eleven") < html.index("seven")  # by the loss after training
    html = pages.page(f"{path}?sort=learned")
    assert html.index("seven") < html.index("eleven")
    assert "eleven" not in pages.page(f"{path}?split=eval")
    assert "seven" not in pages.page(f"{path}?q=eleven&min=6&max=99")
    assert "<b>seven</b>" in html


def test_a_page_is_sent_again_only_if_a_file_has_changed(pages):
    path = f"/run/{pages.number('first')}"
    etag = pages.get(path).headers["etag"]
    assert pages.get(path, headers={"if-none-match": etag}).status_code == 304
    with open(pages.root / "first" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(train_record(61, loss=0.123)) + "\n")
    fresh = pages.get(path, headers={"if-none-match": etag})
    assert fresh.status_code == 200
    assert "0.123" in fresh.text


def test_an_open_page_is_told_of_each_change_once(pages, monkeypatch):
    board = pages.app.state.board
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.01)
    path = f"/run/{pages.number('first')}"

    def events(seen):
        board.is_closing = False
        threading.Timer(0.3, setattr, (board, "is_closing", True)).start()
        return pages.get(path, headers={"accept": app.EVENTS, "last-event-id": seen}).text

    response = pages.get(path)
    etag = response.headers["etag"]
    assert f'data-live="{escape(etag)}"' in response.text
    assert events(etag) == ""
    assert events("another") == f"id: {etag}\ndata: changed\n\n"
    pages.act("notes", run=pages.number("first"), text="new")
    assert events(etag) == f"id: {pages.get(path).headers['etag']}\ndata: changed\n\n"


def test_a_list_shows_a_run_that_begins_and_one_that_ends(pages, monkeypatch):
    monkeypatch.setattr(folders, "SHARED_SECONDS", 0.0)
    monkeypatch.setattr(folders, "SETTLED", 0.0)  # so that the second look uses what the first has cached
    pages.page("/")
    write_run(pages.root / "grid" / "third", status_json=status("training", 7, 60))
    assert "7 / 60" in pages.page("/")
    write_run(pages.root / "first", status_json=status("failed", error="loss is NaN"))
    assert "loss is NaN" in pages.page("/")
    (pages.root / "grid" / "third").rename(pages.root.parent / "elsewhere")
    assert "grid/third" not in pages.page("/")


def test_text_of_runs_is_escaped_on_every_page(tmp_path, queue):
    root = tmp_path / "runs"
    files = {"notes_json": {"text": ATTACK, "tags": [ATTACK], "hidden": False}}
    files["generations_json"] = [{"prompt": ATTACK, "before": ATTACK, "after": ATTACK}]
    line = {"split": ATTACK, "row": 1, "hash": ATTACK, "text": [[True, ATTACK]], "end": 1.0}
    files |= {
        "row_losses_jsonl": json.dumps(line) + "\n",
        "samples_jsonl": json.dumps({"step": 1, "prompt": ATTACK}) + "\n",
    }
    files["config_resolved_yaml"] = f"model_name_or_path: '{ATTACK}'\nmethod: '{ATTACK}'\n"
    files["status_json"] = status("failed", error=ATTACK)
    files["data_report_json"] = {"sources": [{"path": ATTACK}], "mask": ATTACK, "template": ATTACK, "train": {}}
    write_run(root / "<script>alert('name')<", **files)
    write_run(root / "other\u202e", **files)
    board = Pages(root, tmp_path)
    numbers = [board.number(name) for name in os.listdir(root)]
    paths = ["/", f"/?q={ATTACK}&tag={ATTACK}", *(f"/run/{number}" for number in numbers)]
    paths += [f"/run/{numbers[0]}/data?q=%3Cscript%3E&sort=%22%3E", f"/new?from={numbers[0]}"]
    paths += ["/chat", *(f"/chat?run={number}" for number in numbers)]
    for name in os.listdir(root):
        (root / name / "adapter").mkdir()
    paths += [f"/compare?run={numbers[0]}&run={numbers[1]}&x=%22%3E%3Cscript%3E&from=%22%3E%3Cscript%3E"]
    for path in paths:
        html = board.page(path)
        assert html.count("<script") == 1, path  # the board's own
        assert "alert(" not in re.sub(r"&lt;script&gt;alert\((&quot;x&quot;|&#x27;name&#x27;)\)", "", html)
        assert "\u202e" not in html


DAMAGED = {
    "half a line": ("metrics_jsonl", json.dumps(train_record(1)) + '\n{"kind": "tr'),
    "binary": ("metrics_jsonl", "\x00\x01\udcff\n" * 3),
    "other JSON": ("metrics_jsonl", '[1]\n"a"\n{"kind": "train"}\n{"kind": "train", "step": "x"}\n'),
    "huge numbers": ("metrics_jsonl", '{"kind": "train", "step": 1, "loss": 1e999, "grad_norm": ' + "9" * 400 + "}\n"),
    "NaN": ("metrics_jsonl", '{"kind": "train", "step": 1, "loss": NaN}\n{"kind": "train", "step": 2, "loss": null}\n'),
    "nested": ("metrics_jsonl", "[" * 100_000 + "\n"),
    "status": ("status_json", "{}"),
    "status of another type": ("status_json", "[]"),
    "configuration": ("config_resolved_yaml", "a: [1\nb: {"),
    "memory": ("memory_json", '{"predicted": 3, "measured": {"peak_bytes": "x"}}'),
    "data": ("data_report_json", '{"train": {"length_histogram": {"edges": "x"}}, "sources": 3, "samples": [1]}'),
    "answers": ("generations_json", '[{"prompt": 1}, 2]'),
    "row losses": ("row_losses_jsonl", '{"text": 1, "start": "x", "end": []}\n[]\n{'),
    "samples": ("samples_jsonl", '{"prompt": [], "step": {}}\n'),
    "notes": ("notes_json", '{"text": {}, "tags": "x", "hidden": 1}'),
    "environment": ("environment_json", '{"numbers": 1, "started": "x", "best": [], "notices": []}'),
    "no file": ("metrics_jsonl", None),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_leave_every_page_readable(tmp_path, queue, case):
    name, content = DAMAGED[case]
    root = tmp_path / "runs"
    content = content.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if content else content
    write_run(root / "damaged", **{name: content})
    write_run(root / "sound")
    board = Pages(root, tmp_path)
    number, other = board.number("damaged"), board.number("sound")
    for path in ("/", f"/run/{number}", f"/run/{number}/data", f"/compare?run={number}&run={other}", "/queue"):
        board.page(path)


def test_a_run_that_vanishes_and_unknown_pages_are_404(pages):
    pages.page("/")
    for path in ("/run/000000000000", "/run/../../etc/passwd", "/static/app.py", "/nothing"):
        response = pages.get(path)
        assert response.status_code == 404, path
        assert "passwd" not in response.text


def test_links_out_of_the_folders_are_not_followed(pages, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("very secret: yes\n")
    path = pages.root / "first" / "config.resolved.yaml"
    path.unlink()
    path.symlink_to(secret)
    response = pages.get(f"/run/{pages.number('first')}")
    assert response.status_code == 403
    assert "very secret" not in response.text
    (pages.root / "linked").symlink_to(tmp_path)
    assert "linked" not in pages.page("/")


# --- reading and drawing ---------------------------------------------------------------------------------------------


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_records_are_read_once_and_replaced_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [train_record(step) for step in (1, 2, 3)])
    file = MetricsFile(path)
    assert file.read().train.steps == [1, 2, 3]
    with open(path, "a") as stream:
        stream.write(json.dumps(train_record(4)) + "\n" + json.dumps(train_record(5))[:20])
    assert file.read().train.steps == [1, 2, 3, 4]
    with open(path, "a") as stream:
        stream.write(json.dumps(train_record(5))[20:] + "\n" + json.dumps(train_record(3, loss=9.0, extra=1)) + "\n")
    train = file.read().train
    assert train.steps == [1, 2, 3]
    assert train.column("loss")[-1] == 9.0
    assert math.isnan(train.column("extra")[0])
    path.unlink()
    write_lines(path, [eval_record(7, 1.0)])
    records = file.read()
    assert (records.train.steps, records.evals.steps) == ([], [7])


def test_a_glance_has_the_first_and_the_last_records_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [*map(train_record, range(1, 3001)), eval_record(3000, 1.5)])
    train, evals = glance(path)
    assert train.steps[0] == 1
    assert train.steps[-1] == 3000
    assert 40 < len(train.steps) < 100
    assert evals.column("loss") == [1.5]


def test_a_long_curve_keeps_its_extremes_and_gaps():
    ys = [math.sin(at / 50) for at in range(10_000)]
    ys[4321], ys[7000:7100] = 99.0, [math.nan] * 100
    points = reduced(range(10_000), ys)
    assert len(points) < 1300
    assert (4321, 99.0) in points
    assert any(math.isnan(y) for _, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    svg = chart("a < b", [Line("", range(10_000), ys)], "step")
    assert "a &lt; b" in svg
    assert len(svg) < 40_000
