"""Choosing formats under a budget: the optimum, the measured errors, and the file that comes out of it."""

import itertools

import pytest
import torch
from typer.testing import CliRunner

from halfbyte import notices
from halfbyte.cli.app import app
from halfbyte.config import load_config
from halfbyte.errors import ModelError
from halfbyte.formats import named
from halfbyte.layers import QuantizedLinear
from halfbyte.models.load import load_model
from halfbyte.models.mixed import Option, lower_hull, measure, mix
from halfbyte.tensor import QuantizedTensor

FORMATS = {name: named(name) for name in ("nf4", "fp4", "blockwise4:nf4:32:plain")}


@pytest.fixture(autouse=True)
def _unsaid():
    notices.forget()


def options(seed, layers=4):
    """Layers of 100 weights with a random, decreasing error at 2, 3, 4, 5 and 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for index in range(layers):
        errors = torch.rand(4, generator=generator).sort(descending=True).values.tolist()
        cheap = [Option(f"{bits}", 100 * bits / 8, error) for bits, error in zip((2, 3, 4, 5), errors, strict=True)]
        made[f"layer{index}"] = [*cheap, Option("16bit", 200, 0.0)]
    return made


def test_lower_hull():
    points = [(1, 10.0), (2, 9.0), (3, 2.0), (4, 2.5), (5, 1.0), (9, 0.0), (9, 3.0)]
    hull = lower_hull(Option(str(size), size, error) for size, error in points)
    assert [(option.nbytes, option.error) for option in hull] == [(1, 10.0), (3, 2.0), (5, 1.0), (9, 0.0)]


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_the_same_size_is_better(seed):
    """Against all 5⁴ choices: whatever loses less than the greedy one takes more memory than it."""
    made = options(seed)
    for bits in (2.0, 2.6, 4.1, 7.5, 16.0):
        found = mix(made, bits)
        size = sum(option.nbytes for option in found.layers.values())
        assert found.bits == pytest.approx(8 * size / 400)
        assert found.bits <= bits
        fits = [
            sum(option.error for option in choice)
            for choice in itertools.product(*made.values())
            if sum(option.nbytes for option in choice) <= 400 * bits / 8
        ]
        largest_step = max(
            one.error - two.error for each in made.values() for one, two in itertools.pairwise(lower_hull(each))
        )
        assert min(fits) <= found.error + 1e-12
        assert found.error <= min(fits) + largest_step  # all but the last step that did not fit
    assert {option.format for option in mix(made, 16.0).layers.values()} == {"16bit"}
    assert {option.format for option in mix(made, 2.0).layers.values()} == {"2"}


def test_a_budget_below_the_smallest_formats_is_refused():
    with pytest.raises(ModelError, match=r"1\.9 bits per weight: the smallest formats take 2\.000"):
        mix(options(0), 1.9)


def test_patterns_name_what_differs_from_the_commonest():
    small, large = Option("nf4", 1, 0.1), Option("16bit", 2, 0.0)
    found = mix({"a.x": [small, large], "a.y": [small, large], "b.x": [Option("nf4", 1, 0.5), large]}, 12)
    assert found.patterns() == {"b.x": "16bit", "*": "nf4"}


def test_errors_are_those_of_the_outputs(tiny_checkpoint):
    model = load_model(str(tiny_checkpoint()), load_in_4bit=False, dtype="float32", device="cpu")
    batches = [{"input_ids": torch.tensor([[5, 9, 3, 77, 21]])}, {"input_ids": torch.tensor([[4, 60, 7]])}]
    found = measure(model, FORMATS, batches)
    assert len(found) == 14
    assert "lm_head" not in found
    name, inputs = "model.layers.1.mlp.down_proj", []
    linear = model.get_submodule(name)
    linear.register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    x = torch.cat(inputs)
    exact = x @ linear.weight.detach().T
    by_name = {option.format: option for option in found[name]}
    assert by_name["16bit"] == Option("16bit", 2 * 64 * 96, 0.0)
    for key, format_ in FORMATS.items():
        stored = QuantizedTensor.quantize(linear.weight.detach(), format_)
        expected = (exact - x @ stored.dequantize().T).square().sum() / exact.square().sum()
        assert by_name[key].error == pytest.approx(float(expected), rel=1e-4)
        assert by_name[key].nbytes == stored.nbytes
    assert not any(module._forward_pre_hooks for key, module in model.named_modules() if key != name)


def test_a_layer_that_no_token_reaches_is_named(tiny_checkpoint):
    model = load_model(str(tiny_checkpoint()), load_in_4bit=False, dtype="float32", device="cpu")
    with pytest.raises(ModelError, match=r"no token .* reached model\.layers\.0"):
        measure(model, FORMATS, [])


def test_the_command_writes_what_quantization_takes(shared, tmp_path):
    model = shared / "models" / "llama-40m"
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    command = ["mix", str(model), str(tmp_path / "text.txt"), "--bits", "4.2", "--tokens", "1"]
    result = CliRunner().invoke(app, [*command, "--formats", "nf4,blockwise4:nf4:32:nested"])
    assert result.exit_code == 0, result.output
    assert "bits per weight" in result.stderr
    (tmp_path / "mixed.yaml").write_text(result.stdout)
    keys = {"model_name_or_path": str(model), "dataset": "x", "quantization": str(tmp_path / "mixed.yaml")}
    patterns = load_config(None, keys).quantization
    loaded = load_model(str(model), quantization=patterns, device="cpu")
    weights = [module.weight for module in loaded.modules() if isinstance(module, QuantizedLinear)]
    assert len(weights) >= 60
    stored = {weight.format.spec for weight in weights}
    assert stored == {"blockwise4:nf4:64:nested", "blockwise4:nf4:32:nested"}
    bits = 8 * sum(weight.nbytes for weight in weights) / sum(weight.numel() for weight in weights)
    assert 4.15 < bits <= 4.2


def test_wrong_requests_of_the_command(shared, tmp_path):
    model = str(shared / "models" / "llama-40m")
    (tmp_path / "text.txt").write_text("The quick brown fox.\n" * 40)
    result = CliRunner().invoke(app, ["mix", model, str(tmp_path / "text.txt"), "--formats", "nf5"])
    assert result.exit_code == 2
    assert "there is no format 'nf5'" in result.output


@pytest.mark.slow
def test_a_mixture_is_no_worse_than_one_format_of_its_size(shared):
    from benchmarks.quality import IGNORE_INDEX, perplexity, windows

    model, text = str(shared / "models" / "llama-40m"), shared / "data" / "datasets" / "validation.jsonl"
    from halfbyte.models.load import load_tokenizer

    rows = windows(load_tokenizer(model), text, 512)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    candidates = {
        name: named(name)
        for name in ("nf4", "blockwise4:nf4:32:nested", "blockwise4:nf4:64:plain", "blockwise4:nf4:1024:nested")
    }
    whole = load_model(model, load_in_4bit=False, dtype="float32", device="cpu")
    texts = [row[row != IGNORE_INDEX] for row in rows[:4]]
    found = mix(measure(whole, candidates, [{"input_ids": text[None]} for text in texts]), 4.5)
    assert found.bits <= 4.5

    def stored_as(quantization):
        return perplexity(load_model(model, quantization=quantization, dtype="float32", device="cpu"), rows[100:116], 1)

    assert stored_as(found.patterns()) <= stored_as("blockwise4:nf4:64:plain")
