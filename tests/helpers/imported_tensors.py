"""Entries of one weight as GPTQ, AWQ, ModelOpt, MXFP4 and compressed-tensors checkpoints store it."""

import torch

from halfbyte.formats import Awq, Gptq, GptqV2, Mxfp4, Nvfp4, PackQuantized, PackQuantizedZeros
from halfbyte.tensor import QuantizedTensor

N, K, GROUPS = 24, 64, 4


def words(*shape):
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def gptq(indexed=True):
    state = {
        "../qweight": words(K // 8, N),
        "../qzeros": words(GROUPS, N // 8) & 0x77777777,  # 15 would wrap
        "../scales": (torch.rand(GROUPS, N) * 0.02).half(),
    }
    order = torch.randperm(K) // (K // GROUPS)  # desc_act: any order
    return state | {"../g_idx": order.to(torch.int32)} if indexed else state


def gptq_listed():
    """Groups of consecutive inputs that the file lists."""
    return gptq(indexed=False) | {"../g_idx": (torch.arange(K) // (K // GROUPS)).int()}


def gptq_uneven():
    """Groups of different sizes."""
    return gptq(indexed=False) | {"../g_idx": (torch.arange(K) % (GROUPS - 1)).int()}


def awq():
    return gptq(indexed=False) | {"../qweight": words(K, N // 8)}


def packed(zeros=False, indexed=False):
    state = {
        "../weight_packed": words(N, K // 8),
        "../weight_scale": (torch.rand(N, GROUPS) * 0.02).bfloat16(),
        "../weight_shape": torch.tensor([N, K]),
    }
    state |= {"../weight_zero_point": words(N // 8, GROUPS)} if zeros else {}
    return state | ({"../weight_g_idx": gptq()["../g_idx"]} if indexed else {})


def modelopt():
    scale = torch.randint(0, 127, (N, K // 16), dtype=torch.uint8)
    return {
        "": torch.randint(0, 256, (N, K // 2), dtype=torch.uint8),
        "../weight_scale": scale.view(torch.float8_e4m3fn),
        "../weight_scale_2": torch.tensor(3.21e-5),
    }


def mxfp4():
    return {
        "": torch.randint(0, 256, (N, K // 2), dtype=torch.uint8),
        "../weight_scale": torch.randint(110, 130, (N, K // 32), dtype=torch.uint8),
    }


def gpt_oss(experts=3):
    return {
        "_blocks": torch.randint(0, 256, (experts, N, K // 32, 16), dtype=torch.uint8),
        "_scales": torch.randint(110, 130, (experts, N, K // 32), dtype=torch.uint8),
    }


CHECKPOINTS = [
    (Gptq, gptq), (GptqV2, gptq), (Gptq, lambda: gptq(False)), (Awq, awq), (Nvfp4, modelopt), (Mxfp4, mxfp4),
    (PackQuantized, packed), (PackQuantizedZeros, lambda: packed(True, True)), (GptqV2, gptq_listed),
    (Gptq, gptq_uneven),
]  # fmt: skip
IDS = [
    "gptq", "gptq_v2", "gptq-runs", "awq", "modelopt", "mxfp4", "pack-quantized", "pack-quantized-zeros", "gptq-listed",
    "gptq-uneven",
]  # fmt: skip


def loaded(cls, state):
    return QuantizedTensor(*cls.from_state(state, "layer.weight"))
