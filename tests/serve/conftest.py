"""Folders of a tiny model and of its adapters."""

import pytest
import torch

from tests.helpers.serve_tiny import byte_tokenizer, random_adapter, random_model


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    random_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(base_folder, tmp_path_factory):
    """Folders of two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: random_adapter(base_folder, folder / name, seed) for seed, name in enumerate(("poet", "clerk"))}
