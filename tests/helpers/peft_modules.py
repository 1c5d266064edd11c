"""PEFT's own modules on plain linears, and the same step through halfbyte's functions, for the tests of `lora`."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.activations import ACT2FN

from halfbyte.autograd.lora import LoRA, lora_qkv
from halfbyte.autograd.lora_mlp import lora_mlp
from halfbyte.modeling.projections import dora_adapter
from halfbyte.ops.dropout import Dropout, keep_mask

HUGGING_FACE = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
QKV, MLP = ("q", "k", "v"), ("gate", "up", "down")


class SeededDropout(nn.Dropout):
    """PEFT's dropout with the masks of halfbyte's functions: a seed for each call, drawn in their order."""

    def forward(self, x):
        if not self.training or not self.p:
            return x
        rows, mask = x.reshape(-1, x.shape[-1]), Dropout.drawn(self.p, 1, x.device)
        keep = keep_mask(mask, torch.arange(len(rows), device=x.device), rows.shape[1])
        return (rows * keep * mask.scale).view(x.shape)


class Model(nn.Module):
    """q, k and v of one input, and a gated MLP."""

    def __init__(self, hidden=24, inner=37, bias=False, activation="silu", keys=7):
        super().__init__()
        for name, width in zip(QKV, (hidden, keys, 11), strict=True):
            self.add_module(name, nn.Linear(hidden, width, bias=bias))
        self.gate, self.up = nn.Linear(hidden, inner, bias=bias), nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)
        self.activation = activation

    def forward(self, x):
        """PEFT's results: q, k, v and the MLP's."""
        qkv = self.q(x), self.k(x), self.v(x)
        return *qkv, self.down(ACT2FN[HUGGING_FACE[self.activation]](self.gate(x)) * self.up(x))

    def adapter(self, name):
        """(weight, bias, LoRA or None) of a projection."""
        module = getattr(self, name)
        if not hasattr(module, "lora_A"):
            return module.weight, module.bias, None
        weight, bias = module.base_layer.weight, module.base_layer.bias
        lora = LoRA(module.lora_A["default"].weight, module.lora_B["default"].weight, module.scaling["default"])
        if module.lora_magnitude_vector:
            lora = dora_adapter(lora.a, lora.b, lora.scaling, module.lora_magnitude_vector["default"], weight)
        return weight, bias, lora

    def fused(self, x, weights=None, dropout=0.0):
        """The same results from halfbyte; `weights` by name replace the plain ones."""
        weights = weights or {}
        base = {name: self.adapter(name) for name in (*QKV, *MLP)}
        values, biases, loras = ([[base[name][part] for name in names] for names in (QKV, MLP)] for part in range(3))
        values = [[weights.get(name, value) for name, value in zip(names, part, strict=True)]
                  for names, part in zip((QKV, MLP), values, strict=True)]  # fmt: skip
        return *lora_qkv(x, values[0], biases[0], loras[0], dropout), lora_mlp(
            x, *values[1], biases[1], loras[1], self.activation, dropout
        )


def model(r=4, targets=(*QKV, *MLP), dtype=torch.float64, dropout=0.0, ranks=None, rslora=False, dora=False, **keys):
    """A model whose adapters are not at their starting point, where B = 0 hides half of the gradients."""
    config = LoraConfig(
        r=r, lora_alpha=3, target_modules=list(targets), lora_dropout=dropout, rank_pattern=ranks or {},
        use_rslora=rslora, use_dora=dora,
    )  # fmt: skip
    made = inject_adapter_in_model(config, Model(**keys)).to(dtype)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.randn_like(parameter)
    for module in made.modules():
        if dropout and hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = SeededDropout(dropout)
    return made


def step(module, function, x, seeds, x_grad=True):
    """Outputs, the gradient of x, and gradients by parameter, of one backward with the given output gradients."""
    x = x.detach().requires_grad_(x_grad)
    outputs = function(x)
    torch.autograd.backward(outputs, [seed.to(output.dtype) for seed, output in zip(seeds, outputs, strict=True)])
    grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    return outputs, x.grad, grads


def seeds_for(module, x):
    with torch.no_grad():
        return [torch.randn_like(output) for output in module(x)]


def assert_steps_close(mine, theirs, **tolerance):
    torch.testing.assert_close(mine[0], theirs[0], **tolerance)
    torch.testing.assert_close(mine[1], theirs[1], **tolerance)
    assert mine[2].keys() == theirs[2].keys()
    torch.testing.assert_close(mine[2], theirs[2], **tolerance)
