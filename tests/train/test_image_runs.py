"""Runs on rows with images: from the rows to an adapter and a merged model that transformers and PEFT run."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from halfbyte.cli.preview import preview_rows
from halfbyte.config import load_config
from halfbyte.data.prepare import prepare
from halfbyte.export.merge import merge
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.modeling.architectures import FREEZE_PROJECTOR, FREEZE_TOWER, non_text_modules, vision_part, vision_parts
from halfbyte.runs.saved import find, saved_config
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.train.samples import pick_prompts
from halfbyte.utils.errors import ConfigError, DataError
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.image_models import NEEDS_TORCHVISION, load_processor, save_image_model, write_image_rows

ASKED = [{"type": "text", "text": "look at 1: "}, {"type": "image"}, {"type": "text", "text": " and"}]


def configured(place, output, **keys):
    keys = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"),
            "output_dir": str(output), "device": "cpu", "dtype": "float32", "max_length": 400, "r": 4,
            "learning_rate": 3e-2, "per_device_train_batch_size": 4, "logging_steps": 1} | keys  # fmt: skip
    return load_config(None, keys)


def write_place(folder, name):
    save_image_model(folder / "model", name, torch.bfloat16)
    write_image_rows(folder)
    return folder


def losses(output):
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def inputs_of(folder, name, picture):
    processor = load_processor(folder, name)
    turns = [{"role": "user", "content": ASKED}]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=[[Image.open(picture)]], return_tensors="pt", add_special_tokens=False)


FULL = {"use_peft": False, "load_in_4bit": False, "freeze_vision_tower": False}
SLOW = {name: [pytest.mark.slow] for name in MODELS_OF_IMAGES if name != "qwen2_5_vl"}
SLOW["lfm2_vl"] = [pytest.mark.slow, NEEDS_TORCHVISION]
# `merge` refuses adapters on Qwen3-VL's experts, which its checkpoints store transposed.
KEYS = {"qwen3_vl_moe": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}}
# Small updates, since bfloat16's rounding of merged weights adds up in their recurrences and over many image tokens.
KEYS |= {
    name: {"learning_rate": 1e-2, "max_steps": 32} for name in ("qwen3_5", "qwen3_5_moe", "llava_onevision", "gemma4")
}
ROUNDING = 0.2  # of logits, since merged weights are bfloat16


def assert_same_answer(answer, other):
    """Tokens are equal up to one whose two largest logits differ by no more than rounding."""
    begin = answer.sequences.shape[1] - len(answer.logits)
    pairs = zip(answer.sequences[0, begin:], other.sequences[0, begin:], answer.logits, strict=False)
    for token, other_token, logits in pairs:
        if token != other_token:
            largest, second = logits[0].topk(2).values
            assert largest - second < ROUNDING
            return


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW.get(name, ())) for name in MODELS_OF_IMAGES if name != "llama4"],
)
def test_adapter_and_merged_model_answer_about_an_image_in_transformers(name, tmp_path):
    """The merged model holds the base's tower bit for bit; both folders hold the processor's files."""
    place, output = write_place(tmp_path, name), tmp_path / "out"
    train(
        configured(place, output, **{"max_steps": 24, "load_in_4bit": False, "dtype": "bfloat16"} | KEYS.get(name, {}))
    )
    assert losses(output)[-1] < 0.5 * losses(output)[0]
    assert json.loads((output / "data_report.json").read_text())["train"]["images"]["count"] == 7
    generations = json.loads((output / "generations.json").read_text())
    assert [len(record.get("images", ())) for record in generations] == [0, 1, 2]
    assert all(record["after"] for record in generations)
    assert (output / "report.html").read_text().count("src='data:image/jpeg;base64,") == 3
    merge(output, tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    base = AutoModelForImageTextToText.from_pretrained(place / "model", dtype=torch.float32)
    outside = tuple(non_text_modules(base))
    tower = {key: value for key, value in base.named_parameters() if key.startswith(outside)}
    assert tower
    weights = dict(merged.named_parameters())
    assert all(torch.equal(weights[key], value) for key, value in tower.items())
    adapted = PeftModel.from_pretrained(base, output / "adapter").eval()
    picture = place / "pictures/1-0.png"
    answers = []
    for model, folder in ((adapted, output / "adapter"), (merged, tmp_path / "merged")):
        inputs = inputs_of(folder, name, picture)
        with torch.no_grad():
            options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
            answers.append((model.generate(**inputs, max_new_tokens=12, **options), model(**inputs).logits))
    assert_same_answer(answers[0][0], answers[1][0])
    torch.testing.assert_close(answers[0][1], answers[1][1], rtol=0, atol=ROUNDING)
    inputs["pixel_values"] = torch.full_like(inputs["pixel_values"], 0.1)
    with torch.no_grad():
        assert (merged(**inputs).logits - answers[1][1]).abs().max() > 0.01  # it reads the image


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_run_on_text_keeps_the_tower(name, tmp_path):
    """Without a processor, and in the merged model."""
    place = write_place(tmp_path, name)
    for file in ("preprocessor_config.json", "processor_config.json"):
        (place / "model" / file).unlink()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I see."}]
    (place / "data.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 4))
    train(configured(place, tmp_path / "out", max_steps=2, load_in_4bit=False))
    merge(tmp_path / "out", tmp_path / "merged")
    base, merged = (AutoModelForImageTextToText.from_pretrained(tmp_path / at) for at in ("model", "merged"))
    weights, outside = dict(merged.named_parameters()), tuple(non_text_modules(base))
    same = {key: torch.equal(weights[key], value) for key, value in base.named_parameters()}
    assert all(equal for key, equal in same.items() if key.startswith(outside))
    assert not all(same.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "file"),
    [
        ({"lora_dropout": 0.1}, "adapter/adapter_model.safetensors"),
        (FULL | {"freeze_multi_modal_projector": False}, "model/model.safetensors"),
    ],
)
def test_a_resumed_run_has_equal_bytes(keys, file, tmp_path):
    place = write_place(tmp_path, "qwen3_vl")
    keys |= {"max_steps": 4, "save_steps": 2, "eval_split_size": 2}
    train(configured(place, tmp_path / "full", **keys))
    train(configured(place, tmp_path / "half", **keys | {"save_total_limit": None}))
    train(configured(place, tmp_path / "half", **keys), resume=str(tmp_path / "half/checkpoint-2"))
    first, second = (load_file(tmp_path / name / file) for name in ("full", "half"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_packed_run_resumes_with_equal_bytes(tmp_path, capsys):
    """Every check, the preview and the report see the packed rows and their images."""
    place = write_place(tmp_path, "qwen2_5_vl")
    keys = {"max_steps": 4, "save_steps": 2, "lora_dropout": 0.1, "packing": True, "max_length": 200,
            "per_device_train_batch_size": 1, "load_in_4bit": False}  # fmt: skip
    preview_rows(configured(place, tmp_path / "out", **keys), 10)
    shown = capsys.readouterr().out
    assert shown.count("[image: ") == 7
    assert "document 3 of 3" in shown
    train(configured(place, tmp_path / "full", **keys))
    train(configured(place, tmp_path / "half", **keys | {"save_total_limit": None}))
    train(configured(place, tmp_path / "half", **keys), resume=str(tmp_path / "half/checkpoint-2"))
    first, second = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("full", "half"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    file = place / "model/preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.1, 0.1]}))
    with pytest.raises(ConfigError, match="image_processor"):
        train(configured(place, tmp_path / "half", **keys), resume=str(tmp_path / "half/checkpoint-2"))
    isolation = json.loads((tmp_path / "full/checks.json").read_text())["isolation"]
    assert (isolation["way"], isolation["change"]) == ("positions", 0)
    report = json.loads((tmp_path / "full/data_report.json").read_text())["train"]
    assert report["images"]["count"] == 7
    assert report["rows"] < report["documents"] == 8


@pytest.mark.parametrize("name", ["qwen2_5_vl", "glm4v"])
def test_limits_on_pixels_travel_with_the_adapter(name, tmp_path):
    """Also GLM's, whose processors count two frames of an image."""
    place = write_place(tmp_path, name)
    train(configured(place, tmp_path / "out", max_steps=1, image_max_pixels=56**2, sample_prompts=0))
    inputs = inputs_of(tmp_path / "out/adapter", name, place / "pictures/5-0.png")
    original = inputs_of(place / "model", name, place / "pictures/5-0.png")
    assert inputs["image_grid_thw"].prod() * 14**2 <= 56**2 < original["image_grid_thw"].prod() * 14**2
    report = json.loads((tmp_path / "out/data_report.json").read_text())["train"]["images"]
    assert report["largest"] * 28**2 <= 56**2
    shutil.copytree(tmp_path / "out/adapter", tmp_path / "adapter")  # without its run
    assert saved_config(find(str(tmp_path / "adapter"))).image_max_pixels == 56**2


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_full_fine_tuning_trains_the_parts_that_are_not_frozen(name, tmp_path):
    """Tower and language model change, the projector keeps its bits, and the saved model answers in transformers."""
    place, output = write_place(tmp_path, name), tmp_path / "out"
    train(configured(place, output, max_steps=12, learning_rate=3e-3, **FULL))
    assert losses(output)[-1] < 0.5 * losses(output)[0]
    base, model = (
        AutoModelForImageTextToText.from_pretrained(folder) for folder in (place / "model", output / "model")
    )
    weights, parts = dict(model.named_parameters()), vision_parts(base)
    kept = {key: torch.equal(weights[key], value) for key, value in base.named_parameters()}
    equal = {part: [kept[key] for key in kept if vision_part(key, parts) == part] for part in (*parts, None)}
    assert all(equal[FREEZE_PROJECTOR])
    assert not all(equal[FREEZE_TOWER])
    assert not any(equal[None])
    answer = model.generate(**inputs_of(output / "model", name, place / "pictures/1-0.png"), max_new_tokens=4)
    assert answer.shape[1] > 4
    assert 'AutoModelForImageTextToText.from_pretrained("model"' in (output / "README.md").read_text()


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"init_lora_weights": "eva"}, "init_lora_weights"),
        ({"modules_to_save": ["multi_modal_projector"]}, "modules_to_save.*freeze_multi_modal_projector"),
    ],
)
def test_runs_that_do_not_train_on_images_are_refused(keys, key, tmp_path):
    place = write_place(tmp_path, "gemma3")
    with pytest.raises(ConfigError, match=key):
        train(configured(place, tmp_path / "out", **keys))
    assert not (tmp_path / "out").exists()


def test_check_refuses_several_processes(tmp_path):
    place = write_place(tmp_path, "gemma3")
    with pytest.raises(ConfigError, match="parallel"):
        prepare_run(configured(place, tmp_path / "out", parallel={"data": 2}), writes=False)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("qwen2_5_vl", {"assistant_only_loss": False}), ("llava_onevision", {}), ("llava_onevision", {"packing": True})],
)
def test_a_sample_and_the_plan_show_whole_images(name, keys, tmp_path):
    """Of a row that trains every token, and where images have other tokens in rows with several."""
    place = write_place(tmp_path, name)
    names = ("pictures/4-0.png", "pictures/5-0.png")
    turns = [[{"role": "user", "content": [{"type": "image", "image": file}, {"type": "text", "text": "look"}]},
              {"role": "assistant", "content": "I see."}] for file in names]  # fmt: skip
    rows = [turns[0] + turns[1], [{"role": "user", "content": "look at this picture: <image>"}, turns[0][1]]]
    lines = [{"messages": rows[0]}, {"messages": rows[1], "images": names[:1]}]
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, lines[: 1 if name == "llava_onevision" else 2])))
    run = prepare_run(configured(place, tmp_path / "out", load_in_4bit=False, **keys), writes=False)
    prompts = pick_prompts(run.config, run.tokenizer, run.data.train, templated=True)
    assert prompts
    assert all("pixel_values" in prompt.image_inputs for prompt in prompts if prompt.images)


def test_a_row_cut_to_one_image_is_dropped_if_the_image_has_other_tokens_alone(tmp_path):
    place = write_place(tmp_path, "llava_onevision")
    user = {"role": "user", "content": [{"type": "image", "image": "pictures/4-0.png"}]}
    turns = [user, {"role": "assistant", "content": "I see."}]
    (place / "data.jsonl").write_text(json.dumps({"messages": turns * 2}))
    config = configured(place, tmp_path / "out", max_length=120)
    with pytest.raises(DataError, match="max_length"):
        prepare(config, load_run_tokenizer(config))


def test_preview_counts_the_tokens_of_images(tmp_path, capsys):
    place = write_place(tmp_path, "gemma3")
    preview_rows(configured(place, tmp_path / "out"), 3)
    assert capsys.readouterr().out.count("[image: 4 tokens]") == 3
