"""Compute, memory and link rates of GPUs, for predicted seconds where none can be measured.

The rates of an H200 were measured (docs/benchmarks.md). Other cards scale them by their data sheets: dense bf16 GEMMs
with fp32 accumulation, memory bandwidth, and the link in one direction. NCCL reached 0.73 of NVLink's 450 GB/s.
Consumer cards on PCIe 4 ×16 copy through the host and usually reach 20 of 32 GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .memory_plan import GIB

if TYPE_CHECKING:
    import torch

NVLINK = 330e9 / 450e9  # share of the data sheet's rate that a collective reaches
# bytes/s of a collective over PCIe ×16, by generation
PCIE3 = 10e9
PCIE4 = 20e9
PCIE5 = 40e9
# bytes/s of a copy between a GPU and pinned host memory
HOST3 = 12e9
HOST4 = 25e9
HOST5 = 50e9


@dataclass(frozen=True)
class Card:
    """A GPU, its link to the other GPUs of its host, and its link to host memory.

    Attributes:
        compute, memory: GEMM rate and memory bandwidth, relative to an H200.
        link: bytes/s that a rank receives in a collective.
        host: bytes/s to pinned host memory while no other GPU copies.
        gib: memory size in GiB.
    """

    name: str
    compute: float
    memory: float
    link: float
    host: float
    gib: int

    def measured(self, link: float | None = None, host: float | None = None) -> Card:
        """The same card with measured bandwidths (bytes/s) in place of the table's."""
        return replace(self, link=link or self.link, host=host or self.host)


def _card(name: str, teraflops: float, bandwidth: float, link: float, host: float, gib: int) -> Card:
    return Card(name, teraflops / 989, bandwidth / 4.8e12, link, host, gib)


# NVIDIA's data sheets and architecture white papers, as of 2026. The longest matching name wins.
CARDS = (
    _card("H200", 989, 4.8e12, 450e9 * NVLINK, 50e9, 141),
    _card("B200", 2250, 8.0e12, 900e9 * NVLINK, HOST5, 180),
    _card("H100 PCIe", 756, 2.0e12, PCIE5, HOST5, 80),
    _card("H100", 989, 3.35e12, 450e9 * NVLINK, HOST5, 80),
    _card("A100", 312, 2.04e12, 300e9 * NVLINK, HOST4, 80),
    _card("A100-PCIE", 312, 1.94e12, PCIE4, HOST4, 80),
    _card("L40S", 362, 0.864e12, PCIE4, HOST4, 48),
    _card("RTX A6000", 155, 0.768e12, PCIE4, HOST4, 48),
    _card("RTX 5090", 210, 1.79e12, PCIE5, HOST5, 32),
    _card("RTX 4090", 165, 1.008e12, PCIE4, HOST4, 24),
    _card("RTX 3090", 71, 0.936e12, PCIE4, HOST4, 24),
    _card("A10", 125, 0.6e12, PCIE4, HOST4, 24),
    _card("L4", 121, 0.3e12, PCIE4, HOST4, 24),
    _card("T4", 65, 0.32e12, PCIE3, HOST3, 16),
)
H200 = CARDS[0]
# GiB of a GPU outside torch's allocator: CUDA and the driver, and with several GPUs NCCL's buffers, measured in a
# sharded step of a 70B model on two H200s. Connections with fewer channels, such as PCIe, need less.
CUDA_GIB, NCCL_GIB = 0.7, 0.9
USUAL = {26: "RTX 4090", 34: "RTX 5090", 60: "L40S", 100: "H100", 150: "H200"}  # largest GiB → the card assumed


def usable_bytes(gib: float, gpus: int = 1) -> int:
    """Return the bytes that torch's allocator can use of a GPU with `gib` GiB, in a run on `gpus` GPUs."""
    return int((gib - CUDA_GIB - (NCCL_GIB if gpus > 1 else 0)) * GIB)


def card_named(name: str) -> Card | None:
    """Find the card in a device name such as "NVIDIA GeForce RTX 4090"; None if it is not in the table."""
    words = f" {name} ".replace("-80GB", " ").replace("-SXM", " ")
    matches = [card for card in CARDS if f" {card.name} " in words or f" {card.name}-" in words]
    return max(matches, key=lambda card: len(card.name), default=None)


def card_of_memory(gib: float) -> Card:
    """The most likely card for a memory size."""
    name = next((name for limit, name in USUAL.items() if gib <= limit), "B200")
    return next(card for card in CARDS if card.name == name)


def card_of(device: torch.device) -> Card:
    """The card of an existing device: by its name, else by its memory. Without a GPU: the H200."""
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    properties = torch.cuda.get_device_properties(device)
    return card_named(properties.name) or card_of_memory(properties.total_memory / GIB)
