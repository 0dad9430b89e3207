"""Linux's data about a device file: its PCI devices, their vendors and NUMA nodes.

A device is found by its numbers under `/sys/dev/char` or `block`; the PCI address is the nearest
folder above it that is named like one. A VFIO group has no PCI device above it and lists its
members under `/sys/kernel/iommu_groups`. Bridges among them do not matter, since they keep their
driver (https://docs.kernel.org/driver-api/vfio.html).
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_BRIDGE = "0604"
"""PCI class of a bridge between PCI buses: https://admin.pci-ids.ucw.cz/read/PD/06/04"""
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Sysfs:
    """sysfs, below a root that tests can set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "bus/pci/devices"

    def pci_addresses(self, device_file: Path) -> list[str]:
        """Return the PCI addresses behind a file: one, several for a VFIO group, or none.

        Raises:
            OSError: sysfs refuses to tell.
        """
        if device_file.parent.name == "vfio" and device_file.name.isdigit():
            members = self.root / "kernel/iommu_groups" / device_file.name / "devices"
            names = sorted(path.name for path in members.glob("*") if _PCI.fullmatch(path.name))
            return [name for name in names if not self.read(name, "class").startswith(_BRIDGE)]
        status = device_file.stat()
        numbers, kind = status.st_rdev, "block" if stat.S_ISBLK(status.st_mode) else "char"
        link = self.root / "dev" / kind / f"{os.major(numbers)}:{os.minor(numbers)}"
        for folder in (link.resolve(), (link / "device").resolve()):
            for name in reversed(folder.parts):
                if _PCI.fullmatch(name):
                    return [name]
        return []

    def read(self, pci: str, name: str) -> str:
        """Return a file of a PCI device without `0x`, empty if there is none.

        Raises:
            OSError: it cannot be read.
        """
        try:
            text = (self.devices / pci / name).read_text(encoding="ascii")
        except FileNotFoundError:
            return ""
        return text.strip().removeprefix("0x")

    def driver(self, pci: str) -> str:
        """Return the name of a PCI device's driver, empty if it has none."""
        link = self.devices / pci / "driver"
        return link.resolve().name if link.is_symlink() else ""
