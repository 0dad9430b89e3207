"""The processors that Linux's compute driver (KFD) has, by the PCI address of their GPU.

A GPU in compute partitions is several processors. They have no PCI functions of their own: drivers
name them by functions that do not exist, or by bits beyond the address. The render nodes of all but
the first are below `/sys/devices/platform`, where nodes without a processor exist, too. So the only
proof of a render node is the processor's entry in the topology of KFD (`kfd_topology.c` in Linux).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec


class Processor(msgspec.Struct, frozen=True):
    """A processor: its render node, empty without one, and its name in ROCm's runtime.

    The runtime calls a processor by the serial number that KFD reports, which can differ from its
    GPU's, or by its index among all where partitions have one number, or none.
    """

    render_node: str
    runtime_name: str


def read_processors(sysfs: Path) -> dict[str, list[Processor]]:
    """Return the processors of each GPU in the order of its partitions."""
    folders = (sysfs / "class/kfd/kfd/topology/nodes").glob("[0-9]*")
    nodes = [_read_properties(folder) for folder in sorted(folders, key=lambda f: int(f.name))]
    gpus = [node for node in nodes if node.get("location_id") or node.get("drm_render_minor")]
    serials = Counter(node.get("unique_id", 0) for node in gpus)
    processors: dict[str, list[tuple[tuple[int, ...], Processor]]] = {}
    for index, node in enumerate(gpus):
        # The partition is in bits 31 to 28, or in those of the function, which is 0 otherwise.
        location, minor = node.get("location_id", 0), node.get("drm_render_minor", 0)
        bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
        address = f"{node.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
        serial = node.get("unique_id", 0)
        processor = Processor(
            f"/dev/dri/renderD{minor}" if minor else "",
            f"GPU-{serial:016x}" if serial and serials[serial] == 1 else str(index),
        )
        order = location >> 28, function, minor == 0, minor
        processors.setdefault(real_address(address, sysfs), []).append((order, processor))
    return {
        address: [processor for _, processor in sorted(found, key=lambda entry: entry[0])]
        for address, found in processors.items()
    }


def real_address(address: str, sysfs: Path) -> str:
    """Return the PCI address of a GPU for that of its partition, a function that does not exist."""
    devices, first = sysfs / "bus/pci/devices", f"{address[:-1]}0"
    is_partition = not (devices / address).exists() and (devices / first).exists()
    return first if is_partition else address


def _read_properties(folder: Path) -> dict[str, int]:
    """Return the properties of a node; empty if they are unreadable."""
    try:
        lines = (folder / "properties").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(" ") for line in lines]
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}
