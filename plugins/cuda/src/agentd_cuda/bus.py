"""GPUs on the PCI bus that the driver does not list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentd.plugin_api import ConditionInfo

VENDOR = "10de"
_FOR_MACHINES = ("vfio-pci", "pci-stub")
"""Drivers of devices that virtual machines use."""


def conditions(
    on_bus: Sequence[str], listed: Sequence[str], sysfs: Path
) -> Iterator[ConditionInfo]:
    """Yield a condition if the driver lists fewer GPUs than the bus has.

    Both are PCI addresses, in `listed` empty where unknown. GPUs of virtual machines do not count:
    a driver for these has them, or they are virtual functions.
    """
    missing = []
    for address in set(on_bus) - set(listed):
        folder = sysfs / "bus/pci/devices" / address
        driver = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
        if folder.exists() and driver not in _FOR_MACHINES and not (folder / "physfn").exists():
            other = f"driver: {driver}" if driver else "no driver"
            missing.append(address if driver == "nvidia" else f"{address} ({other})")
    if len(missing) > listed.count(""):
        addresses = ", ".join(sorted(missing))
        reason = f"the NVIDIA driver does not list {addresses}, which the PCI bus has"
        yield ConditionInfo(reason, "see what the driver says: dmesg | grep NVRM")
