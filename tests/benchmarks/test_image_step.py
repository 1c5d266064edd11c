"""benchmarks.image_step on a CPU: rows of equal lengths with and without pictures, and the tower's measurement."""

import json

import pytest

from benchmarks import image_models, image_step


def place_of(folder, *words):
    options = image_step.parser().parse_args([*words, "--tiny", "--device", "cpu", "--work", str(folder)])
    return image_step.Place(options)


def test_text_rows_have_as_many_tokens_as_rows_with_pictures(tmp_path):
    place = place_of(tmp_path, "cache")
    folder = tmp_path / "model"
    image_models.write_model(folder, image_models.SHAPES["qwen2.5-vl-7b"], 1, True, None)
    data = place.rows("cache", 1)
    row = image_step.prepared(place.config(folder, data))[2][0]
    extra = row["images"][0]["tokens"] + image_step.AROUND_IMAGE
    texts = image_models.write_text_rows(tmp_path, image_step.CHARACTERS, 1, extra)
    text = image_step.prepared(place.config(folder, texts))[2][0]
    assert len(text["input_ids"]) == len(row["input_ids"]) > image_step.CHARACTERS
    assert sum(label >= 0 for label in text["labels"]) == sum(label >= 0 for label in row["labels"])


def test_uneven_numbers_stay_within_limits():
    numbers = image_models.uneven(200, 100, seed=1)
    assert (min(numbers), max(numbers)) == (25, 200)
    assert numbers == image_models.uneven(200, 100, seed=1)


@pytest.mark.slow
def test_the_tower_gives_the_features_of_the_loop(tmp_path):
    words = ["tower", "--tiny", "--device", "cpu", "--steps", "1", "--work", str(tmp_path)]
    image_step.main([*words, "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["relative_difference"] < 1e-2
    assert {"LoRA, PEFT", "LoRA, halfbyte"} <= result["runs"].keys()
    assert result["runs"]["int8"]["sqnr_db"] > result["runs"]["nf4"]["sqnr_db"] > 10
