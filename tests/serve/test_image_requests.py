"""Images in the server, `chat` and `generate`: answers compared with transformers', limits, refusals."""

import base64
import io
import json
import shlex
import struct
import sys
import zlib

import pytest
import torch
from transformers import AutoModelForImageTextToText

from halfbyte import data
from halfbyte.cli.answers import answer_file, chat
from halfbyte.serve.model import Limits, load
from halfbyte.utils.errors import DataError
from tests.helpers.image_models import load_processor, picture, save_image_model
from tests.helpers.openai_client import CHAT, client_of, error_of, events

NAME, QUESTION = "qwen2_5_vl", "what is this?"
OPTIONS = {"model": "model", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("images")
    save_image_model(place / "model", NAME)
    for number, size in enumerate(((90, 70), (60, 118))):
        picture(number, *size).save(place / f"{number}.png")
    return place


@pytest.fixture(scope="module")
def client(folder, in_float32):
    with client_of(load(str(folder / "model"), {}, Limits(images=3)), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(folder):
    """Return transformers' greedy answer to turns about pictures."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval()
    processor = load_processor(folder / "model", NAME)

    def answer(turns, pictures):
        text = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return processor.tokenizer.decode(tokens, skip_special_tokens=True)

    return answer


def encoded(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def part(url, **keys):
    return {"type": "image_url", "image_url": {"url": url} | keys}


def bomb():
    """A PNG of 16,000 x 16,000 pixels, as its header says."""
    header = struct.pack(">IIBBBBB", 16_000, 16_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    content = base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunk)
    return f"data:image/png;base64,{content.decode()}"


ASKED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}


def test_the_server_answers_as_transformers(client, theirs):
    """One image, several in two turns, samples of one prompt, and a stream."""
    first, second = picture(0, 90, 70), picture(1, 700, 500)  # the second is larger than a body without images
    content = [part(encoded(first), detail="auto"), {"type": "text", "text": QUESTION}]
    body = OPTIONS | {"messages": [{"role": "user", "content": content}]}
    expected = theirs([ASKED], [first])
    answer = client.post(CHAT, json=body | {"n": 2}).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [expected, expected]
    chunks = events(client.post(CHAT, json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected
    turns = [ASKED, {"role": "assistant", "content": "b"}, ASKED]
    later = [body["messages"][0], turns[1], {"role": "user", "content": [part(encoded(second)), content[1]]}]
    assert len(json.dumps(later)) > 2**20
    answer = client.post(CHAT, json=OPTIONS | {"messages": later}).json()
    assert answer["choices"][0]["message"]["content"] == theirs(turns, [first, second])
    plain = client.post(CHAT, json=OPTIONS | {"messages": [{"role": "user", "content": "a"}]}).json()
    assert plain["choices"][0]["message"]["content"] == theirs([{"role": "user", "content": "a"}], None)


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([part("https://example.com/a.png")], "messages[0].content"),
        ([part("/etc/passwd")], "messages[0].content"),
        ([part("data:image/png;base64,aGVsbG8=")], "messages"),
        ([part("data:image/png;base64,!!")], "messages"),
        ([part(encoded(picture(0)), detail="low")], "messages[0].content"),
        ([part(bomb())], "messages"),
        ([part(encoded(picture(0)))] * 4, "messages"),
        ([{"type": "input_audio", "input_audio": {}}], "messages[0].content"),
        ([part(encoded(picture(0))), {"type": "text", "text": "<|image_pad|>"}], "messages"),
    ],
)
def test_images_that_cannot_be_read_are_refused(content, param, client):
    refused = client.post(CHAT, json=OPTIONS | {"messages": [{"role": "user", "content": content}]})
    assert error_of(refused, 400)["param"] == param


def test_images_of_assistants_are_refused(client):
    messages = [{"role": "assistant", "content": [part(encoded(picture(0)))]}, {"role": "user", "content": "a"}]
    assert error_of(client.post(CHAT, json=OPTIONS | {"messages": messages}), 400)["param"] == "messages[0].content"


def test_a_text_model_refuses_images(base_folder, tmp_path, in_float32, monkeypatch, capsys):
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part(encoded(picture(0)))]}]}
    with client_of(load(str(base_folder), {})) as client:
        assert error_of(client.post(CHAT, json=body), 400)["param"] == "messages"
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="reads no images"):
        list(answer_file(str(base_folder), tmp_path / "a.txt", 4, 0.0, 1, images=[tmp_path / "a.png"]))


def test_generate_answers_rows_with_images(folder, theirs, in_float32, monkeypatch):
    """Placeholders with a column, turns, a training row's last answer left out, and text alone; then `--image`.

    The template is read once: each one starts a process.
    """
    template, templates = data.chat.ChatTemplate, []
    monkeypatch.setattr(data.chat, "ChatTemplate", lambda tokenizer: templates.append(1) or template(tokenizer))
    first, second = picture(0, 90, 70), picture(1, 60, 118)
    answered = [{**ASKED, "content": [{"type": "image", "path": "0.png"}, ASKED["content"][1]]}]
    rows = [
        {"prompt": f"<image>{QUESTION}", "images": ["0.png"]},
        {"prompt": answered},
        {"messages": [*answered, {"role": "assistant", "content": "left out"}]},
        {"prompt": QUESTION},
        {"prompt": f"{QUESTION}<image>", "image": encoded(second)},
    ]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    answers = [json.loads(line)["answer"] for line in answer_file(str(folder / "model"), file, 12, 0.0, 5)]
    after = {"role": "user", "content": [{"type": "text", "text": QUESTION}, {"type": "image"}]}
    expected = theirs([ASKED], [first])
    plain = theirs([{"role": "user", "content": QUESTION}], None)
    assert answers == [expected] * 3 + [plain, theirs([after], [second])]
    assert len(templates) == 1
    (folder / "prompts.txt").write_text(QUESTION)
    lines = answer_file(str(folder / "model"), folder / "prompts.txt", 12, 0.0, 8, images=[folder / "0.png"])
    assert [json.loads(line) for line in lines] == [{"prompt": QUESTION, "answer": expected}]
    with pytest.raises(DataError, match="--image"):
        next(answer_file(str(folder / "model"), file, 12, 0.0, 8, images=[folder / "0.png"]))


@pytest.mark.parametrize(
    "row",
    [{"prompt": "no placeholder", "images": ["0.png"]}, {"prompt": "<image>", "images": ["none.png"]},
     {"messages": [{"role": "assistant", "content": "a"}]}],
)  # fmt: skip
def test_generate_names_a_row_that_it_cannot_read(row, folder):
    (folder / "bad.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        list(answer_file(str(folder / "model"), folder / "bad.jsonl", 12, 0.0, 8))


def test_chat_takes_a_file_as_a_shell_writes_it_and_keeps_no_bad_image(folder, in_float32, monkeypatch, capsys):
    picture(0).save(folder / "a b.png")
    picture(0, 1, 5000).save(folder / "thin.png")
    name = str(folder / "a b.png")
    lines = [f"/image {name}", f"/image '{name}'", f"/image {shlex.quote(name)}", f"/image {folder}/a\\ b.png",
             f"/image {folder}/thin.png", f"/image '{folder}", QUESTION]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    with pytest.raises(DataError, match="lines 5, 6"):
        chat(str(folder / "model"), compare_base=False, max_new_tokens=2, temperature=0)
    assert capsys.readouterr().out.count(f"({name} goes") == 4


def test_chat_takes_images(folder, theirs, in_float32, monkeypatch, capsys):
    lines = [f"/image {folder / '0.png'}", QUESTION, f"/image {folder / 'none.png'}", "/reset", "a"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    with pytest.raises(DataError, match="line 3"):
        chat(str(folder / "model"), compare_base=False, max_new_tokens=12, temperature=0)
    written = capsys.readouterr().out
    plain = theirs([{"role": "user", "content": "a"}], None)
    answers = [text.partition("\n(")[0].rstrip("\n") for text in written.split("model: ")[1:]]
    assert len(answers) == 2
    assert ascii(answers[1]) != ascii(answers[0])
    assert plain[:1] in answers[1]
