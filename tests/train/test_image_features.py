"""Features of images that are computed once: a run with them equals a run without, and what misses the cache."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from halfbyte.config import load_config
from halfbyte.data.image_features import feature_columns
from halfbyte.data.image_processor import ImageProcessor
from halfbyte.formats.float8 import quantize_float8
from halfbyte.loading.load import load_model
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.vision import image_outputs, reading_features, release_tower
from halfbyte.train import image_features
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils.console import Console
from halfbyte.utils.errors import ConfigError, ModelError, TrainingError
from tests.helpers.image_models import picture, save_image_model, write_image_rows

KEYS = {"max_steps": 4, "per_device_train_batch_size": 4, "load_in_4bit": False}  # two epochs of eight rows
UNFROZEN = {"freeze_vision_tower": False}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    save_image_model(tmp_path / "model", "qwen3_vl")
    write_image_rows(tmp_path)
    return tmp_path


def configured(place, output="out", **keys):
    keys = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"), "r": 4, "device": "cpu",
            "output_dir": str(place / output), "dtype": "float32", "max_length": 400} | KEYS | keys  # fmt: skip
    return load_config(None, keys)


def cached(place):
    return sorted((place / "cache" / "image-features").rglob("*.safetensors"))


def prepared(place, **keys):
    run = prepare_run(configured(place, **keys), writes=False)
    return run, load_model(str(place / "model"), load_in_4bit=False, device="cpu", dtype="float32")


def filled(place, **keys):
    """Fill the cache of a run; its model, the layout, and the numbers for checks.json."""
    run, model = prepared(place, **keys)
    cache = image_features._Cache(run, model, [run.data.train])
    return (cache, model, *cache.fill(Console(quiet=True)))


@pytest.mark.slow
def test_a_run_with_features_equals_a_run_without(place):
    """The features of the second run are the first one's; also a resumed run reads them."""
    for name, keys in (("without", {"vision_cache": False}), ("with", {}), ("again", {"vision_cache": True})):
        train(configured(place, name, **keys, eval_split_size=2, save_steps=2, save_total_limit=None))
    adapters = [load_file(place / name / "adapter/adapter_model.safetensors") for name in ("without", "with", "again")]
    for key, value in adapters[1].items():
        assert torch.equal(adapters[2][key], value)
        torch.testing.assert_close(adapters[0][key], value, rtol=1e-3, atol=1e-5)  # a batch of images rounds otherwise
    computed = [json.loads((place / name / "checks.json").read_text()).get("image_features") for name in
                ("without", "with", "again")]  # fmt: skip
    assert computed[0] is None
    assert (computed[1]["images"], computed[1]["computed"], computed[2]["computed"]) == (7, 7, 0)
    shutil.rmtree(place / "with" / "checkpoint-4")
    train(configured(place, "with", eval_split_size=2), resume=str(place / "with" / "checkpoint-2"))
    resumed = load_file(place / "with" / "adapter/adapter_model.safetensors")
    assert all(torch.equal(resumed[key], value) for key, value in adapters[1].items())


def test_features_are_bits_of_the_tower_and_give_the_loss_of_pixels(place, monkeypatch):
    cache, model, layout, numbers = filled(place)
    assert numbers["computed"] == len(cached(place)) == 7
    processor = ImageProcessor(cache.run.config, cache.run.tokenizer)
    for key, image in cache.images.items():
        with torch.no_grad():
            _, features = image_outputs(model, processor.image_columns(image))
        stored = load_file(cache.file(key))
        assert torch.equal(stored["features"], features)
        assert features.shape == (image["tokens"], 3 * 64)  # two layers of deepstack
    rows = [*cache.run.data.train]
    collate = cache.run.method.collator(cache.run.config, cache.run.tokenizer)
    expected = causal_lm_loss(model, collate(rows))[0]
    monkeypatch.setattr("halfbyte.data.image_processor.opened", None)  # nothing is decoded
    batch = collate([*cache.named(cache.run.data.train)])
    with reading_features(model, layout):
        release_tower(model)
        assert not any("visual" in name for name, _ in model.named_parameters())
        assert causal_lm_loss(model, batch)[0].item() == pytest.approx(expected.item(), rel=1e-6)
    images = [image for row in cache.named(cache.run.data.train)["images"] for image in row]
    assert torch.equal(batch["image_grid_thw"], feature_columns(images)["image_grid_thw"])


def test_features_in_fp8_take_half_of_16_bits(place, monkeypatch):
    """31 dB above their error; in a folder of their own; larger errors than rounding are refused."""
    exact, model, layout, exact_numbers = filled(place)
    cache, _, _, numbers = filled(place, vision_cache="fp8")
    assert cache.folder != exact.folder
    assert numbers["computed"] == 7
    assert exact_numbers["difference"] < 1e-6 < 1e-3 < numbers["difference"] < 0.05
    for key, image in cache.images.items():
        stored = load_file(cache.file(key))
        assert stored["features"].nbytes + stored["features_scale"].nbytes == image["tokens"] * (3 * 64 + 4)  # float32
    images = [[image for row in each.named(each.run.data.train)["images"] for image in row] for each in (exact, cache)]
    features, rounded = (feature_columns(each)["pixel_values"] for each in images)
    assert rounded.dtype == features.dtype
    assert features.square().sum() / (features - rounded).square().sum() > 10**3.1
    collate = cache.run.method.collator(cache.run.config, cache.run.tokenizer)
    with reading_features(model, layout):
        losses = [causal_lm_loss(model, collate([*each.named(each.run.data.train)]))[0] for each in (exact, cache)]
    assert losses[1].item() != losses[0].item()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-2)
    shutil.rmtree(cache.folder)
    monkeypatch.setattr(
        "halfbyte.data.image_features.quantize_float8", lambda x, scaling: quantize_float8(2 * x, scaling)
    )
    with pytest.raises(ModelError, match="vision_cache"):
        filled(place, vision_cache="fp8")


def test_a_changed_pixel_size_tower_or_limit_misses_the_cache(place):
    filled(place)
    changes = [
        lambda: picture(10, 69, 70).save(place / "pictures/1-0.png"),
        lambda: Image.open(place / "pictures/1-0.png").resize((80, 60)).save(place / "pictures/1-0.png"),
    ]
    for count, change in enumerate(changes, 8):
        change() if count == 9 else _change_pixel(place / "pictures/1-0.png")
        assert filled(place)[3]["computed"] == 1
        assert len(cached(place)) == count
    assert filled(place, image_max_pixels=64**2)[3]["computed"] == 7
    model = load_model(str(place / "model"), load_in_4bit=False, device="cpu", dtype="float32")
    model.model.visual.blocks[0].attn.qkv.bias.data[3] += 1
    model.save_pretrained(place / "model")
    assert filled(place)[3]["computed"] == 7


def _change_pixel(path):
    image = Image.open(path)
    image.putpixel((3, 3), tuple(255 - value for value in image.getpixel((3, 3))))
    image.save(path)


def test_damaged_files_are_computed_again(place):
    filled(place)
    first, second, *_ = cached(place)
    first.write_bytes(first.read_bytes()[:-9])
    second.unlink()
    assert filled(place)[3]["computed"] == 2


@pytest.mark.parametrize("is_full", [True, False], ids=["a full disk", "no folder"])
def test_a_cache_that_cannot_be_written_stops_the_run_or_is_left_out(is_full, place, monkeypatch):
    class Full:
        total, free = 10**9, 1000

    if is_full:
        monkeypatch.setattr("halfbyte.utils.files.shutil.disk_usage", lambda folder: Full)
    else:
        monkeypatch.setenv("HALFBYTE_CACHE", str(place / "data.jsonl"))
    for chosen in ("auto", True):
        run, model = prepared(place, vision_cache=chosen)
        context = image_features.with_features(run, model, run.data.train, None, Console(quiet=True))
        if chosen is True:
            with pytest.raises(TrainingError, match="HALFBYTE_CACHE" if is_full else "data.jsonl"):
                context.__enter__()
            continue
        with context as (rows, _, results):
            assert results is None
            assert rows is run.data.train
    assert not cached(place)


def test_auto_caches_frozen_features_for_two_epochs(place):
    cases = (
        ({}, True),
        ({"max_steps": 3}, False),
        ({"max_steps": 1, "vision_cache": True}, True),
        ({"max_steps": 1, "vision_cache": "fp8"}, True),
        ({"freeze_vision_tower": False}, False),
        ({"vision_cache": False}, False),
    )
    for keys, caches in cases:
        assert prepare_run(configured(place, **keys), writes=False).caches_features == caches, keys
    for keys in (UNFROZEN | {"vision_cache": True}, UNFROZEN | {"vision_cache": "fp8"}, {"vision_cache": "fp4"}):
        with pytest.raises(ConfigError, match="vision_cache"):
            configured(place, **keys)


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_rows_without_images_may_be_beside_rows_with_features(key, place):
    """Either split may have no image at all."""
    text = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I see."}]
    (place / "text.jsonl").write_text("\n".join([json.dumps({"messages": text})] * 4))
    keys = {"dataset": str(place / "data.jsonl"), "eval_dataset": str(place / "data.jsonl"), "vision_cache": True}
    run, model = prepared(place, **keys | {key: str(place / "text.jsonl")})
    with image_features.with_features(run, model, run.data.train, run.data.eval, Console(quiet=True)) as (*_, numbers):
        assert numbers["images"] == 7


def test_features_that_depend_on_the_row_are_left_out(tmp_path, monkeypatch):
    """An image of LLaVA-OneVision has other features in a row with several."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    save_image_model(tmp_path / "model", "llava_onevision")
    write_image_rows(tmp_path)
    for chosen in ("auto", True):
        run, model = prepared(tmp_path, vision_cache=chosen)
        context = image_features.with_features(run, model, run.data.train, None, Console(quiet=True))
        if chosen is True:
            with pytest.raises(ModelError, match="vision_cache"):
                context.__enter__()
            continue
        with context as (rows, _, numbers):
            assert (rows, numbers) == (run.data.train, None)


def test_a_processor_with_other_tokens_than_the_tower_has_features_is_refused(tmp_path):
    save_image_model(tmp_path / "model", "gemma3")
    write_image_rows(tmp_path)
    run, model = prepared(tmp_path)
    image_features.check_features(run, model)
    file = tmp_path / "model/processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_seq_length": 9}))
    run, _ = prepared(tmp_path)
    with pytest.raises(ModelError, match="processor"):
        image_features.check_features(run, model)
