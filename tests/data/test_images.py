"""Rows with images: their forms, their tokens and pixels, and what is refused before a run."""

import base64
import io
import json
import zlib

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

import halfbyte
from halfbyte.config import load_config
from halfbyte.data.collate import make_collator
from halfbyte.data.image_processor import ImageProcessor
from halfbyte.data.images import MOST_PIXELS, ImageSource, opened
from halfbyte.data.prepare import prepare
from halfbyte.data.tables import digest_of_rows
from halfbyte.export.gguf_model import export_gguf
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.methods import method_of
from halfbyte.modeling.architectures import all_linear
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.utils.errors import ConfigError, DataError, HalfbyteError, ModelError
from tests.helpers.gguf_models import save_model
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.image_models import NAMES, load_processor, picture, save_image_model, write_image_rows

TYPED = ("gemma3", "qwen2_5_vl")  # of the fast tests
SLOW_NAMES = [p if p.values[0] in TYPED else pytest.param(*p.values, marks=[*p.marks, pytest.mark.slow]) for p in NAMES]
ANSWER = {"role": "assistant", "content": "I see."}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder for each name of `NAMES`, with `model` and `data.jsonl`."""
    folders = {}

    def place(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            save_image_model(folders[name] / "model", name)
            write_image_rows(folders[name])
        return folders[name]

    return place


def configured(model, dataset, **keys):
    keys = {"model_name_or_path": str(model), "dataset": str(dataset), "output_dir": "out", "max_length": 400} | keys
    return load_config(None, {"device": "cpu", "dtype": "float32"} | keys)


def prepared(model, dataset, **keys):
    config = configured(model, dataset, **keys)
    return prepare(config, load_run_tokenizer(config)).train


def write_rows(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def text(value):
    return {"type": "text", "text": value}


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_inputs_are_those_of_transformers_processor(name, places):
    place = places(name)
    config = configured(place / "model", place / "data.jsonl")
    tokenizer = load_run_tokenizer(config)
    rows = list(prepare(config, tokenizer).train)
    processor = load_processor(place / "model", name)
    for row, line in zip(rows, (place / "data.jsonl").read_text().splitlines(), strict=True):
        messages = json.loads(line)["messages"]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        pictures = [[Image.open(image["path"]) for image in row["images"]]] if row["images"] else None
        expected = processor(text=[rendered], images=pictures, add_special_tokens=False, return_tensors="pt")
        assert row["input_ids"] == expected["input_ids"][0].tolist()
        trained = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(trained) == messages[1]["content"] + "<|im_end|>"
        batch = make_collator(config, tokenizer)([row])
        for column in expected.keys() & batch.keys():
            assert torch.equal(expected[column], batch[column]), column
        assert expected.keys() - batch.keys() <= ({"mm_token_type_ids", "token_type_ids"} if not pictures else set())


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_of_adapters_equal_transformers_and_peft(name, places, tmp_path):
    place = places(name)
    config = configured(place / "model", place / "data.jsonl")
    tokenizer = load_run_tokenizer(config)
    rows = list(prepare(config, tokenizer).train)
    batch = make_collator(config, tokenizer)(rows)
    model = save_image_model(tmp_path, name)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=all_linear(model), init_lora_weights=False)).train()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("vis" in name or "projector" in name or "connector" in name for name in trained)
    loss = model(**batch, use_cache=False).loss
    expected = torch.autograd.grad(loss, list(trained.values()))
    halfbyte.patch(model)
    loss_sum, count = causal_lm_loss(model, batch)
    gradients = torch.autograd.grad(loss_sum / count, list(trained.values()))
    assert (loss_sum / count).item() == pytest.approx(loss.item(), rel=1e-5)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)


def test_images_in_every_form_are_the_same_rows(places, tmp_path):
    image = picture(7)
    content = encoded(image)
    (tmp_path / "a.png").write_bytes(content)
    plain = base64.b64encode(content).decode()
    url = f"data:image/png;base64,{plain}"
    part, words = {"type": "image"}, (text("see "), text(" now"))
    turns = [{"role": "user", "content": "see <image> now"}, ANSWER]
    spoken = [{"from": "human", "value": "see <image> now"}, {"from": "gpt", "value": "I see."}]
    forms = [
        *(asked(words[0], {**part, key: value}, words[1])
          for key, value in (("image", "a.png"), ("path", str(tmp_path / "a.png")), ("url", url), ("base64", plain))),
        asked(words[0], {"type": "image_url", "image_url": {"url": url}}, words[1]),
        asked(words[0], part, words[1]) | {"images": ["a.png"]},
        {"messages": turns, "images": ["a.png"]},
        {"conversations": spoken, "image": "a.png"},
        {"instruction": "see <image> now", "output": "I see.", "images": ["a.png"]},
        {"prompt": turns[:1], "completion": turns[1:], "images": ["a.png"]},
    ]  # fmt: skip
    model = places("qwen2_5_vl") / "model"
    rows = []
    for number, form in enumerate(forms):
        rows += prepared(model, write_rows(tmp_path / f"{number}.jsonl", form))
    features = datasets.Features({
        "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        "images": datasets.List(datasets.Image()),
    })  # fmt: skip
    table = datasets.Dataset.from_list([{"messages": turns, "images": [image]}], features=features)
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "a.parquet")
    rows += [*prepared(model, tmp_path / "saved"), *prepared(model, tmp_path / "a.parquet")]
    assert len(rows) == len(forms) + 2
    assert all(row["input_ids"] == rows[0]["input_ids"] for row in rows)
    pixels = np.asarray(image)
    assert all((np.asarray(opened(row["images"][0])) == pixels).all() for row in rows)
    assert (rows[0]["images"][0]["path"], rows[4]["images"][0]["path"]) == (str(tmp_path / "a.png"), None)


@pytest.mark.parametrize("method", ["sft", "kto", "grpo"])
def test_column_mapping_names_the_column_of_images(method, places, tmp_path):
    picture(1).save(tmp_path / "a.png")
    row = {"prompt": [{"role": "user", "content": "<image> look"}], "completion": [ANSWER], "picture_path": "a.png"}
    path = write_rows(tmp_path / "d.jsonl", row | {"label": True}, row | {"label": False})
    rewards = {"reward_funcs": [{"regex": "a"}], "num_generations": 2, "per_device_train_batch_size": 2}
    further = rewards | {"max_completion_length": 9} if method == "grpo" else {}
    keys = {"column_mapping": {"images": "picture_path"}, "method": method} | further
    config = configured(places("qwen2_5_vl") / "model", path, **keys)
    rows = method_of(config).ready(config, load_run_tokenizer(config)).train
    assert [len(row["images"]) for row in rows] == [1, 1]


@pytest.mark.parametrize("nothing", [None, [], "", [None], {}, {"path": None, "bytes": None}], ids=str)
def test_rows_without_images_beside_rows_with_some(nothing, places, tmp_path):
    picture(1).save(tmp_path / "a.png")
    rows = [asked(text("hi")) | {"images": nothing}, asked({"type": "image"}) | {"images": "a.png"}]
    prepared_rows = prepared(places("qwen2_5_vl") / "model", write_rows(tmp_path / "d.jsonl", *rows))
    assert [len(row["images"]) for row in prepared_rows] == [0, 1]


def test_a_question_after_the_last_answer_is_left_out_with_its_image(places, tmp_path):
    for name in ("a.png", "b.png"):
        picture(1).save(tmp_path / name)
    turns = [{"role": "user", "content": "<image> look"}, ANSWER, {"role": "user", "content": "<image> and this?"}]
    path = write_rows(tmp_path / "d.jsonl", {"messages": turns, "images": ["a.png", "b.png"]})
    [row] = prepared(places("qwen2_5_vl") / "model", path)
    assert [image["path"] for image in row["images"]] == [str(tmp_path / "a.png")]


def test_tool_results_may_have_images(places, tmp_path):
    picture(1).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "so"},
             {"role": "tool", "content": [text("shot "), {"type": "image", "image": "a.png"}]}, ANSWER]  # fmt: skip
    [row] = prepared(places("qwen2_5_vl") / "model", write_rows(tmp_path / "d.jsonl", {"messages": turns}))
    assert len(row["images"]) == 1
    assert sum(label != -100 for label in row["labels"]) == len("so") + len("I see.") + 2


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    return encoded(picture(3), exif=exif), picture(3).transpose(Image.Transpose.ROTATE_270)


def transparent():
    image = picture(4).convert("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    return encoded(image), Image.new("RGB", image.size, "white")


def deep():
    values = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1285
    return encoded(Image.fromarray(values)), Image.fromarray((values // 257).astype(np.uint8)).convert("RGB")


@pytest.mark.parametrize(
    "case",
    [rotated, transparent, deep,
     lambda: (encoded(picture(5).convert("CMYK"), "TIFF"), picture(5).convert("CMYK").convert("RGB")),
     lambda: (encoded(picture(6).convert("P")), picture(6).convert("P").convert("RGB"))],
    ids=["EXIF", "alpha", "16 bits", "CMYK", "palette"],
)  # fmt: skip
def test_images_of_every_mode_become_upright_rgb(case):
    content, expected = case()
    image = opened(ImageSource(None, False).stored(content, "d.jsonl", "d.jsonl:1"))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def bomb():
    """A PNG of few bytes that claims 100 million pixels."""
    small = encoded(Image.new("L", (8, 8)))
    header = b"IHDR" + (10_000).to_bytes(4, "big") * 2 + small[24:29]
    return small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:]


BAD_IMAGES = {
    "truncated": lambda: encoded(picture(1))[:-800],
    "empty": lambda: b"",
    "no image": lambda: b"not an image",
    "animated": lambda: encoded(picture(1), "GIF", save_all=True, append_images=[picture(2)]),
    "bomb": bomb,
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_is_named_by_its_row_before_the_run(name, places, tmp_path):
    (tmp_path / "a.png").write_bytes(BAD_IMAGES[name]())
    picture(1).save(tmp_path / "good.png")
    good = asked({"type": "image", "image": "good.png"})
    path = write_rows(tmp_path / "d.jsonl", good, asked({"type": "image", "image": "a.png"}))
    with pytest.raises(DataError, match=r"d\.jsonl:2.*image 1"):
        prepared(places("qwen2_5_vl") / "model", path)
    assert MOST_PIXELS < 10_000**2


REFUSED_ROWS = {
    "missing": asked({"type": "image", "image": "b.png"}),
    "a URL": asked({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}),
    "too few images": {"messages": [{"role": "user", "content": "<image> <image>"}, ANSWER], "images": ["a.png"]},
    "too many images": {"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": ["a.png", "a.png"]},
    "no placeholder": {"messages": [{"role": "user", "content": "look"}, ANSWER], "images": ["a.png"]},
    "a video": asked({"type": "video", "video": "a.mp4"}),
    "a column of videos": asked(text("look")) | {"videos": ["a.mp4"]},
    "plain text": {"text": "<image> a cat", "images": ["a.png"]},
    "a thin image": asked({"type": "image", "image": "thin.png"}),
    "an image before the turns": {"messages": [{"role": "system", "content": [{"type": "image", "image": "a.png"}]},
                                               *asked(text("hi"))["messages"]], "tools": [{"name": "f"}]},
    "audio": asked({"type": "input_audio", "input_audio": {"data": ""}}),
    "an answer's image": {"messages": [{"role": "user", "content": "draw"},
                                       {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_ROWS)
def test_a_row_whose_images_cannot_be_read_is_named(name, places, tmp_path):
    picture(1).save(tmp_path / "a.png")
    picture(1, 1, 5000).save(tmp_path / "thin.png")
    with pytest.raises(DataError, match=r"d\.jsonl:1"):
        prepared(places("qwen2_5_vl") / "model", write_rows(tmp_path / "d.jsonl", REFUSED_ROWS[name]))


def test_no_image_outside_of_media_dir_is_read(places, tmp_path):
    (tmp_path / "media").mkdir()
    picture(1).save(tmp_path / "a.png")
    picture(1).save(tmp_path / "media/b.png")
    model, keys = places("gemma3") / "model", {"media_dir": str(tmp_path / "media")}
    inside = write_rows(tmp_path / "in.jsonl", asked({"type": "image", "image": "b.png"}))
    assert len(prepared(model, inside, **keys)) == 1
    for name in ("../a.png", str(tmp_path / "a.png")):
        path = write_rows(tmp_path / "d.jsonl", asked({"type": "image", "image": name}))
        with pytest.raises(DataError, match="media_dir"):
            prepared(model, path, **keys)


@pytest.mark.parametrize("name", SLOW_NAMES)
def test_a_placeholder_typed_by_a_user_stays_text(name, places, tmp_path):
    """Of the template and of the features, beside an image and in a row without one."""
    picture(1).save(tmp_path / "a.png")
    row, tokens = MODELS_OF_IMAGES[name], set()
    tokens |= {row.image.strip() if len(row.image) < 20 else "<|image_pad|>", *row.ids.values()}
    typed = " and ".join(sorted(tokens))
    rows = [asked({"type": "image", "image": "a.png"}, text(f"it says {typed}.")), asked(text(f"no {typed}."))]
    place = places(name)
    config = configured(place / "model", write_rows(tmp_path / "d.jsonl", *rows), max_length=1200)
    tokenizer = load_run_tokenizer(config)
    image = ImageProcessor(config, tokenizer).image_token_id
    with_image, without = prepare(config, tokenizer).train
    stored = sum(stored["tokens"] for stored in with_image["images"])
    assert (with_image["input_ids"].count(image), without["input_ids"].count(image)) == (stored, 0)
    for ids in (with_image["input_ids"], without["input_ids"]):
        assert typed in tokenizer.decode(ids)
    make_collator(config, tokenizer)([with_image, without])


def test_a_long_row_with_a_typed_placeholder_is_cut(places, tmp_path):
    picture(1).save(tmp_path / "a.png")
    row = asked({"type": "image", "image": "a.png"}, text("<image_soft_token>"))
    row["messages"] += asked(text("word " * 100_000))["messages"]
    [cut] = prepared(places("gemma3") / "model", write_rows(tmp_path / "d.jsonl", row))
    assert len(cut["images"]) == 1
    assert len(cut["input_ids"]) < 100


def test_a_long_row_is_cut_between_turns_with_its_images(places, tmp_path):
    picture(1).save(tmp_path / "a.png")
    turns = [turn for _ in range(3) for turn in asked({"type": "image", "image": "a.png"})["messages"]]
    path, model = write_rows(tmp_path / "d.jsonl", {"messages": turns}), places("qwen2_5_vl") / "model"
    config = configured(model, path)
    tokenizer = load_run_tokenizer(config)
    [full] = prepare(config, tokenizer).train
    ends = [at + 1 for at, token in enumerate(full["labels"]) if token == tokenizer.eos_token_id]
    assert len(ends) == len(full["images"]) == 3
    for length in (ends[0], ends[1] - 1, ends[1], ends[1] + 20, ends[2] - 1):
        [row] = prepared(model, path, max_length=length)
        kept = sum(end <= length for end in ends)
        assert (len(row["images"]), row["input_ids"]) == (kept, full["input_ids"][: ends[kept - 1]])
        make_collator(config, tokenizer)([row])  # raises unless images and their tokens agree
    with pytest.raises(DataError, match="max_length"):
        prepared(model, path, max_length=ends[0] - 1)


def test_an_image_longer_than_a_row_names_the_pixels_that_fit(places, tmp_path):
    picture(1, 400, 400).save(tmp_path / "a.png")
    path, model = write_rows(tmp_path / "d.jsonl", asked({"type": "image", "image": "a.png"})), places("qwen2_5_vl")
    keys = {"max_length": 60, "image_max_pixels": 448**2}
    with pytest.raises(DataError, match=r"d\.jsonl:1, image 1.*max_length") as error:
        prepared(model / "model", path, **keys)
    fitting = int(error.value.fix.rpartition(" ")[2])
    [row] = prepared(model / "model", path, **keys | {"max_length": 80, "image_max_pixels": fitting})
    assert 20 < row["images"][0]["tokens"] < 60


@pytest.mark.parametrize(
    ("name", "keys"),
    [("gemma3", {"image_max_pixels": 10_000}), ("gemma3", {"image_min_pixels": 10_000}),
     ("qwen2_5_vl", {"image_max_pixels": 1}), ("qwen2_5_vl", {"image_min_pixels": 9_000, "image_max_pixels": 8_000})],
)  # fmt: skip
def test_keys_that_do_not_go_with_images_are_named(name, keys, places):
    place = places(name)
    with pytest.raises(ConfigError, match=next(iter(keys))):
        prepared(place / "model", place / "data.jsonl", **keys)


def test_only_models_that_read_images_take_them(places, tmp_path):
    place = places("gemma3")
    save_model(tmp_path / "text", "llama")
    tokenizer = load_run_tokenizer(configured(place / "model", place / "data.jsonl"))
    tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(ModelError, match="text only"):
        prepared(tmp_path / "text", place / "data.jsonl")


def test_only_rows_with_images_need_the_processor(places, tmp_path):
    place = places("gemma3")
    save_image_model(tmp_path / "model", "gemma3")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "model" / name).unlink()
    assert len(prepared(tmp_path / "model", write_rows(tmp_path / "d.jsonl", asked(text("hi"))))) == 1
    with pytest.raises(HalfbyteError, match="processor"):
        prepared(tmp_path / "model", place / "data.jsonl")


@pytest.mark.parametrize("change", [{"patch_size": 28}, {"merge_size": 1}, "llava"], ids=str)
def test_the_processor_of_another_model_is_refused(change, places, tmp_path):
    save_image_model(tmp_path / "model", "qwen2_5_vl")
    file = tmp_path / "model/preprocessor_config.json"
    other = places(change) / "model" / file.name if isinstance(change, str) else None
    file.write_text(other.read_text() if other else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match="processor"):
        prepared(tmp_path / "model", places("gemma3") / "data.jsonl")


def test_a_text_row_with_the_word_image_stays_text(tmp_path):
    """On a text model, also of a GGUF file, and where a column of links is named image or video."""
    save_model(tmp_path / "model", "llama")
    export_gguf(str(tmp_path / "model"), "f32", tmp_path / "model.gguf", device="cpu")
    path = write_rows(tmp_path / "d.jsonl", {"prompt": "an <image> tag", "completion": "html"})
    links = {"image": "https://a.b/c.png", "video": "https://a.b/c.mp4"}
    linked = write_rows(tmp_path / "e.jsonl", {"prompt": "hi", "completion": "x"} | links)
    for dataset in (path, linked):
        for model in ("model", "model.gguf"):
            assert "images" not in prepared(tmp_path / model, dataset).column_names


def test_a_moved_image_is_the_same_input_and_another_is_not(places, tmp_path):
    row = asked({"type": "image", "image": "a.png"})
    digests = []
    for folder, seed in (("one", 1), ("two", 1), ("three", 2)):
        (tmp_path / folder).mkdir()
        picture(seed).save(tmp_path / folder / "a.png")
        rows = prepared(places("gemma3") / "model", write_rows(tmp_path / folder / "d.jsonl", row))
        digests.append(digest_of_rows(rows))
    assert digests[0] == digests[1] != digests[2]
    picture(9).save(tmp_path / "three/a.png")
    with pytest.raises(DataError, match="changed"):
        opened(rows[0]["images"][0])
