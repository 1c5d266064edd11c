"""Fuzzed headers of weight files, indices and configs raise only halfbyte's errors, quickly.

20 inputs of each kind always; 10,000 where slow tests run (HALFBYTE_FUZZ says how many instead).
"""

import copy
import json
import os
import resource
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.adapters.lora import create_adapter, saved_adapter_config
from halfbyte.config import Origin
from halfbyte.loading.find import find_model
from halfbyte.reading.tensors import ADAPTER, ADAPTER_CONFIG, check_checkpoint, read_tensors
from halfbyte.utils.errors import HalfbyteError
from halfbyte.utils.notices import silent

FEW, MANY = 20, int(os.environ.get("HALFBYTE_FUZZ", "10000"))
SECONDS, MEBIBYTES = 1.0, 1024  # of one input; CPU time, for the machine may be busy
COUNTS = [
    pytest.param(FEW, id="few"),
    pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
]

NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 5, 64, 2**16, 2**31, 2**32 - 1, 2**53, 2**62, 2**63, 10**30])
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
EDITS = st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["set", "insert", "cut", "end"]), st.binary(max_size=9)),
                 max_size=4)  # fmt: skip


def edited(data: bytes, edits: list[tuple[float, str, bytes]], upto: int | None = None) -> bytes:
    """`data` with bytes overwritten, inserted, removed or truncated; positions are shares of `upto`."""
    for share, kind, new in edits:
        at = int(share * min(upto or len(data), len(data)))
        ends = {"set": at + len(new), "insert": at, "cut": at + len(new), "end": len(data)}
        data = data[:at] + (b"" if kind in ("cut", "end") else new) + data[ends[kind] :]
    return data


@st.composite
def documents(draw: Callable, base: Any) -> bytes:
    """JSON like `base`, with changed or missing values, keys and entries, sometimes with damaged text."""
    root: dict[str, Any] = {"": copy.deepcopy(base)}
    for _ in range(draw(st.integers(1, 3))):
        node: Any = root
        key: Any = ""
        while isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 3)):
            node = node[key]
            key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
        change = draw(st.sampled_from(["value", "value", "value", "gone", "again"]))
        if change == "value" or node is root:
            node[key] = draw(VALUES)
        elif change == "gone":
            del node[key]
        elif isinstance(node, dict):
            node[draw(st.text(max_size=8))] = node[key]
    text = json.dumps(root[""]).encode()
    return edited(text, draw(EDITS)) if draw(st.integers(0, 9)) == 0 else text


def fuzz(count: int, inputs: st.SearchStrategy, call: Callable[[Any], None], allowed: Callable[[str], bool]) -> None:
    """Call with `count` inputs; allows only halfbyte's errors, within the time limit."""
    most, said = SimpleNamespace(seconds=0.0, what=None), list[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def once(given_: Any) -> None:
        started = time.process_time()
        try:
            with warnings.catch_warnings(), silent():
                warnings.simplefilter("ignore")
                call(given_)
        except HalfbyteError as error:
            said.append(str(error))
        if (took := time.process_time() - started) > most.seconds:
            most.seconds, most.what = took, given_

    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    rules = settings(
        max_examples=count, deadline=None, database=None, derandomize=count == FEW, suppress_health_check=quiet
    )
    rules(given(inputs)(once))()
    assert [error for error in said if not allowed(error)] == []
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert most.seconds <= SECONDS, f"{most.seconds:.2f} s for {most.what!r:.2000}"
    assert grown <= MEBIBYTES, f"{grown:.0f} MiB"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's folder, its state and config: 2 layers of 32."""
    folder = tmp_path_factory.mktemp("fuzz")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.save_pretrained(folder)
    find_model(Origin(str(folder)))  # what is imported is not counted
    return SimpleNamespace(folder=folder, model=made, config=json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("count", COUNTS)
def test_safetensors_headers(count, tmp_path):
    file = tmp_path / "model.safetensors"
    matrix, vector = torch.zeros(3, 2), torch.zeros(4, dtype=torch.bfloat16)
    tensors = {"a": matrix, "b": vector, "c": torch.zeros(0), "d": torch.ones(())}
    save_file(tensors, file, metadata={"format": "pt"})
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    body = data[8 + length :]

    def written(made: tuple[bytes, bool, list]) -> None:
        header, raw, edits = made
        whole = len(header).to_bytes(8, "little") + header + body
        file.write_bytes(edited(data, edits) if raw else whole)
        read_tensors(file)

    header = json.loads(data[8 : 8 + length])
    fuzz(count, st.tuples(documents(header), st.booleans(), EDITS), written, lambda error: str(file) in error)


@pytest.mark.parametrize("count", COUNTS)
def test_indices(count, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    file = tmp_path / "model.safetensors.index.json"
    index = {"metadata": {"total_size": 24}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}

    def written(text: bytes) -> None:
        file.write_bytes(text)
        check_checkpoint(tmp_path)

    fuzz(count, documents(index), written, lambda error: str(tmp_path) in error)


@pytest.mark.parametrize("count", COUNTS)
def test_adapter_configs(count, model, tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 3}, task_type="CAUSAL_LM")
    get_peft_model(copy.deepcopy(model.model), lora).save_pretrained(tmp_path)
    file = tmp_path / ADAPTER_CONFIG
    base = json.loads(file.read_text())
    assert (tmp_path / ADAPTER).is_file()

    def written(text: bytes) -> None:
        file.write_bytes(text)
        create_adapter(copy.deepcopy(model.model), saved_adapter_config(tmp_path), tmp_path, autocast=False)

    fuzz(count, documents(base), written, lambda error: str(tmp_path) in error)


@pytest.mark.parametrize("count", COUNTS)
def test_model_configs(count, model):
    file = model.folder / "config.json"

    def written(text: bytes) -> None:
        file.write_bytes(text)
        find_model(Origin(str(model.folder)))

    try:
        fuzz(count, documents(model.config), written, lambda error: "config" in error)
    finally:
        file.write_text(json.dumps(model.config))


@pytest.mark.parametrize("count", COUNTS)
def test_gguf_files(count, tmp_path):
    gguf_models = pytest.importorskip("tests.helpers.gguf_models")
    from halfbyte.export.gguf_model import export_gguf
    from halfbyte.gguf.importer import import_gguf
    from halfbyte.reading.gguf import read_head

    gguf_models.save_model(tmp_path / "model", "llama")
    sound = tmp_path / "sound.gguf"
    export_gguf(tmp_path / "model", "q4_0", sound, device="cpu")
    data, file = sound.read_bytes(), tmp_path / "m.gguf"
    import_gguf(sound, tmp_path / "out")
    head = min(tensor.start for tensor in read_head(sound).tensors)
    words = st.sampled_from([0, 1, 8, 9, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]).map(
        lambda n: n.to_bytes(8, "little")
    )
    kinds = st.sampled_from(["set", "set", "set", "insert", "cut", "end"])
    new = words | words.map(lambda word: word[:4]) | st.binary(max_size=2)
    edits = st.lists(st.tuples(st.floats(0, 1), kinds, new), max_size=3)

    def written(changes: list) -> None:
        file.write_bytes(edited(data, changes, head))
        import_gguf(file, tmp_path / "out")

    fuzz(count, edits, written, lambda error: str(file) in error)
