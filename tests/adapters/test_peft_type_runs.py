"""Runs with `peft_type` and `peft_config`: trained, resumed, reloaded by plain PEFT, merged, or refused by name."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel, PeftType
from typer.testing import CliRunner

from halfbyte.adapter_kinds import ADAPTERS, UNTRAINED_TYPES
from halfbyte.adapters.lora import add_adapter
from halfbyte.cli import app
from halfbyte.config import RunConfig, load_config
from halfbyte.loading.load import load_model
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.patch import patch
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import finetune
from halfbyte.utils.errors import ConfigError, ModelError
from tests.adapters.test_peft_types import IDS
from tests.adapters.test_peft_types import base as quantized_llama
from tests.helpers.merge_runs import by_peft, save_base_and_sums, tensors

OPTIONS = {
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "DELORA": {"r": 4},
    "FOURIERFT": {"n_frequency": 50},
    "HIRA": {"r": 4},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LILY": {"r": 4},
    "MISS": {"r": 4},
    "PEANUT": {"r": 4},
    "PSOFT": {"r": 8},
    "RANDLORA": {"r": 8},
    "ROAD": {"group_size": 16},
    "TINYLORA": {"u": 8},
    "UNILORA": {"theta_d_length": 64},
    "VBLORA": {"r": 2, "num_vectors": 16, "vector_length": 16},
    "VERA": {"r": 8},
    "WAVEFT": {"n_frequency": 50},
}
ROWS = {row.peft_type: row for row in ADAPTERS if row.peft_type != "LORA"}
# Types whose file lacks tensors that PEFT computes when it adds the adapter; `halfbyte merge` refuses them.
COMPUTED = {"BOFT", "PSOFT", "UNILORA"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_base_and_sums(tmp_path_factory.mktemp("base"))


def train(folder, output, peft_type, **keys):
    keys = {"learning_rate": 0.01, "max_steps": 2, "device": "cpu", "dtype": "float32"} | keys
    keys |= {"per_device_train_batch_size": 4, "max_length": 32, "sample_prompts": 0}
    options = OPTIONS.get(peft_type.upper())
    run = finetune(
        str(folder / "model"), str(folder / "data.txt"), output_dir=str(output), peft_type=peft_type,
        peft_config=options, **keys,
    )  # fmt: skip
    return run.output_dir


@pytest.mark.sampled(9)
@pytest.mark.parametrize("peft_type", ROWS)
def test_plain_peft_computes_what_a_run_trained_and_merge_keeps_it(folder, peft_type, tmp_path):
    run = train(folder, tmp_path / "run", peft_type)
    loaded, ids = load_saved(str(run), ["device=cpu"]), torch.arange(1, 17)[None]
    plain = load_model(str(folder / "model"), device="cpu", dtype="float32")
    plain.dequantize()
    with torch.no_grad():
        untrained = plain(ids).logits
        expected = PeftModel.from_pretrained(plain, run / "adapter").eval()(ids).logits
        torch.testing.assert_close(loaded.model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untrained).abs().max() > 1e-4

    merged = CliRunner().invoke(app, ["merge", str(run), str(tmp_path / "merged")])
    if ROWS[peft_type].unmergeable or peft_type in COMPUTED:
        assert merged.exit_code == 1
        assert not (tmp_path / "merged").exists()
        return
    assert merged.exit_code == 0, merged.output


def test_a_merge_is_pefts_own(folder, tmp_path):
    run = train(folder, tmp_path / "run", "ia3")
    merged = CliRunner().invoke(app, ["merge", str(run), str(tmp_path / "merged"), "--base", "original"])
    assert merged.exit_code == 0, merged.output
    expected = by_peft(run, folder / "model", "original")
    for name, tensor in tensors(tmp_path / "merged").items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"peft_type": "c3a", "peft_config": {"block_size": 7}},
        {"peft_type": "vera", "peft_config": {"r": 0}},
        {"peft_type": "vera", "peft_config": {"r": -1}},
        {"peft_type": "fourierft", "target_modules": ["embed_tokens"]},
    ],
    ids=str,
)
def test_options_and_modules_that_peft_cannot_build_are_refused_by_name(folder, tmp_path, keys):
    with pytest.raises(ModelError, match="peft_type"):
        finetune(str(folder / "model"), str(folder / "data.txt"), output_dir=str(tmp_path), device="cpu", **keys)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("activations", ["keep", "recompute", "checkpoint"])
@pytest.mark.parametrize("peft_type", ROWS)
def test_fused_forwards_leave_its_modules_to_peft(peft_type, activations):
    keys = {"model_name_or_path": "m", "dataset": "d", "peft_type": peft_type, "peft_config": OPTIONS.get(peft_type)}
    model = add_adapter(quantized_llama(), RunConfig(**keys)).train()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.05 * torch.randn_like(parameter))

    def step():
        model.zero_grad()
        loss, _ = causal_lm_loss(model, {"input_ids": IDS, "labels": IDS})
        loss.backward()
        return loss.detach(), {name: parameter.grad for name, parameter in trained.items()}

    loss, expected = step()
    patch(model, activations=activations)
    fused_loss, gradients = step()
    torch.testing.assert_close(fused_loss, loss)
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4 * scale + 1e-8)


def load(**keys):
    return load_config(None, {"model_name_or_path": "m", "dataset": "d"} | keys)


@pytest.mark.parametrize("peft_type", UNTRAINED_TYPES)
def test_types_that_a_run_does_not_train_are_refused_with_the_reason(peft_type):
    with pytest.raises(ConfigError, match="peft_type") as refused:
        load(peft_type=peft_type.lower())
    assert UNTRAINED_TYPES[peft_type][0] in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"peft_type": "loha", "peft_config": {"rr": 4}}, "did you mean r"),
        ({"peft_type": "loha", "peft_config": {"r": "4"}}, "peft_config: {r: '4'}"),
        ({"peft_type": "loha", "peft_config": {"r": True}}, "peft_config: {r: True}"),
        ({"peft_type": "loha", "peft_config": {"target_modules": ["q_proj"]}}, "target_modules is a key of the run"),
        ({"peft_type": "loha", "peft_config": {"task_type": "SEQ_CLS"}}, "task_type"),
        (
            {
                "peft_type": "delora",
                "layers_to_transform": [0],
                "target_modules": ["q_proj"],
                "peft_config": {"r": "a"},
            },
            "peft_config",
        ),
        (
            {"peft_type": "ia3", "target_modules": ["q_proj"], "peft_config": {"feedforward_modules": ["up_proj"]}},
            "up_proj|subset",
        ),
        ({"peft_type": "vera", "r": 8}, r"set peft_config: {r: 8}"),
        ({"peft_type": "vera", "lora_alpha": 8}, "lora_alpha"),
        ({"peft_type": "vera", "qat_scheme": "int4", "load_in_4bit": False}, "peft_type"),
        ({"peft_type": "vera", "parallel": {"shard": 2}}, "peft_type"),
        ({"peft_config": {"r": 4}}, "peft_config"),
    ],
)
def test_options_that_peft_does_not_have_are_refused_before_loading(keys, named):
    with pytest.raises(ConfigError, match=named):
        load(**keys)


def test_llama_factorys_section_of_this_name_is_still_read():
    config = load(peft_config={"name": "lora", "r": 4})
    assert config.r == 4
    assert config.peft_config is None


def test_every_type_of_peft_is_trained_or_refused():
    assert {row.peft_type for row in ADAPTERS} | {*UNTRAINED_TYPES} == {peft_type.value for peft_type in PeftType}


def table():
    """Rows of the table in docs/adapters.md."""
    for row in ADAPTERS:
        if row.switch or row.peft_type == "LORA":
            continue
        merged = f"no: {row.unmergeable}" if row.unmergeable else "by PEFT" if row.peft_type in COMPUTED else "yes"
        yield f"| `{row.peft_type.lower()}` | {row.name} | {merged} |"
    for peft_type, (reason, _) in UNTRAINED_TYPES.items():
        yield f"| `{peft_type.lower()}` | {reason} |"


def test_the_guide_lists_every_type():
    guide = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    assert [row for row in table() if row not in guide] == []
