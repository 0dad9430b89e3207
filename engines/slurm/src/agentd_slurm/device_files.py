"""The device file of an accelerator: Slurm confines a job to the files of its GPUs.

NVIDIA's driver lists each GPU's UUID and minor number below /proc/driver/nvidia/gpus. For others
the render node of the PCI device is in sysfs. The plugin `generic` names a device by its file, with
colons for slashes. Anything else gets a stand-in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentd.procfs import read_lines

STAND_INS = "/dev/agentd-slurm"
"""Folder of files that stand in for devices without a file of their own."""
_PCI = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


def nvidia_files(root: Path = Path("/")) -> dict[str, str]:
    """Return NVIDIA's device files by the UUID of their GPU."""
    file_by_uuid = {}
    for file in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        lines = (line.partition(":") for line in read_lines(file))
        fields = {name.strip(): value.strip() for name, _, value in lines}
        if "GPU UUID" in fields and fields.get("Device Minor", "").isdecimal():
            file_by_uuid[fields["GPU UUID"]] = f"/dev/nvidia{fields['Device Minor']}"
    return file_by_uuid


def render_node(address: str, root: Path = Path("/")) -> str | None:
    """Return the render node of a PCI device; None if it has none."""
    folder = root / "sys/bus/pci/devices" / address.lower() / "drm"
    nodes = sorted(folder.glob("renderD*"))
    return f"/dev/dri/{nodes[0].name}" if nodes else None


def device_file(device: Mapping[str, Any], root: Path = Path("/")) -> str | None:
    """Return the file of a device as `/v1/devices` lists it; None if none is known."""
    if file := nvidia_files(root).get(device["stable_id"]):
        return file
    names = [device["stable_id"], *device["aliases"]]
    for name in names:
        path = name.replace(":", "/")
        if (root / path).is_char_device():
            return f"/{path}"
    for name in names:
        if _PCI.fullmatch(name) and (file := render_node(name, root)):
            return file
    return None


def assign_files(
    devices: list[Mapping[str, Any]], folder: str = STAND_INS, root: Path = Path("/")
) -> tuple[dict[str, str], list[str]]:
    """Return each device's file by its stable id, and the stand-ins among them."""
    files: dict[str, str] = {}
    stand_ins = []
    for device in devices:
        file = device_file(device, root)
        if file is None:
            file = f"{folder}/{device['id']}"
            stand_ins.append(file)
        files[device["stable_id"]] = file
    return files, stand_ins
