"""`halfbyte chat` and `halfbyte generate`: typed and piped input, and files of prompts."""

import contextlib
import io
import json

import pytest

from halfbyte.cli import main
from halfbyte.cli.answers import answer_file, chat
from halfbyte.generation import Sampling
from halfbyte.runs.saved import load_saved
from halfbyte.runs.stop_tokens import data_report
from halfbyte.serve.conversation import Conversation
from halfbyte.utils.errors import CheckpointError, ConfigError, DataError
from tests.helpers.serve_tiny import CONTEXT

GREEDY = {"compare_base": False, "max_new_tokens": 4, "temperature": 0.0}


@pytest.fixture
def talk(base_folder, monkeypatch, capsys):
    """Chat with the tiny model over the bytes of stdin and return the output; `lost`: from a pipe, with these lines
    unanswered."""

    def talk(given: bytes, lost: str | None = None, **keys):
        stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
        stdin.isatty = lambda: lost is None
        monkeypatch.setattr("sys.stdin", stdin)
        capsys.readouterr()
        with pytest.raises(DataError, match=lost) if lost else contextlib.nullcontext():
            chat(str(base_folder), **GREEDY | keys)
        said = capsys.readouterr()
        return said.out + said.err

    return talk


def test_lines_are_answered_until_the_end_or_quit(talk):
    said = talk(b"Hello\n\n  \nAgain\n/reset\nHello\n/QUIT\nnever\n", lost="").splitlines()
    said = [line for line in said if line.startswith(("model: ", "("))]
    assert [line.partition(":")[0] for line in said] == ["model", "model", "(new conversation)", "model"]
    assert said[0] == said[3] != said[1]


@pytest.mark.parametrize("lost", [None, "lines 2, 4 of the input have"])
def test_undecodable_bytes_fail_only_their_line(talk, lost):
    said = talk(b"Hello\n\xff\xfe\nHello\nG\xc3\n", lost)
    assert said.count("model: ") == 2
    assert "utf-8" in said
    assert "line 4" in said


@pytest.mark.parametrize("line", ["/rest", "/exit", "/Resett"])
def test_misspelt_commands_are_refused(talk, line):
    said = talk(f"{line}\n/etc/passwd is a file\n".encode(), "line 1 of the input has")
    assert "line 1:" in said
    assert said.count("model: ") == 1


def test_a_conversation_beyond_the_positions_is_refused(talk):
    said = talk(b"x" * 2 * CONTEXT + b"\n/reset\nHello\n", max_new_tokens=None)
    assert f"{CONTEXT} positions" in said
    assert "(/reset" in said
    assert len(said.split("model: ")[2]) > 4  # to the end of the positions
    said = talk(b"Hello\n", "line 1 of the input has", max_new_tokens=120)
    assert "max_new_tokens 120" in said


@pytest.mark.parametrize("typed", [True, False])
def test_ctrl_c_stops_only_the_answer_in_a_terminal(talk, monkeypatch, typed):
    def answer(self, text, adapter=True):
        yield "be"
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "answer", answer)
    if typed:
        assert talk(b"Hello\nHello\n").count("model: be (stopped)\n") == 2
    else:
        with pytest.raises(KeyboardInterrupt):
            talk(b"Hello\nHello\n", lost="")


@pytest.mark.parametrize("template", ["{{ raise_exception('no turns') }}", "{{ 1 // 0 }}", "{{ nothing.of.this }}"])
def test_a_raising_template_is_reported(base_folder, template):
    saved = load_saved(str(base_folder))
    conversation = Conversation(saved, Sampling())
    saved.tokenizer.chat_template = template
    for refused in (lambda: conversation.prompt("Hello"), lambda: Conversation(saved, Sampling())):
        with pytest.raises(DataError):
            refused()


@pytest.mark.parametrize(("key", "message"), [("nan", "nan"), ("inf", "inf")])
def test_a_temperature_that_is_no_number_is_refused(base_folder, key, message, monkeypatch, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello")
    for run in (lambda: chat(str(base_folder), **GREEDY | {"temperature": float(key)}),
                lambda: list(answer_file(str(base_folder), prompts, 4, float(key), 8))):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            run()


def test_sampling_options_reach_the_draws(base_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello")

    def answer(*options):
        with pytest.raises(SystemExit) as end:
            main(["generate", str(base_folder), str(prompts), "--max-new-tokens", "8", *options])
        assert not end.value.code
        return capsys.readouterr().out

    greedy = answer()
    for options in (("--top-k", "1"), ("--top-p", "1e-6"), ("--min-p", "1")):
        assert answer("--temperature", "2", *options) == greedy
    assert answer("--repetition-penalty", "50") != greedy


@pytest.mark.parametrize("command", [["chat"], ["generate", "prompts.txt"]])
@pytest.mark.parametrize("option", [("--top-k", "5"), ("--top-p", "0.9"), ("--min-p", "0.1")])
def test_sampling_options_need_a_temperature(base_folder, command, option, capsys):
    name, *rest = command
    with pytest.raises(SystemExit) as end:
        main([name, str(base_folder), *rest, "--temperature", "0", *option])
    assert end.value.code == 2
    assert option[0] in capsys.readouterr().err


def answers(base_folder, file, new=None, batch=8):
    return [json.loads(line) for line in answer_file(str(base_folder), file, new, 0.0, batch)]


def test_by_default_answers_end_at_the_last_position(base_folder, tmp_path, in_float32):
    file = tmp_path / "prompts.jsonl"
    texts = ["Hello", "x" * (CONTEXT - 40), "with a line\u2028separator, and\x85another"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    found = answers(base_folder, file)
    assert [each["prompt"] for each in found] == texts
    assert found == answers(base_folder, file, batch=1)
    assert len(found[0]["answer"]) > len(found[1]["answer"]) > 0


def test_prompts_that_are_too_long_are_all_named_before_any_answer(base_folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(["fits", "x" * 200, "", "fits", "x" * 300]))
    with pytest.raises(DataError) as refused:
        next(answer_file(str(base_folder), file, None, 0.0, 1))
    assert refused.value.message.startswith(f"{file}: line 2 (219 tokens), line 5 (319 tokens) and an answer")
    assert "128 positions" in refused.value.message
    assert "shorten" in refused.value.fix
    file.write_text("fits\n" + "x" * 80)
    with pytest.raises(DataError, match=r"line 2 \(\d+.*--max-new-tokens 90") as refused:
        next(answer_file(str(base_folder), file, 90, 0.0, 1))
    assert "--max-new-tokens" in refused.value.fix


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", None),
        (b"{", r"p\.jsonl:1:.*JSON"),
        (b'{"prompt": "a"}\n[' + b"[" * 10**5, r"p\.jsonl:2:"),
        (b'{"prompt": ""}', r"p\.jsonl:1:"),
        (b'{"prompt": "a"}\n\n{"prompt": "  "}', r"p\.jsonl:3:"),
        (b'{"prompt": 3}', None),
        (b"\xff", "p.jsonl:1: byte 1.*0xff.*UTF-8"),
        (None, None),
    ],
)
def test_files_without_prompts_are_refused(base_folder, tmp_path, content, message):
    file = tmp_path / "p.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        next(answer_file(str(base_folder), file, 4, 0.0, 1))
    assert refused.value.fix


@pytest.mark.parametrize("report", ["{", "[]", '{"sources": [{}]}'])
def test_a_damaged_data_report_is_refused(base_folder, tmp_path, report):
    (tmp_path / "data_report.json").write_text(report)
    with pytest.raises(CheckpointError, match=r"data_report\.json"):
        data_report(tmp_path)
