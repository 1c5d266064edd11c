"""Shared fixtures: where the real data lies, tiny models, and the seed."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(os.environ.get("HALFBYTE_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real weights, tokenizers and datasets; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no real data at {SHARED} (set HALFBYTE_SHARED)")
    return SHARED


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="module")
def in_float32():
    """A model whose dtype nobody names computes in float32, whatever this machine is fast in.

    For tests that compare what is generated: in bfloat16 the two likeliest tokens are often within a rounding of each
    other, and a row alone and in a batch, or another way to sum, takes either.
    """
    import torch

    from halfbyte.hardware import ComputeDtype

    with pytest.MonkeyPatch.context() as patch:
        chosen = ComputeDtype(torch.float32, "as the test asks")
        patch.setattr("halfbyte.models.load.compute_dtype", lambda device: chosen)
        yield


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A function from a family's name to the folder of a tiny random model of it, in several safetensors shards."""
    import torch
    import transformers

    made = {}

    def make(family="Llama", dtype="float32", **keys) -> Path:
        key = (family, dtype, *sorted(keys.items()))
        if key not in made:
            torch.manual_seed(len(family))
            config = getattr(transformers, f"{family}Config")(**(TINY | keys))
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            for parameter in model.parameters():  # HF starts norms at one and biases at zero: make them matter
                parameter.data += 0.02 * torch.randn_like(parameter)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder, max_shard_size="100KB")
            made[key] = folder
        return made[key]

    return make
