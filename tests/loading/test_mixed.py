"""Mixed formats under a budget: the optimum, the measured errors, held-back text, and the written file."""

import functools
import itertools
import re

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.formats import named
from halfbyte.loading.load import load_model
from halfbyte.loading.mixed_formats import Option, best, loss_with_formats, lower_hull, measurable_stacks, measure, mix
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils import notices
from halfbyte.utils.errors import ModelError
from tests.helpers.expert_models import TOKENS, mixture

FORMATS = {name: named(name) for name in ("nf4", "fp4", "blockwise4:nf4:32:plain")}
SMALL = {name: named(name) for name in ("nf4", "hqq4", "kbit2", "kbit3", "kbit4", "kbit5")}


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_no_mixture_of_the_same_size_is_better(seed):
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


def test_patterns_name_layers_that_differ_from_the_most_common_format():
    small, large = Option("nf4", 1, 0.1), Option("16bit", 2, 0.0)
    found = mix({"a.x": [small, large], "a.y": [small, large], "b.x": [Option("nf4", 1, 0.5), large]}, 12)
    assert found.patterns() == {"b.x": "16bit", "*": "nf4"}


def tiny_batches():
    rows = [torch.tensor([[5, 9, 3, 77, 21]]), torch.tensor([[4, 60, 7]])]
    return [{"input_ids": row, "labels": row} for row in rows]


def test_errors_are_the_second_order_increase_of_the_loss(tiny_checkpoint):
    """½ Σ (g·δ)² over the tokens, from a plain backward of the whole model; and the model is as it was."""
    model = load_model(str(tiny_checkpoint()), load_in_4bit=False, dtype="float32", device="cpu").train()
    before = {name: (parameter.clone(), parameter.requires_grad) for name, parameter in model.named_parameters()}
    found = measure(model, FORMATS, tiny_batches())
    assert len(found) == 14
    assert "lm_head" not in found
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.requires_grad == before[name][1]
        assert parameter.grad is None
    assert not any(m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m) for m in model.modules())

    name, seen = "model.layers.1.mlp.down_proj", []
    linear = model.get_submodule(name).requires_grad_(True)

    def keep(module, args, output):
        output.retain_grad()
        seen.append((args[0].detach()[0], output))

    linear.register_forward_hook(keep)
    for batch in tiny_batches():
        model(**batch).loss.mul(batch["labels"].numel() - 1).backward()
    by_name = {option.format: option for option in found[name]}
    assert by_name["16bit"] == Option("16bit", 2 * 64 * 96, 0.0)
    for key, format_ in FORMATS.items():
        stored = QuantizedTensor.quantize(linear.weight.detach(), format_)
        error = stored.dequantize() - linear.weight.detach()
        rises = [0.5 * (x @ error.T * output.grad[0]).sum(-1).square().sum() for x, output in seen]
        assert by_name[key].error == pytest.approx(float(sum(rises)) / 6, rel=1e-3)  # of 4 + 2 predicted tokens
        assert by_name[key].nbytes == stored.nbytes


EXPERTS = {key: named(key) for key in ("kbit3", "nf4")}
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3"])
def test_experts_are_measured_by_their_own_tokens(name, monkeypatch):
    """Against the products of transformers' own loop over experts."""
    model = mixture(name)
    found, stacks = measure(model, EXPERTS, [BATCH]), measurable_stacks(model)
    matrices = {}  # by where they lie
    for key, each in stacks.items():
        assert "forward" not in vars(each.module)
        (stack,) = each.matrices().values()
        matrices |= {matrix.data_ptr(): (key, matrix) for matrix in stack}
        each.module.config._experts_implementation = "eager"
    products, linear = [], torch.nn.functional.linear

    def watched(x, weight, bias=None):
        result = linear(x, weight, bias)
        if weight.data_ptr() in matrices:
            result.retain_grad()
            products.append((*matrices[weight.data_ptr()], x.detach(), result))
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    loss, count = causal_lm_loss(model.requires_grad_(True), BATCH)
    loss.backward()
    assert {key for key, *_ in products} == stacks.keys()
    for key, each in stacks.items():
        by_name = {option.format: option for option in found[key]}
        assert by_name["16bit"].nbytes == 2 * sum(stack.numel() for stack in each.matrices().values())
        own = [(matrix, x, result) for other, matrix, x, result in products if other == key]
        for format_key, format_ in EXPERTS.items():
            errors = [QuantizedTensor.quantize(matrix, format_).dequantize() - matrix for matrix, *_ in own]
            rises = [
                0.5 * (linear(x, error) * result.grad).sum(-1).square().sum()
                for error, (_, x, result) in zip(errors, own, strict=True)
            ]
            reached = sum(len(x) > 0 for _, x, _ in own)
            assert by_name[format_key].error == pytest.approx(float(sum(rises)) * 4 / reached / int(count), rel=1e-3)
            (stack,) = each.matrices().values()
            stored = QuantizedTensor.quantize(stack, format_.stacked())
            assert by_name[format_key].nbytes == stored.nbytes


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_losses_of_a_mixture_are_those_of_the_stored_model(name, tmp_path):
    """gpt-oss' stacks lie transposed, so both of a layer have one format."""
    mixture(name).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), load_in_4bit=False, dtype="float32", device="cpu")
    stacks = measurable_stacks(model)
    assert len(stacks) == {"Qwen3Moe": 4, "GptOss": 2}[name]
    found = loss_with_formats(model, dict.fromkeys(stacks, named("kbit3")), [BATCH])
    patterns = dict.fromkeys(stacks, "kbit3") | {"*": "16bit"}
    stored = load_model(str(tmp_path), quantization=patterns, dtype="float32", device="cpu")
    with torch.no_grad():
        loss, count = causal_lm_loss(stored, BATCH)
    assert found == pytest.approx(float(loss) / int(count), rel=1e-6)
    whole = load_model(str(tmp_path), load_in_4bit=False, dtype="float32", device="cpu")
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), whole.parameters(), strict=True))


def test_experts_without_tokens_get_the_mean_error_with_a_notice():
    model = mixture("Qwen3Moe", num_experts=16)
    few = {"input_ids": TOKENS[:, :2], "labels": TOKENS[:, :2]}
    found = measure(model, EXPERTS, [few])
    assert re.match(
        r"no token of the calibration text reached \d+ of 32 experts", notices.notices_so_far()["mix-unreached"]
    )
    assert all(option.error > 0 for option in found["model.layers.0.mlp.experts.down_proj"][1:])


def test_a_format_that_stores_no_experts_is_refused_before_anything_is_measured():
    with pytest.raises(ModelError, match="down_proj") as refused:
        measure(mixture("Qwen3Moe"), EXPERTS | {"large": named("blockwise4:nf4:4096:plain")}, [])
    assert "kbit3" in refused.value.fix


def test_losses_are_those_of_the_stored_model(tiny_checkpoint):
    folder = str(tiny_checkpoint())
    model = load_model(folder, load_in_4bit=False, dtype="float32", device="cpu")
    down = {name: named("kbit3") for name, _ in model.named_modules() if name.endswith("down_proj")}
    found = loss_with_formats(model, down, tiny_batches())
    stored = load_model(folder, quantization={"*.down_proj": "kbit3", "*": "16bit"}, dtype="float32", device="cpu")
    with torch.no_grad():
        losses = [causal_lm_loss(stored, batch) for batch in tiny_batches()]
    assert found == pytest.approx(float(sum(loss for loss, _ in losses)) / 6, rel=1e-6)
    whole = load_model(folder, load_in_4bit=False, dtype="float32", device="cpu")
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), whole.parameters(), strict=True))
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match="down_proj"):  # a failure half-way leaves the weights alone, too
        loss_with_formats(model, down, tiny_batches())
    assert model.model.layers[0].mlp.down_proj.weight.equal(whole.model.layers[0].mlp.down_proj.weight)


@pytest.fixture(scope="module")
def stories(shared):
    """A trained model of 260,000 weights; what `measure` finds; text that is held back; the loss of layers stored in
    formats on text that neither has seen."""
    from benchmarks.llama2c import read_model, read_tokenizer

    folder = shared / "data"
    model = read_model(folder / "weights" / "stories260K.bin").eval()
    tokenizer = read_tokenizer(folder / "weights" / "tok512.bin", model.config.vocab_size)
    text = (folder / "datasets" / "tinystories" / "train_slice.txt").read_text(encoding="utf-8")[:60_000]
    rows = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])[: 36 * 512].view(-1, 512)
    measured_on, held_back, unseen = ([{"input_ids": part, "labels": part}] for part in rows.split(12))
    options = measure(model, SMALL, measured_on)

    @functools.cache
    def unseen_loss(*layers):
        return loss_with_formats(model, {name: SMALL[key] for name, key in zip(options, layers, strict=True)}, unseen)

    return model, options, held_back, unseen_loss


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3.6, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (4.4, 4.8, 5.42))])
def test_never_worse_than_a_uniform_format(stories, bits):
    model, options, held_back, unseen_loss = stories
    found, losses = best(model, SMALL, options, bits, held_back)
    assert found.bits <= bits
    alone = losses.keys() - {"mixture"}
    assert alone == {key for key in SMALL if _bits(options, key) <= bits}
    chosen = unseen_loss(*(found.layers[name].format for name in options))
    for key in alone:
        assert chosen <= unseen_loss(*[key] * len(options)), key


def _bits(options, key):
    sizes = [{option.format: option.nbytes for option in each} for each in options.values()]
    return 16 * sum(size[key] for size in sizes) / sum(size["16bit"] for size in sizes)


def test_too_little_text_is_refused_before_measuring(shared, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox.\n" * 4)
    result = CliRunner().invoke(app, ["mix", str(shared / "models" / "llama-40m"), str(tmp_path / "text.txt")])
    assert result.exit_code != 0


def test_wrong_requests_of_the_command(shared, tmp_path):
    model = str(shared / "models" / "llama-40m")
    (tmp_path / "text.txt").write_text("The quick brown fox.\n" * 40)
    result = CliRunner().invoke(app, ["mix", model, str(tmp_path / "text.txt"), "--formats", "nf5"])
    assert result.exit_code == 2
    assert "--formats nf5:" in result.output
