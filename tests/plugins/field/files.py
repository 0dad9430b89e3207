"""Accelerators that are device files in the states of the field, with a substitute for sysfs."""

import os
import stat
from pathlib import Path
from typing import ClassVar

from plugins.field.rig import add_to_bus
from support.needs import require

VENDOR = "1ae0"
ADDRESSES = tuple(f"0000:0{index}:00.0" for index in range(3))
NEW = "0000:09:00.0"
MINORS = (3, 5, 7)
"""Device numbers of files that can be opened anywhere, of memory devices."""


class FilesRig:
    """Three device files, each of a PCI device."""

    name = "tpu"
    target = "agentd_generic:GenericPlugin"
    stable_ids = ADDRESSES
    words: ClassVar = {
        "lost": "vendor: Is a directory",
        "missing in the driver": f"{ADDRESSES[1]} is on the PCI bus, and has no device file",
        "replaced": "",
    }

    def __init__(self, folder: Path, *_: object) -> None:
        require("root")
        self.dev, self.sysfs = folder / "dev", folder / "sys"
        self.settings = {
            "devices": [f"{self.dev}/accel[0-9]"],
            "pci-vendors": [VENDOR],
            "sysfs": str(self.sysfs),
        }
        (self.sysfs / "dev/char").mkdir(parents=True)
        self.dev.mkdir()
        for address in ADDRESSES:
            add_to_bus(self.sysfs, address, VENDOR, "accel")
        for index in range(len(ADDRESSES)):
            self.add(index, ADDRESSES[index])

    def add(self, index: int, address: str) -> None:
        """Make a device file, of the PCI device with this address."""
        os.mknod(self.dev / f"accel{index}", 0o666 | stat.S_IFCHR, os.makedev(1, MINORS[index]))
        link = self.sysfs / f"dev/char/1:{MINORS[index]}"
        link.symlink_to(self.sysfs / "bus/pci/devices" / address)

    def remove(self, index: int) -> None:
        (self.dev / f"accel{index}").unlink()
        (self.sysfs / f"dev/char/1:{MINORS[index]}").unlink()

    def bring(self, state: str = "") -> None:
        vendor = self.sysfs / "bus/pci/devices" / ADDRESSES[1] / "vendor"
        if vendor.is_dir():
            vendor.rmdir()
            vendor.write_text(f"0x{VENDOR}\n")
        if (self.dev / "accel1").exists():
            self.remove(1)
        match state:
            case "replaced":
                self.replace()
            case "lost":
                vendor.unlink()
                vendor.mkdir()  # even root cannot read it
                self.add(1, ADDRESSES[1])
            case "":
                self.add(1, ADDRESSES[1])

    def replace(self) -> None:
        if not (self.sysfs / "bus/pci/devices" / NEW).exists():
            add_to_bus(self.sysfs, NEW, VENDOR, "other")
        self.add(1, NEW)
