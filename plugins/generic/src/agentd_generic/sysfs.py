"""Linux's data about a device file: its PCI device, vendor and NUMA node.

A device is found by its numbers under `/sys/dev/char` or `block`; the PCI address is the nearest
folder above it that is named like one. A VFIO group has no PCI device above it and lists its
members under `/sys/kernel/iommu_groups`.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Sysfs:
    """sysfs, below a root that tests can set."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def pci_address(self, device_file: Path) -> str | None:
        """Return the PCI address of the device behind a file, None if there is none."""
        if device_file.parent.name == "vfio" and device_file.name.isdigit():
            members = self._root / "kernel/iommu_groups" / device_file.name / "devices"
            names = sorted(path.name for path in members.glob("*"))
            return names[0] if len(names) == 1 and _PCI.fullmatch(names[0]) else None
        try:
            status = device_file.stat()
        except OSError:
            return None
        numbers, kind = status.st_rdev, "block" if stat.S_ISBLK(status.st_mode) else "char"
        link = self._root / "dev" / kind / f"{os.major(numbers)}:{os.minor(numbers)}"
        for folder in (link.resolve(), (link / "device").resolve()):
            for name in reversed(folder.parts):
                if _PCI.fullmatch(name):
                    return name
        return None

    def vendor(self, pci: str) -> str:
        """Return a PCI device's vendor as four hexadecimal digits, empty if unknown."""
        return self._text(pci, "vendor").removeprefix("0x")

    def numa_node(self, pci: str) -> int | None:
        """Return the NUMA node of a PCI device, None if Linux assigns none (-1)."""
        text = self._text(pci, "numa_node")
        return int(text) if text.isdigit() else None

    def _text(self, pci: str, name: str) -> str:
        try:
            return (self._root / "bus/pci/devices" / pci / name).read_text(encoding="ascii").strip()
        except OSError:
            return ""
