"""Parameters with states, and steps of an optimizer's reference on them, for comparing kernels with it."""

import copy

import torch

from halfbyte.ops.optimizer import RULES, SETTINGS, Coefficients, Parameters, prepare_step
from halfbyte.ops.optimizer_state import STORAGES

SIZES = (1, 255, 256, 257, 4097, 70001)
KINDS = [(rule, storage) for rule, row in RULES.items() for storage in row.storages]
CORRECTIONS = {"correction8": torch.int8, "correction16": torch.int16}
GROUP = {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "beta3": 0.999, "eps": 1e-8, "alpha": 5.0}


def exact_sqrt(tensor):
    """Round the square root correctly. torch's on CPUs, MKL's, is one unit in the last place off for some values."""
    return torch.sqrt(tensor.double()).float()


def random_values(size, generator):
    """Normal values times scales that differ by orders of magnitude, some of them zero."""
    scale = torch.rand(size, generator=generator).pow(6) * (torch.rand(size, generator=generator) > 0.01)
    return torch.randn(size, generator=generator) * scale


def make(rule, storage, rounding="nearest", dtype=torch.float32, gradient=torch.float32, sizes=SIZES):
    """Parameters on the CPU with states of random values; their order in the coefficients is reversed."""
    generator, stored = torch.Generator().manual_seed(len(sizes)), STORAGES[storage]
    states = []
    for size in sizes:
        moment = random_values(size, generator)
        kinds = zip(RULES[rule].signed, RULES[rule].squares, strict=True)
        states.append([stored.encode(2 * moment.square() if kind[1] else moment, *kind) for kind in kinds])
    corrections = []
    if kind := CORRECTIONS.get(rounding):
        limits = torch.iinfo(kind)
        corrections = [
            torch.randint(limits.min // 2, limits.max // 2, (size,), generator=generator, dtype=kind) for size in sizes
        ]
    return Parameters(
        rule,
        storage,
        rounding,
        torch.arange(len(sizes) - 1, -1, -1, dtype=torch.int32),
        [torch.randn(size, generator=generator).to(dtype) for size in sizes],
        [random_values(size, generator).to(gradient) for size in sizes],
        states,
        corrections,
        [(3 * at + 1, 2**32 * at - 300 * (at > 0)) for at in range(len(sizes))] if rounding == "stochastic" else [],
    )


def copied(parameters, device="cpu"):
    """A copy on a device, without what a kernel has kept."""
    found = copy.copy(parameters)
    found.launch = {}
    for name in ("weights", "gradients", "corrections"):
        setattr(found, name, [each.to(device, copy=True) for each in getattr(parameters, name)])
    found.states = [
        [tuple(part if part is None else part.to(device, copy=True) for part in pair) for pair in state]
        for state in parameters.states
    ]
    return found


def coefficients_of(rule, count, step, device="cpu"):
    """Coefficients fp32 [count, 13] and steps fp32 [count] of a step."""
    settings = torch.tensor([[GROUP.get(name, 0.0) for name in SETTINGS]], dtype=torch.float64)
    coefficients, steps = torch.empty(count, len(Coefficients._fields)), torch.full((count,), step - 1.0)
    factor = torch.tensor(0.5)
    prepare_step.reference(settings, torch.zeros(count, dtype=torch.int32), steps, coefficients, rule, factor)
    return coefficients.to(device), steps.to(device)


def tensors(parameters):
    """All tensors that a step writes, with their names."""
    found = []
    for i, weight in enumerate(parameters.weights):
        found.append((f"weight {i}", weight))
        for number, (codes, scales) in enumerate(parameters.states[i]):
            found.append((f"codes {number} of {i}", codes.view(torch.uint8)))
            if scales is not None:
                found.append((f"scales {number} of {i}", scales))
        if parameters.corrections:
            found.append((f"correction {i}", parameters.corrections[i]))
    return found
