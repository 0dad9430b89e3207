"""The processors that Linux's compute driver (KFD) has, by the PCI address of their GPU.

A GPU in compute partitions is several processors. They have no PCI functions of their own: drivers
name them by functions that do not exist, or by bits beyond the address. The render nodes of all but
the first are below `/sys/devices/platform`, where nodes without a processor exist, too. So the only
proof of a render node is the processor's entry in the topology of KFD (`kfd_topology.c` in Linux).
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Processor(msgspec.Struct, frozen=True):
    """A processor: its render node, and its index among all, by which ROCm's runtime names it."""

    render_node: str
    runtime_index: int


def read_processors(sysfs: Path) -> dict[str, list[Processor]]:
    """Return the processors of each GPU in the order of its partitions."""
    processors: dict[str, list[tuple[tuple[int, ...], Processor]]] = {}
    folders = (sysfs / "class/kfd/kfd/topology/nodes").glob("[0-9]*")
    nodes = [_read_properties(folder) for folder in sorted(folders, key=lambda f: int(f.name))]
    gpus = [node for node in nodes if node.get("drm_render_minor", 0) > 0]
    for index, node in enumerate(gpus):
        # 31:28 or the function is the partition, and the function is 0 then.
        location, minor = node.get("location_id", 0), node["drm_render_minor"]
        bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
        address = f"{node.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
        order = location >> 28, function, minor
        processor = Processor(f"/dev/dri/renderD{minor}", index)
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
