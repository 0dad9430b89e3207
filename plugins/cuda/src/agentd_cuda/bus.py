"""GPUs on the PCI bus that the driver does not list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentd.plugin_api import ConditionInfo, on_pci_bus

VENDOR = "10de"
_FOR_MACHINES = ("vfio-pci", "pci-stub")
"""Drivers of devices that virtual machines use."""


def conditions(sysfs: Path, listed: Sequence[str]) -> Iterator[ConditionInfo]:
    """Yield a condition if the driver lists fewer GPUs than the bus has.

    `listed` are the addresses of listed GPUs, empty where unknown. GPUs of virtual machines do not
    count: a driver for these has them, or they are virtual functions.
    """
    missing = []
    for address in on_pci_bus(VENDOR, sysfs=sysfs):
        folder = sysfs / "bus/pci/devices" / address
        driver = (folder / "driver").resolve().name if (folder / "driver").exists() else "none"
        is_foreign = driver in _FOR_MACHINES or (folder / "physfn").exists()
        if address not in listed and not is_foreign:
            missing.append(address if driver == "nvidia" else f"{address} (driver: {driver})")
    if len(missing) > listed.count(""):
        reason = f"the NVIDIA driver does not list {', '.join(missing)}, which the PCI bus has"
        yield ConditionInfo(reason, "see what the driver says: dmesg | grep NVRM")
