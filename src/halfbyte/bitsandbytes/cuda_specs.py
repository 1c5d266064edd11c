"""Properties of the CUDA or ROCm device, as `bitsandbytes.cuda_specs` reports them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CUDASpecs:
    """Highest compute capability of the devices and the CUDA version of torch."""

    highest_compute_capability: tuple[int, int]
    cuda_version_string: str
    cuda_version_tuple: tuple[int, int]

    @property
    def has_imma(self) -> bool:
        """Whether the device has int8 tensor cores."""
        return torch.version.hip is not None or self.highest_compute_capability >= (7, 5)


def get_compute_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of all devices, ascending."""
    return sorted(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def get_cuda_version_tuple() -> tuple[int, int] | None:
    """Return torch's (major, minor) CUDA or ROCm version, or None."""
    version = torch.version.cuda or torch.version.hip
    if not version:
        return None
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def get_cuda_version_string() -> str | None:
    """Return torch's CUDA or ROCm version without dots, such as "128", or None."""
    version = get_cuda_version_tuple()
    return None if version is None else f"{version[0]}{version[1]}"


def get_cuda_specs() -> CUDASpecs | None:
    """Return the specs of the devices, or None without a GPU."""
    version, string = get_cuda_version_tuple(), get_cuda_version_string()
    if not torch.cuda.is_available() or version is None or string is None:
        return None
    return CUDASpecs(get_compute_capabilities()[-1], string, version)


def get_rocm_gpu_arch() -> str:
    """Return the ROCm architecture, such as "gfx942", or "unknown"."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return "unknown"
    return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
