"""`experts_implementation: halfbyte` against transformers' own loop, for every package whose experts it can reach."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from halfbyte.layers.plain import Adapter
from halfbyte.modeling import experts
from halfbyte.ops.experts import Unit, expert_unit
from halfbyte.utils.errors import ModelError

MODELS = Path(transformers.__file__).parent / "models"


def decorated():
    """(package, class) of each decorated class of experts, by the source."""
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)", path.read_text(), re.MULTILINE):
            yield path.parent.name, path.stem, name


CLASSES = list(decorated())


def experts_module(package, module, name):
    """A module of experts at a tiny size, of the package's own config; None where that has no such parts."""
    torch.manual_seed(0)
    cls = getattr(importlib.import_module(f"transformers.models.{package}.{module}"), name)
    config = Sizes()
    built = cls(config)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad_(False)
    return built


class Sizes:
    """Answers whatever a class of experts asks a config for."""

    _experts_implementation = "eager"
    hidden_act = mlp_hidden_act = hidden_activation = "silu"
    moe_latent_size = None
    swiglu_limit, swiglu_alpha, limit, alpha = 1.0, 1.702, 1.0, 1.702

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and "size" not in name and "inter" not in name and "dim" not in name:
            return 4
        return 24 if "inter" in name or "expert" in name else 16


def drawn(module, tokens=7):
    stack = module.gate_up_proj if module.has_gate else module.up_proj
    width = stack.shape[1] if module.is_transposed else stack.shape[2]
    index = torch.stack([torch.randperm(stack.shape[0])[:2] for _ in range(tokens)])
    return torch.randn(tokens, width, requires_grad=True), index, torch.rand(tokens, 2, requires_grad=True)


def results(module, name, x, index, weights):
    module.config._experts_implementation = name
    out = module(x, index, weights)
    return [out, *torch.autograd.grad(out.square().sum(), [x, weights])]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("package", "module", "name"), CLASSES, ids=[name for *_, name in CLASSES])
def test_as_transformers(package, module, name):
    built = experts_module(package, module, name)
    inputs = drawn(built)
    if experts.obstacle(built):
        with pytest.raises(ModelError):
            results(built, experts.NAME, *inputs)
        return
    for mine, stock in zip(results(built, experts.NAME, *inputs), results(built, "eager", *inputs), strict=True):
        torch.testing.assert_close(mine, stock, rtol=2e-5, atol=2e-5)


def test_fused_gates():
    formulas = {path[-1] for path in CLASSES if isinstance(experts.unit_of(experts_module(*path)), Unit)}
    assert {"Qwen3MoeExperts", "MixtralExperts", "OlmoeExperts", "DeepseekV3Experts", "GptOssExperts"} <= formulas
    for package, module, name in CLASSES:
        built = experts_module(package, module, name)
        unit = experts.unit_of(built)
        if isinstance(unit, Unit):
            c = torch.randn(5, 12) * 2
            torch.testing.assert_close(expert_unit(c, unit), built._apply_gate(c), rtol=1e-6, atol=1e-6)


def test_adapters():
    """Results equal those with each expert's B·A added to its weight."""
    built = experts_module("qwen3_moe", "modeling_qwen3_moe", "Qwen3MoeExperts")
    inputs = drawn(built)
    adapters, folded = {}, experts_module("qwen3_moe", "modeling_qwen3_moe", "Qwen3MoeExperts")
    for name in ("gate_up_proj", "down_proj"):
        count, rows, columns = getattr(built, name).shape
        adapters[name] = Adapter("default", torch.randn(count, 3, columns), torch.randn(count, rows, 3), 0.5, 0.0)
        getattr(folded, name).add_(0.5 * adapters[name].b @ adapters[name].a)
    out = experts.experts_forward(built, *inputs, adapters)
    torch.testing.assert_close(out, results(folded, "eager", *inputs)[0], rtol=1e-4, atol=1e-4)


def test_unsupported_experts_are_reported():
    built = experts_module("qwen3_moe", "modeling_qwen3_moe", "Qwen3MoeExperts")
    inputs = drawn(built)
    built._is_expert_parallel = True
    with pytest.raises(ModelError):
        results(built, experts.NAME, *inputs)
    assert "ExpertsInterface" in experts.obstacle(nn.Linear(2, 2))
