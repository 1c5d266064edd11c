"""Checkpoints of other tools through the loader: their values are kept, adapters train on them, merging reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import Origin, RunConfig
from halfbyte.export.merge import merge
from halfbyte.formats.base import entry_name
from halfbyte.loading.checkpoint import BaseCheckpoint
from halfbyte.loading.find import find_model
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError
from tests.helpers.merge_runs import save_base, train_run
from tests.helpers.tool_files import COMPRESSED, PACKED_HERE, packed_gptq, packed_torchao

COMPRESSED_NAMES = (
    "pack-quantized 3",
    "pack-quantized 8, channels",
    "fp8, tensor",
    "fp8, channels",
    "fp8, blocks",
    "nvfp4",
    "mxfp4",
)
MAKERS = PACKED_HERE | {name: COMPRESSED[name] for name in COMPRESSED_NAMES}
FLOAT = "model.layers.1.mlp.up_proj.weight"  # this layer stays in 16 bits
each_tool = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def converted(base, folder, make, floats=(), damage=lambda name, entries: entries, **config):
    """Checkpoint whose linears of decoder layers are stored by `make`; returns what was made by name."""
    folder.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = {name: value for path in base.glob("*.safetensors") for name, value in load_file(path).items()}
    weights, entry = {}, {}
    torch.manual_seed(7)
    for name in [name for name in tensors if name.endswith("proj.weight") and name not in floats]:
        weights[name] = made = make(tensors.pop(name))
        entry = made.config
        stored = damage(name, {entry_name(name, suffix): value for suffix, value in made.entries.items()})
        tensors |= {key: value.contiguous() for key, value in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text()) | {"quantization_config": entry | config}
    (folder / "config.json").write_text(json.dumps(stated))
    return weights


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "base", initializer_range=0.05)


@pytest.mark.sampled(3)
@each_tool
def test_values_are_kept_and_the_loss_falls(base, tmp_path, make):
    weights = converted(base, tmp_path / "model", make, floats=(FLOAT,))
    model = load_model(str(tmp_path / "model"), device="cpu", dtype="float32")
    for name, made in weights.items():
        assert isinstance(model.get_parameter(name), QuantizedTensor), name
        made.check(model.get_parameter(name))
    assert type(model.get_parameter(FLOAT)) is torch.nn.Parameter
    read = BaseCheckpoint(Origin(str(tmp_path / "model")))
    for stored in read.weights:  # merging reads these
        if stored.entries:
            assert torch.equal(read.read(stored), model.get_parameter(stored.name).dequantize(torch.float32))
    model.save_pretrained(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"), device="cpu", dtype="float32")
    tokens = torch.arange(5, 45).view(2, 20)
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)
    adapted = add_adapter(model, RunConfig(model_name_or_path="m", dataset="d", r=8, device="cpu")).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gptq_v2 3, act-order", "hqq 5", "aqlm 2x8", "torchao int8", "nvfp4", "fp8, channels"]
)
def test_a_run_is_checked_trained_and_merged(base, tmp_path, name):
    converted(base, tmp_path / "model", MAKERS[name])
    run = train_run(tmp_path / "run", tmp_path / "model", max_steps=4)
    assert json.loads((run / "checks.json").read_text())["adapter_reload"]["equal"]
    assert merge(run, tmp_path / "merged").target == "dequantized"


# ---- bad input, before any weight is read


def poisoned(part):
    def damage(name, entries):
        if name == FLOAT:
            key = next(key for key in entries if key.endswith(part))
            entries[key].view(-1)[3] = float("nan")
        return entries

    return damage


@pytest.mark.parametrize(
    ("name", "part"),
    [("gptq 3", ".scales"), ("hqq 4", ".zero"), ("aqlm 2x8", ".codebooks"), ("torchao int8", "_scale"),
     ("fp8, channels", ".weight_scale"), ("pack-quantized 3", ".weight_scale")],
)  # fmt: skip
def test_nan_is_named_before_loading(base, tmp_path, name, part):
    converted(base, tmp_path / "model", MAKERS[name], damage=poisoned(part))
    with pytest.raises(CheckpointError) as raised:
        find_model(Origin(str(tmp_path / "model")))
    assert "layers.1.mlp.up_proj" in raised.value.message


def test_widths_of_a_file_may_differ(base, tmp_path):
    widths = iter([2, 3, 8, 4, 8, 3, 2] * 2)
    weights = converted(base, tmp_path / "model", lambda weight: packed_gptq(next(widths))(weight), bits=4)
    model = load_model(str(tmp_path / "model"), device="cpu", dtype="float32")
    for name, made in weights.items():
        made.check(model.get_parameter(name))


def wrapped(name, entries):
    return entries | {key: torch.full_like(value, -1) for key, value in entries.items() if key.endswith("qzeros")}


@pytest.mark.parametrize("bits", [3, 4])
def test_zeros_that_wrap_are_named(base, tmp_path, bits):
    converted(base, tmp_path / "model", packed_gptq(bits, act_order=True), damage=wrapped)
    with pytest.raises(CheckpointError) as raised:
        find_model(Origin(str(tmp_path / "model")))
    assert "qzeros" in raised.value.message
    assert "gptq_v2" in raised.value.fix


def test_groups_that_are_too_small_are_named(base, tmp_path):
    converted(base, tmp_path / "model", packed_torchao(-8, 7, 16))
    with pytest.raises(CheckpointError) as raised:
        find_model(Origin(str(tmp_path / "model")))
    assert "_weight_qdata" in raised.value.message
