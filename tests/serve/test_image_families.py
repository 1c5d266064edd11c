"""The server and `chat` with images, for every family: answers are transformers'."""

import base64
import io
import json
import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText

from halfbyte.cli.answers import chat
from halfbyte.serve.model import load
from halfbyte.utils.text import visible
from tests.helpers.image_models import NAMES, load_processor, picture, save_image_model
from tests.helpers.openai_client import CHAT, client_of

OPTIONS = {"model": "model", "temperature": 0, "max_tokens": 8}
IMAGE, SIZES = {"type": "image"}, ((90, 70), (60, 118))

# Left out: transformers' processor of Idefics 2 writes a space between an image and a text without one, and its
# generate of Llama 4 mixes dtypes.
ANSWERED = [parameter for parameter in NAMES if parameter.values[0] not in ("idefics2", "llama4")]


def text(value):
    return {"type": "text", "text": value}


def requested(turns, pictures):
    """The turns with OpenAI's parts for the images."""
    remaining = iter(pictures)

    def part(value):
        if value != IMAGE:
            return value
        buffer = io.BytesIO()
        next(remaining).save(buffer, format="PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    return [
        turn | ({} if isinstance(turn["content"], str) else {"content": list(map(part, turn["content"]))})
        for turn in turns
    ]


def greedy(folder, name, turns, pictures):
    """transformers' answer to turns about pictures."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = load_processor(folder, name)
    rendered = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[rendered], images=[pictures], return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERED)
def test_server_and_chat_answer_about_several_images_as_transformers(name, tmp_path, in_float32, monkeypatch, capsys):
    """Two images in a question, for two samples; then one of a tool; then both in `chat`."""
    folder = tmp_path / "model"
    save_image_model(folder, name)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1024  # two images of LLaVA-NeXT are 393 tokens
    (folder / "config.json").write_text(json.dumps(config))
    pictures = [picture(number, *size) for number, size in enumerate(SIZES)]
    question = [{"role": "user", "content": [IMAGE, text("and "), IMAGE, text(" differ?")]}]
    tool = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "ok"},
            {"role": "tool", "tool_call_id": "1", "content": [text("seen: "), IMAGE]}]  # fmt: skip
    expected = greedy(folder, name, question, pictures)
    with client_of(load(str(folder), {})) as client:
        body = OPTIONS | {"messages": requested(question, pictures), "n": 2}
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert [choice["message"]["content"] for choice in answer.json()["choices"]] == [expected] * 2
        answer = client.post(CHAT, json=OPTIONS | {"messages": requested(tool, pictures[:1])})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == greedy(folder, name, tool, pictures[:1])
    lines = []
    for number, image in enumerate(pictures):
        image.save(tmp_path / f"{number}.png")
        lines.append(f"/image {tmp_path / f'{number}.png'}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "differ?"])))
    chat(str(folder), compare_base=False, max_new_tokens=8, temperature=0)
    together = [{"role": "user", "content": [IMAGE, IMAGE, text("differ?")]}]
    written = capsys.readouterr().out.split("model: ")[1]
    assert visible(greedy(folder, name, together, pictures)) in written
