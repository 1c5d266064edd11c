"""benchmarks.mmproj_answers: its models have every kind of vision part, and its figures."""

import numpy as np
import pytest

from benchmarks import mmproj_answers
from benchmarks.image_models import model_config
from benchmarks.step_peers import byte_tokenizer
from benchmarks.tiny_image_models import READERS
from halfbyte.gguf.vision import _check_config
from halfbyte.modeling.families import tower_of, towers


def test_every_kind_of_vision_part_has_a_model_that_export_takes():
    tokenizer = byte_tokenizer()
    configs = [model_config(reader.shape, None, False, tokenizer) for reader in READERS.values()]
    kinds = {id(tower) for kinds in towers().values() for tower in kinds}
    assert {id(tower_of(config)) for config in configs} == kinds
    for config in configs:
        _check_config(config, tower_of(config))


def test_figures_of_answers():
    logits = np.array([[0.0, 2.0, 1.0], [4.0, 1.0, 2.0]], dtype=np.float32)
    other = np.array([[0.0, 2.0, 1.0, 9.0], [1.0, 1.0, 2.0, 9.0]], dtype=np.float32)  # with rows that nothing writes
    rows = [{"answer": "b"}, {"answer": "c"}]
    figures = mmproj_answers.compared((logits, [4, 5]), (other, [4, 6]), rows, "abc".index)
    assert figures == {"equal": 1, "difference": 0.75, "median_difference": 0.375, "right": 1, "tokens": 1}
    assert mmproj_answers.compared((logits, [4, 5]), "aborted", rows, "abc".index) == {"error": "aborted"}


@pytest.mark.parametrize("corner", range(4))
def test_a_picture_has_its_block_in_its_corner(corner):
    image = np.asarray(mmproj_answers.picture((40, 60), 0, corner, np.random.default_rng(0)))
    corners = [image[y, x].tolist() == list(mmproj_answers.COLOURS[0]) for y in (1, -2) for x in (1, -2)]
    assert corners == [number == corner for number in range(4)]
