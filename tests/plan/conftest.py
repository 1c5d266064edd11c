"""Shared fixtures of the plan tests."""

import pytest

from tests.helpers.planned_steps import layer_of


@pytest.fixture(scope="module")
def layer_8b():
    return layer_of("Llama", 4, 2048)
