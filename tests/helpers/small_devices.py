"""Simulate devices with less shared memory than a Hopper GPU, on one or in Triton's interpreter."""

import dataclasses

from halfbyte.kernels.device import Device, device_of
from tests.helpers.parity import INTERPRETED


def small(kib, tensor):
    """The device of `tensor` with `kib` KiB of shared memory per block."""
    here = device_of(tensor)
    if INTERPRETED:
        return Device(f"one of {kib} KiB", "cpu", (0, 0), kib * 1024, None, 4)
    return dataclasses.replace(here, name=f"one of {kib} KiB", shared_bytes=kib * 1024)


def compiled_shared_bytes(launcher):
    """Shared memory that each compiled variant of a kernel takes."""
    return [compiled.metadata.shared for compiled in launcher._compiled.values()]


def refuses(launcher, monkeypatch):
    """Make Triton report that the kernel needs too much shared memory."""
    from triton.runtime.errors import OutOfResources

    class Large:
        __module__, __name__ = launcher.function.__module__, launcher.function.__name__

        def warmup(self, *arguments, **options):
            raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(launcher, "function", Large())
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "_refused", {})
    monkeypatch.setattr(launcher, "known", {})
