"""Sizes of decoder layers, of configs that give each layer its own, and whole runs that plan with them."""

from types import SimpleNamespace

import pytest
import transformers

from halfbyte.config import Parallel, load_config
from halfbyte.modeling.config_facts import LayerSizes, layer_sizes, max_layer_sizes
from halfbyte.plan.costs import LayerCost
from halfbyte.plan.rank import rank_config
from halfbyte.train.run import train
from halfbyte.utils.errors import ModelError
from tests.helpers.tiny_cases import FAMILIES, SIZES, Case, Place, write_model

PLAIN = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def config(family, **keys):
    return getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | keys)


def test_every_layer_has_its_sizes():
    narrow, wide = LayerSizes(4, 2, 16, 128), LayerSizes(4, 2, 32, 128)
    assert layer_sizes(config("Gemma4Text")) == [narrow, wide, narrow, wide]
    assert max_layer_sizes(config("Gemma4Text")) == wide
    text = config("Gemma3nText", intermediate_size=[128, 64, 256, 32])
    assert [layer.mlp_width for layer in layer_sizes(text)] == [128, 64, 256, 32]
    assert max_layer_sizes(text) == LayerSizes(4, 2, 16, 256)
    assert layer_sizes(config("Llama")) == [narrow, narrow]


def test_key_heads_of_a_layer():
    text = config("Gemma4Text", attention_k_eq_v=True, num_global_key_value_heads=1)
    assert [layer.key_heads for layer in layer_sizes(text)] == [2, 1, 2, 1]
    assert max_layer_sizes(text).key_heads == 2


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, LayerSizes(4, 4, 16, 0)),
        ({"head_dim": None, "num_key_value_heads": 2}, LayerSizes(4, 2, 16, 0)),
        ({"num_attention_heads": None, "intermediate_size": 8}, LayerSizes(0, 0, 0, 8)),  # no attention
    ],
)
def test_what_a_config_does_not_name(keys, expected):
    assert max_layer_sizes(SimpleNamespace(**PLAIN | keys)) == expected


@pytest.mark.parametrize("family", ["Gemma3nText", "Gemma4Text"])
def test_costs_and_shares_of_layers_that_differ(family):
    text = config(family)
    cost = LayerCost.of(text, rows=1, length=8, replayed={})
    width = 32 if family == "Gemma4Text" else 16
    assert (cost.inner, cost.queries, cost.keys) == (128, 4 * width, 2 * width)
    share = max_layer_sizes(rank_config(text, Parallel(tensor=2)))
    assert (share.heads, share.key_heads, share.head_dim, share.mlp_width) == (2, 1, width, 64)


def test_sizes_that_contradict_each_other(tmp_path):
    """Helium's heads of 128 by default, four of which are wider than its output projection of 64."""
    workspace = Place(tmp_path)
    workspace.write_rows()
    write_model(tmp_path / "Helium-0", "Helium", head_dim=128)
    with pytest.raises(ModelError):
        train(load_config(None, workspace.keys(Case("", "Helium"), tmp_path / "run")))
    assert not (tmp_path / "run/adapter").exists()
