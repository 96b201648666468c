"""What data sheets say of accelerators: memory, its bandwidth, dense bfloat16 rate.

Used for estimates alone, and said so wherever one is shown. Dense rates: the sheets' headline
figures with sparsity are halved.
"""

from __future__ import annotations

from dataclasses import dataclass

from autospec.errors import InputError

_GB = 1e9
_TB = 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator; bytes are of 10^9, as data sheets count them."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

DEVICES: tuple[Device, ...] = (
    Device("a100-sxm-80gb", 80 * _GB, 2.039 * _TB, 312e12, _NVIDIA + "a100/"),
    Device("h100-sxm", 80 * _GB, 3.35 * _TB, 989e12, _NVIDIA + "h100/"),
    Device("h200-sxm", 141 * _GB, 4.8 * _TB, 989e12, _NVIDIA + "h200/"),
    Device("l4", 24 * _GB, 0.3 * _TB, 121e12, _NVIDIA + "l4/"),
    Device("l40s", 48 * _GB, 0.864 * _TB, 362e12, _NVIDIA + "l40s/"),
)


def device_of(name: str) -> Device:
    """By its name. Raises InputError that lists the names."""
    for device in DEVICES:
        if device.name == name.lower():
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise InputError(f"--device: no data sheet for {name!r}; there are {known}")
