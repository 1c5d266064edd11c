"""Initialisations from the base's weights: equal to PEFT's, undone in the saved adapter, the same base everywhere."""

import copy
import json
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import LoraGAConfig
from peft.tuners.lora.loraga import preprocess_loraga
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from halfbyte.adapters import initial_factors
from halfbyte.adapters.initial import AdapterInitialiser, InitialAdapter, lora_layers
from halfbyte.adapters.initial_data import weight_gradients
from halfbyte.adapters.initial_factors import best_for_inputs, best_low_rank, seeded
from halfbyte.adapters.lora import add_adapter
from halfbyte.cli import app
from halfbyte.config import load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.loading import streamed
from halfbyte.loading.find import find_model
from halfbyte.loading.load import load_model
from halfbyte.loading.observe import observe_gradients, observe_inputs
from halfbyte.runs.metrics import MetricsFile
from halfbyte.runs.saved import load_saved
from halfbyte.tensor import QuantizedTensor
from halfbyte.train.run import finetune
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError
from tests.helpers.marks import slow_except
from tests.helpers.merge_runs import by_peft, save_base_and_sums, tensors

WEIGHTS = "adapter_model.safetensors"
CHANGING = ["pissa", "pissa_niter_4", "olora"]
OF_INPUTS = {
    "qera": {"init_lora_weights": "qera"},
    "weighted": {"init_lora_weights": "loftq", "loftq_config": {"weighted": True, "loftq_iter": 2}},
    "corda": {"init_lora_weights": "corda", "corda_config": {"corda_method": "ipm"}},
}
FORMATS = ["nf4", "kbit3", "fp8"]
IDS = torch.arange(1, 33)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base_and_sums(tmp_path_factory.mktemp("base"), torch.float32)


def keys_of(base, **keys):
    storage = {} if "quantization" in keys or "load_in_4bit" in keys else {"load_in_4bit": False}
    return {"model_name_or_path": str(base / "model"), "dataset": str(base / "data.txt"), "r": 8, "lora_alpha": 16.0,
            "device": "cpu", "dtype": "float32"} | storage | keys  # fmt: skip


def initialised(base, **keys):
    config = load_config(None, keys_of(base, **keys))
    initial = AdapterInitialiser(config.adapter, config.seed)
    model = load_model(str(base / "model"), config.storage, dtype="float32", device="cpu", initial=initial)
    return add_adapter(model, config, initial=initial).eval()


def observed(base, rows, **keys):
    config = load_config(None, keys_of(base, **keys))
    initial = AdapterInitialiser(config.adapter, config.seed)
    files, device = find_model(config.origin), torch.device("cpu")
    observe_inputs(initial, files, config.storage, rows, device=device, dtype=torch.float32)
    model = load_model(files, config.storage, dtype="float32", device="cpu", initial=initial)
    return add_adapter(model, config, initial=initial).eval(), initial


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def original(base):
    return AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32).eval()


def train(base, output, **keys):
    given = {"max_steps": 4, "save_steps": 2, "learning_rate": 5e-3, "per_device_train_batch_size": 4, "max_length": 32}
    given |= {"sample_prompts": 1, "sample_max_new_tokens": 4, "output_dir": str(output), "eval_split_size": 4}
    given = keys_of(base, **given | keys)
    return finetune(given.pop("model_name_or_path"), given.pop("dataset"), **given).output_dir


@pytest.mark.parametrize("name", [*CHANGING, "mica"])
def test_factors_and_base_are_those_of_peft_in_16_bits(base, original, name):
    ours = initialised(base, init_lora_weights=name)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    names = [layer for layer, _ in lora_layers(ours)]
    plain = copy.deepcopy(original)
    if name == "pissa_niter_4":  # PEFT draws the random numbers of all layers one after another
        for layer in names:
            with seeded(42, layer, torch.device("cpu")):
                one = LoraConfig(r=8, lora_alpha=16, target_modules=[layer], init_lora_weights=name)
                theirs = get_peft_model(copy.deepcopy(original), one)
            (_, expected), found = next(lora_layers(theirs)), dict(lora_layers(ours))[layer]
            torch.testing.assert_close(found.lora_A["default"].weight, expected.lora_A["default"].weight)
            torch.testing.assert_close(found.base_layer.weight, expected.base_layer.weight)
        return
    theirs = get_peft_model(plain, LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights=name))
    assert len(names) == 14
    for (layer, found), (same, expected) in zip(lora_layers(ours), lora_layers(theirs), strict=True):
        assert layer == same
        torch.testing.assert_close(found.lora_A["default"].weight, expected.lora_A["default"].weight)
        torch.testing.assert_close(found.lora_B["default"].weight, expected.lora_B["default"].weight)
        torch.testing.assert_close(found.base_layer.weight, expected.base_layer.weight)
        assert found.lora_B["default"].weight.requires_grad is (name != "mica")


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", [*CHANGING, "loftq"])
def test_the_base_stores_the_weight_without_the_factors(base, original, name, quantization):
    model = initialised(base, init_lora_weights=name, quantization=quantization)
    weights = dict(original.named_parameters())
    for layer, module in lora_layers(model):
        stored = module.base_layer.weight.data
        assert isinstance(stored, QuantizedTensor)
        weight = weights[f"{layer}.weight"]
        product = module.scaling["default"] * module.lora_B["default"].weight @ module.lora_A["default"].weight
        plain = QuantizedTensor.quantize(weight, stored.format).dequantize(torch.float32)
        values = stored.dequantize(torch.float32)
        if name != "loftq":
            residual = QuantizedTensor.quantize(weight - product, stored.format).dequantize(torch.float32)
            torch.testing.assert_close(values, residual)
        if name != "olora":  # its first columns are not those that matter most
            assert (weight - values - product).norm() < 0.98 * (weight - plain).norm()


def test_loftq_is_algorithm_1_of_the_paper(base, original):
    model = initialised(base, init_lora_weights="loftq", quantization="nf4", loftq_config={"loftq_iter": 3})
    layer, module = next(lora_layers(model))
    weight = dict(original.named_parameters())[f"{layer}.weight"].detach()
    product = torch.zeros_like(weight)
    for _ in range(3):
        stored = QuantizedTensor.quantize(weight - product, module.base_layer.weight.format).dequantize(torch.float32)
        u, s, vh = torch.linalg.svd(weight - stored)
        product = u[:, :8] * s[:8] @ vh[:8]
    torch.testing.assert_close(module.base_layer.weight.dequantize(torch.float32), stored)
    update = module.scaling["default"] * module.lora_B["default"].weight @ module.lora_A["default"].weight
    torch.testing.assert_close(update.detach(), product, atol=1e-5, rtol=1e-4)


def test_moments_of_streamed_layers_are_those_of_the_whole_model(base, original, monkeypatch):
    monkeypatch.setattr(streamed, "CHUNK_TOKENS", 50)  # two rows of 20 tokens, then one
    rows = [torch.randint(1, 250, (length,)).tolist() for length in (20, 7, 13)]
    sums, counts = {}, {}

    def add(name, module, inputs):
        x = inputs[0].flatten(0, -2)
        sums[name] = sums.get(name, 0) + x.T @ x
        counts[name] = counts.get(name, 0) + len(x)

    linears = {name: module for name, module in original.named_modules() if name.endswith("_proj")}
    handles = [module.register_forward_pre_hook(partial(add, name)) for name, module in linears.items()]
    with torch.no_grad():
        for row in rows:
            original(torch.tensor([row]))
    for handle in handles:
        handle.remove()
    moments = {}

    def visit(name, weight, moment):
        assert torch.equal(weight, linears[name].weight)
        moments[name] = moment

    files = find_model(load_config(None, keys_of(base)).origin)
    streamed.stream_moments(files, rows, list(linears), visit, device=torch.device("cpu"), dtype=torch.float32)
    assert moments.keys() == linears.keys()
    for name, moment in moments.items():
        torch.testing.assert_close(moment, sums[name] / counts[name], atol=1e-5, rtol=1e-4)


def test_the_fit_to_inputs_is_theorem_1_of_qera():
    torch.manual_seed(0)
    error, x = torch.randn(24, 40), torch.randn(500, 40) @ torch.randn(40, 40)
    moment = x.T @ x / len(x)
    values, vectors = torch.linalg.eigh(moment.double())
    root = vectors * values.sqrt() @ vectors.T
    u, s, vh = torch.linalg.svd(error.double() @ root, full_matrices=False)
    expected = (u[:, :4] * s[:4] @ vh[:4] @ torch.linalg.inv(root)).float()
    fitted = best_for_inputs(error, moment, 4)
    torch.testing.assert_close(fitted.b @ fitted.a, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("fit", ["weights", "inputs"])
def test_a_randomized_fit_is_as_good_as_the_exact_one(monkeypatch, fit):
    torch.manual_seed(0)
    error, x = torch.randn(96, 80), torch.randn(500, 80) @ torch.randn(80, 80)
    moment = x.T @ x / len(x)

    def remaining():
        low = best_low_rank(error, 8) if fit == "weights" else best_for_inputs(error, moment, 8)
        left = error - low.b @ low.a
        return (left.norm() if fit == "weights" else (left @ moment * left).sum().sqrt()).item()

    exact = remaining()
    monkeypatch.setattr(initial_factors, "EXACT", 0)
    assert exact <= remaining() * 1.0001 <= 1.01 * exact


@pytest.mark.parametrize("name", OF_INPUTS)
def test_inputs_make_the_quantized_model_closer_to_the_original(base, original, name):
    torch.manual_seed(0)
    rows = [torch.randint(1, 250, (32,)).tolist() for _ in range(32)]
    exact = logits(original)

    def distance(model):
        return float((logits(model) - exact).norm())

    plain = distance(load_model(str(base / "model"), quantization="kbit3", dtype="float32", device="cpu").eval())
    model, initial = observed(base, rows, quantization="kbit3", **OF_INPUTS[name])
    assert distance(model) < 0.95 * plain
    squares = initial.mean_squares
    assert (set(squares) == set(initial.layers)) is (name != "corda")


def test_corda_is_that_of_peft(base, original, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "attr", SimpleNamespace(dataclass=dataclass)
    )  # a package that PEFT does not require
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    rows = [torch.randint(1, 250, (16,)).tolist() for _ in range(12)]
    ours, _ = observed(base, rows, init_lora_weights="corda")
    theirs = copy.deepcopy(original)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=targets, init_lora_weights="corda", corda_config=CordaConfig()
    )
    preprocess_corda(theirs, config, run_model=lambda: [theirs(torch.tensor([row])) for row in rows])
    theirs = get_peft_model(theirs, config)
    for (layer, found), (_, expected) in zip(lora_layers(ours), lora_layers(theirs), strict=True):
        product, other = (
            module.lora_B["default"].weight @ module.lora_A["default"].weight for module in (found, expected)
        )
        torch.testing.assert_close(product, other, atol=2e-3, rtol=1e-2, msg=layer)
        torch.testing.assert_close(found.base_layer.weight, expected.base_layer.weight, atol=2e-3, rtol=1e-2)


def batches_of(*lengths):
    ids = [torch.randint(1, 250, (length,)) for length in lengths]
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None], "labels": row[None]} for row in ids]


def test_gradients_of_lora_ga_are_those_of_the_weights(base, original):
    whole = copy.deepcopy(original)
    linears = {name: module for name, module in whole.named_modules() if name.endswith("_proj")}
    batches = batches_of(30, 50)
    for batch in batches:
        whole(**batch).loss.backward()
    frozen = copy.deepcopy(original).requires_grad_(False)
    for name, gradient in weight_gradients(frozen, list(linears), batches).items():
        torch.testing.assert_close(gradient, linears[name].weight.grad / 2, atol=1e-6, rtol=1e-3)
    unlabelled = [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in batches]
    with pytest.raises(ModelError, match="q_proj"):
        weight_gradients(frozen, ["model.layers.0.self_attn.q_proj"], unlabelled)


@pytest.mark.parametrize("direction", ["ArB2r", "random"])
def test_lora_ga_is_that_of_peft(base, original, direction):
    batches = batches_of(30, 50)
    config = load_config(
        None, keys_of(base, init_lora_weights="lora_ga", lora_ga_config={"direction": direction, "scale": "stable"})
    )
    initial = AdapterInitialiser(config.adapter, config.seed)
    files, device = find_model(config.origin), torch.device("cpu")
    observe_gradients(initial, files, config.storage, batches, device=device, dtype=torch.float32)
    ours = load_model(files, config.storage, dtype="float32", device="cpu", initial=initial)
    found = dict(lora_layers(add_adapter(ours, config, initial=initial)))
    layer = "model.layers.1.mlp.down_proj"
    options = LoraGAConfig(direction=direction, scale="stable")
    one = LoraConfig(r=8, lora_alpha=16, target_modules=[layer], init_lora_weights="lora_ga", lora_ga_config=options)
    theirs = copy.deepcopy(original)
    preprocess_loraga(theirs, one, lambda: [theirs(**batch).loss.backward() for batch in batches])
    with seeded(config.seed, layer, device):
        theirs = get_peft_model(theirs, one)
    (_, expected) = next(lora_layers(theirs))
    for side in ("lora_A", "lora_B"):
        values, other = (getattr(module, side)["default"].weight for module in (found[layer], expected))
        torch.testing.assert_close(values, other, atol=1e-4, rtol=1e-2)
    torch.testing.assert_close(found[layer].base_layer.weight, expected.base_layer.weight, atol=1e-4, rtol=1e-2)


def test_eva_redistributes_ranks_by_the_explained_variance(base):
    config = load_config(None, keys_of(base, init_lora_weights="eva", quantization="nf4", r=4))
    initial = AdapterInitialiser(config.adapter, config.seed)
    model = load_model(str(base / "model"), config.storage, dtype="float32", device="cpu", initial=initial)
    initial.batches = batches_of(100, 100)
    adapted = add_adapter(model, config, initial=initial).eval()
    ranks = [layer.r["default"] for _, layer in lora_layers(adapted)]
    assert sum(ranks) == 14 * 4
    assert len(set(ranks)) > 1
    for _, layer in lora_layers(adapted):
        assert not layer.lora_B["default"].weight.any()
    model = load_model(str(base / "model"), config.storage, dtype="float32", device="cpu")
    initial.batches = batches_of(10)
    with pytest.raises(ModelError, match="eva"):
        add_adapter(model, config, initial=initial)


@pytest.mark.parametrize(
    "name", slow_except([*CHANGING, "mica", "orthogonal", "gaussian", "eva", "lora_ga"], ["pissa", "lora_ga"])
)
def test_in_16_bits_plain_peft_computes_the_trained_model_from_the_original_base(base, original, tmp_path, name):
    run = train(base, tmp_path / "out", init_lora_weights=name, use_rslora=True, rank_pattern={"q_proj": 4})
    trained = logits(load_saved(str(run), ["device=cpu"]).model)
    reloaded = logits(PeftModel.from_pretrained(copy.deepcopy(original), str(run / "adapter")).eval())
    torch.testing.assert_close(trained, reloaded, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(reloaded, logits(original), atol=1e-2)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        pytest.param(name, storage, marks=[] if (name, storage) == ("pissa", "kbit3") else pytest.mark.slow)
        for name in [*CHANGING, "loftq", "lora_ga", *OF_INPUTS]
        for storage in FORMATS
    ],
)
def test_loading_a_run_gives_the_base_of_its_training(base, original, tmp_path, name, quantization):
    keys = OF_INPUTS.get(name, {"init_lora_weights": name})
    keys |= {"loftq_config": {"loftq_iter": 2}} if name == "loftq" else {}
    run = train(base, tmp_path / "out", quantization=quantization, **keys)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (config["init_lora_weights"], config["r"], config["lora_alpha"]) == (True, 16, 32)
    assert (run / "moments.safetensors").is_file() is (name in ("qera", "weighted"))
    saved = load_saved(str(run), ["device=cpu"])
    checkpoint = load_saved(str(run / "checkpoint-4"), ["device=cpu"])
    torch.testing.assert_close(logits(saved.model), logits(checkpoint.model), atol=0, rtol=0)
    # On the original base the difference is the quantization of the residual only.
    reloaded = PeftModel.from_pretrained(copy.deepcopy(original), str(run / "adapter")).eval()
    trained_layers, plain_layers = lora_layers(saved.model), dict(lora_layers(reloaded))
    for layer, module in trained_layers:
        exact = plain_layers[layer].base_layer.weight + plain_layers[layer].get_delta_weight("default")
        found = module.base_layer.weight.dequantize(torch.float32) + module.get_delta_weight("default")
        start = saved.initial.product(layer)
        residual = plain_layers[layer].base_layer.weight - start.b @ start.a
        torch.testing.assert_close(
            found - exact, module.base_layer.weight.dequantize(torch.float32) - residual, atol=1e-4, rtol=1e-3
        )


@pytest.mark.parametrize(
    "name", slow_except(["pissa_niter_4", "olora", "loftq", "mica", "eva", "lora_ga", *OF_INPUTS], ["eva"])
)
def test_a_stopped_run_is_resumed_to_equal_bytes(base, tmp_path, monkeypatch, name):
    append = MetricsFile.append

    def stop(metrics, record, *args, **more):
        if record.get("step") == 3:
            raise KeyboardInterrupt
        return append(metrics, record, *args, **more)

    keys = {"quantization": "nf4"} | OF_INPUTS.get(name, {"init_lora_weights": name})
    keys |= {"loftq_config": {"loftq_iter": 2}} if name == "loftq" else {}
    run = train(base, tmp_path / "whole", **keys)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            train(base, tmp_path / "out", **keys)
    assert (tmp_path / "out" / "checkpoint-2").exists()
    train(base, tmp_path / "out", resume_from_checkpoint=True, **keys)
    for folder in ("adapter", "checkpoint-4", "initial_adapter"):
        assert (tmp_path / "out" / folder / WEIGHTS).read_bytes() == (run / folder / WEIGHTS).read_bytes()
        config, other = (
            json.loads((out / folder / "adapter_config.json").read_text()) for out in (run, tmp_path / "out")
        )
        assert set(config.pop("target_modules")) == set(other.pop("target_modules"))
        assert config == other
    (run / "initial_adapter" / WEIGHTS).unlink()
    if name not in ("mica", "eva"):
        with pytest.raises(CheckpointError, match="initial_adapter"):
            load_saved(str(run), ["device=cpu"])


@pytest.mark.slow
def test_the_reference_of_preference_training_is_the_model_before_the_first_step(base, tmp_path):
    rows = [{"prompt": f"{n} plus 1 is", "chosen": f" {n + 1}.", "rejected": f" {n}."} for n in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"dataset": str(tmp_path / "pairs.jsonl"), "method": "dpo", "quantization": "nf4", "max_length": 128}
    run = train(base, tmp_path / "out", init_lora_weights="pissa", **keys)
    assert json.loads((run / "checks.json").read_text())["reference"]["largest_difference"] < 1e-4
    records = MetricsFile(run / "metrics.jsonl").records()
    first, last = ([record for record in records if record["kind"] == "eval"][at] for at in (0, -1))
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)
    held_out = evaluate(str(run), str(tmp_path / "pairs.jsonl"), ["device=cpu"])
    assert held_out.numbers["loss"] < 0.6931
    assert last["loss"] != first["loss"]


@pytest.fixture(scope="module")
def pissa_run(base, tmp_path_factory):
    return train(base, tmp_path_factory.mktemp("run") / "out", init_lora_weights="pissa", quantization="nf4")


def test_merging_onto_either_base_gives_the_trained_model(base, pissa_run, tmp_path):
    result = CliRunner().invoke(app, ["merge", str(pissa_run), str(tmp_path / "merged"), "--base", "dequantized"])
    assert result.exit_code == 0, result.output
    saved = load_saved(str(pissa_run), ["device=cpu"])
    merged = tensors(tmp_path / "merged")
    for layer, module in lora_layers(saved.model):
        found = module.base_layer.weight.dequantize(torch.float32) + module.get_delta_weight("default")
        torch.testing.assert_close(merged[f"{layer}.weight"].float(), found, atol=1e-5, rtol=2**-8)
    command = ["merge", str(pissa_run / "checkpoint-4"), str(tmp_path / "other"), "--base", "original"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    expected = by_peft(pissa_run, base / "model", "original")
    for name, tensor in tensors(tmp_path / "other").items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-7, atol=1e-5)


def test_an_adapter_for_a_residual_base_is_refused_on_another(base, pissa_run, tmp_path):
    with pytest.raises(CheckpointError, match="init_lora_weights"):
        train(base, tmp_path / "out", adapter_path=str(pissa_run / "checkpoint-4"))
    with pytest.raises(CheckpointError, match="initial_adapter"):
        InitialAdapter(tmp_path / "initial_adapter", load_config(pissa_run / "config.resolved.yaml"))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"init_lora_weights": "pisa"}, "init_lora_weights.*pissa_niter_N"),
        ({"init_lora_weights": "pissa", "adapter_path": "a"}, "adapter_path"),
        ({"init_lora_weights": "pissa", "use_dora": True}, "use_dora"),
        ({"init_lora_weights": "loftq", "load_in_4bit": False}, "init_lora_weights"),
        ({"init_lora_weights": "orthogonal", "r": 3}, "init_lora_weights"),
        ({"init_lora_weights": "mica", "lora_preconditioner": "riemannian"}, "init_lora_weights"),
        ({"init_lora_weights": "olora", "method": "grpo", "reward_funcs": ["exact"]}, "init_lora_weights"),
        ({"init_lora_weights": "pissa", "loftq_config": {"loftq_iter": 2}}, "loftq_config"),
        ({"init_lora_weights": "loftq", "loftq_config": {"iters": 2}}, "loftq_config"),
        ({"init_lora_weights": "corda", "corda_config": {"corda_method": "pca"}}, "corda_config"),
        ({"init_lora_weights": "qera", "load_in_4bit": False}, "init_lora_weights"),
        ({"init_lora_weights": "eva", "eva_config": {"tau": 2.0}}, "eva_config"),
        ({"init_lora_weights": "lora_ga", "lora_ga_config": {"direction": "up"}}, "lora_ga_config"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 0}}, "loftq_config"),
    ],
    ids=str,
)
def test_keys_that_contradict_an_initialisation_are_refused(keys, named):
    with pytest.raises(ConfigError, match=named):
        load_config(None, {"model_name_or_path": "m", "dataset": "d"} | keys)


def test_what_does_not_fit_a_weight_is_refused_by_its_name(base):
    with pytest.raises(ModelError, match="k_proj"):
        initialised(base, init_lora_weights="pissa", r=40)
    with pytest.raises(ConfigError, match="loftq_bits"):
        initialised(base, init_lora_weights="loftq", quantization="kbit3", loftq_config={"loftq_bits": 4})
    # the scales of nf4 take bits, too
    initialised(base, init_lora_weights="loftq", quantization="nf4", loftq_config={"loftq_bits": 4})
    config = load_config(None, keys_of(base, init_lora_weights="pissa"))
    with pytest.raises(ModelError, match="init_lora_weights"):
        add_adapter(load_model(str(base / "model"), config.storage, device="cpu"), config)


def test_a_module_without_measured_inputs_is_refused_by_its_name(base):
    rows = [[1, 2, 3]]
    with pytest.raises(ModelError, match="lm_head"):
        observed(base, rows, quantization="nf4", init_lora_weights="qera", target_modules=["q_proj", "lm_head"])
    with pytest.raises(ModelError, match="lm_head"):  # on the meta device, as `check` adds adapters
        initialised(base, quantization="nf4", init_lora_weights="eva", target_modules=["q_proj", "lm_head"])
    with pytest.raises(ModelError, match="embed_tokens"):
        initialised(base, init_lora_weights="mica", target_modules=["q_proj", "embed_tokens"])
    moments = streamed.Moments({"layers.0.expert": torch.nn.Linear(4, 4)}, by_row=False)
    with pytest.raises(ModelError, match=r"layers.0.expert"):
        moments.mean("layers.0.expert")
    with pytest.raises(ModelError, match="init_lora_weights"):
        initialised(base, quantization="nf4", init_lora_weights="qera")


def test_a_checkpoint_without_16_bit_weights_is_refused(base, tmp_path):
    load_model(str(base / "model"), load_in_4bit=True, device="cpu").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="init_lora_weights"):
        initialised(tmp_path, init_lora_weights="pissa", load_in_4bit=True)
