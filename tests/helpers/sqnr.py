"""Normal weights of a model's scale, and a format's signal-to-noise ratio on them."""

import torch


def sqnr(weight, format):
    """Signal-to-quantization-noise ratio in dB."""
    values = format.dequantize(format.quantize(weight), tuple(weight.shape), torch.float32)
    return float(10 * torch.log10(weight.float().square().sum() / (weight.float() - values).square().sum()))


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
