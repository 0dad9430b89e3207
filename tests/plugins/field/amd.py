"""AMD GPUs in the states of the field, over the substitute of `native/amdsmi.c`."""

import os
import shutil
from pathlib import Path
from typing import ClassVar

from plugins.field.rig import add_to_bus

SERIALS = ("a0000000000000aa", "b0000000000000bb", "c0000000000000cc")
VENDOR = "1002"
API_FAILED, NO_PERMISSION = 7, 10
ADDRESSES = tuple(f"0000:0{index}:00.0" for index in range(len(SERIALS)))


class AmdRig:
    """Three whole GPUs on the PCI bus, in shares with memory, and no entries of them in KFD."""

    name = "rocm"
    target = "agentd_rocm:RocmPlugin"
    stable_ids = tuple(f"GPU-{serial}" for serial in SERIALS)
    words: ClassVar = {
        "lost": "AMD SMI does not tell its PCI address: API call failed",
        "identity alone": "AMD SMI does not tell its memory: API call failed",
        "no permission": "AMD SMI does not tell its PCI address: Permission denied",
        "replaced": "",
    }

    def __init__(self, folder: Path, monkeypatch, library: Path) -> None:
        self.file, self.sysfs = folder / "gpus", folder / "sys"
        self.settings = {"sysfs": str(self.sysfs), "mode": "shares", "memory-slot": True}
        rocm = folder / "rocm"
        (rocm / "bin").mkdir(parents=True)
        (rocm / "lib").mkdir()
        shutil.copy(library, rocm / "lib" / library.name)
        cat = rocm / "bin/cat"  # pyrsmi asks it whether the driver is loaded
        cat.write_text("#!/bin/sh\necho live\n")
        cat.chmod(0o755)
        monkeypatch.setenv("PATH", f"{rocm}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("ROCM_PATH", str(rocm))
        monkeypatch.setenv("FAKE_AMDSMI_FILE", str(self.file))
        for index, address in enumerate(ADDRESSES):
            add_to_bus(self.sysfs, address, VENDOR, "amdgpu")
            (self.sysfs / f"bus/pci/devices/{address}/drm/renderD{128 + index}").mkdir(parents=True)
        self.bring()

    def bring(self, state: str = "") -> None:
        lines = {
            "lost": f"fail amdsmi_get_gpu_device_bdf {API_FAILED} 1",
            "identity alone": f"fail amdsmi_get_gpu_memory_total {API_FAILED} 1",
            "no permission": f"fail amdsmi_get_gpu_device_bdf {NO_PERMISSION} 1",
        }
        gpus = [f"gpu pci={address} name=AMD Instinct MI300X" for address in ADDRESSES]
        for address, serial in zip(ADDRESSES, SERIALS, strict=True):
            is_new = state == "replaced" and address == ADDRESSES[1]
            file = self.sysfs / "bus/pci/devices" / address / "unique_id"
            file.write_text("d0000000000000dd\n" if is_new else f"{serial}\n")
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(("handles big", *gpus, lines.get(state, ""), "")))
        new.replace(self.file)
