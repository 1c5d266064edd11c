"""Check that cached constants hold data even when they are first made under a fake mode."""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from halfbyte.formats.bitplane import kbit_codebook
from halfbyte.formats.codebooks import codebook4


def test_constants_made_in_fake_mode_have_data():
    for cached in (codebook4, kbit_codebook):
        cached.cache_clear()
    cpu = torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = codebook4("nf4", cpu), kbit_codebook("nf", 4, cpu)
    assert not any(isinstance(tensor, FakeTensor) for tensor in made)
    assert made[0][0] == -1.0
