"""VFIO groups as firmware and slots make them: a card with its audio function, a bridge, others.

A group is given as a whole. Linux puts all functions of a card into one, and all cards behind a
bridge without ACS (https://docs.kernel.org/driver-api/vfio.html).
"""

import os
import stat
from pathlib import Path
from typing import NamedTuple

import pytest

from agentd.plugin_api import AllocatedDevice, DeviceInfo, Features
from agentd_generic import GenericPlugin
from support.needs import require

GPU, AUDIO, BRIDGE, NIC = "0x030000", "0x040300", "0x060400", "0x020000"
NVIDIA, INTEL = "10de", "8086"


class Node:
    """A node in a folder, with VFIO groups 1, 2, … and their PCI devices."""

    def __init__(self, folder: Path) -> None:
        require("root")
        self.dev, self.sysfs = folder / "dev/vfio", folder / "sys"
        self.dev.mkdir(parents=True)

    def card(self, pci: str, vendor: str, kind: str, driver: str = "vfio-pci") -> Path:
        folder = self.sysfs / "bus/pci/devices" / pci
        folder.mkdir(parents=True)
        for name, text in (("vendor", f"0x{vendor}"), ("class", kind), ("numa_node", "1")):
            (folder / name).write_text(f"{text}\n")
        if driver:
            (folder / "driver").symlink_to(self.sysfs / "bus/pci/drivers" / driver)
        return folder

    def group(self, number: int, *cards: tuple[str, str, str]) -> None:
        os.mknod(self.dev / str(number), 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        members = self.sysfs / f"kernel/iommu_groups/{number}/devices"
        for pci, vendor, kind in cards:
            self.card(pci, vendor, kind)
            (members / pci).mkdir(parents=True)

    def plugin(self, *vendors: str) -> GenericPlugin:
        settings = {"devices": [f"{self.dev}/[0-9]*"], "sysfs": str(self.sysfs)}
        plugin = GenericPlugin("gpu", {**settings, "pci-vendors": [*vendors]})
        plugin.open()
        return plugin


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


class Case(NamedTuple):
    """A group, and the stable id of its device, or why it is left out; "" if that is not said."""

    cards: list[tuple[str, str, str]]
    stable_id: str | None
    reason: str = ""


FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
CASES = {
    "GPU alone": Case([(FIRST, NVIDIA, GPU)], FIRST),
    "GPU with audio function": Case(
        [(FIRST, NVIDIA, GPU), ("0000:01:00.1", NVIDIA, AUDIO)], FIRST
    ),
    "GPU with functions of other vendors": Case(
        [(FIRST, NVIDIA, GPU), ("0000:01:00.1", INTEL, AUDIO)], FIRST
    ),
    "GPU behind a bridge": Case(
        [("0000:00:01.0", INTEL, BRIDGE), (FIRST, NVIDIA, GPU), ("0000:01:00.1", NVIDIA, AUDIO)],
        FIRST,
    ),
    "two GPUs": Case([(SECOND, NVIDIA, GPU), (FIRST, NVIDIA, GPU)], FIRST),
    "GPU with a foreign card": Case(
        [(FIRST, NVIDIA, GPU), ("0000:03:00.0", INTEL, NIC)], None,
        "its VFIO group also has devices of other vendors: 0000:03:00.0 (8086)",
    ),
    "foreign card": Case([("0000:03:00.0", INTEL, NIC)], None),
    "audio function alone": Case([("0000:09:00.1", NVIDIA, AUDIO)], None),
    "empty group": Case([], None, "sysfs lists no PCI device behind it"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_group_is_one_device_or_says_why_not(node: Node, name: str) -> None:
    case = CASES[name]
    node.group(7, ("0000:09:00.0", NVIDIA, GPU))
    node.group(12, *case.cards)
    plugin = node.plugin(NVIDIA)
    first, *others = plugin.list_devices()
    assert row(first) == ("gpu7", "0000:09:00.0", [f"{node.dev}/7"])
    expected = [("gpu12", case.stable_id, [f"{node.dev}/12"])] if case.stable_id else []
    assert [row(device) for device in others] == expected
    reasons = [condition.reason for condition in plugin.conditions()]
    assert reasons == ([f"'{node.dev}/12' is left out: {case.reason}"] if case.reason else [])
    given = [AllocatedDevice("gpu12", stable, "", "1") for _, stable, _ in expected]
    edits = plugin.container_edits(given, Features("docker"))
    assert [n.host_path for n in edits.device_nodes] == [f for _, _, fs in expected for f in fs]


def row(device: DeviceInfo) -> tuple[str, str, list[str]]:
    assert (device.health, device.numa_node) == ("healthy", 1)
    return device.id, device.stable_id, [*device.files]


def test_gpu_behind_iommufd_is_a_device_without_its_audio(node: Node) -> None:
    """Each function has a file (https://github.com/kubevirt/kubevirt/issues/14024)."""
    for minor, pci, kind in ((3, FIRST, GPU), (5, "0000:01:00.1", AUDIO)):
        folder = node.card(pci, NVIDIA, kind) / "vfio-dev" / f"vfio{minor}"
        folder.mkdir(parents=True)
        (node.sysfs / "dev/char").mkdir(parents=True, exist_ok=True)
        (node.sysfs / f"dev/char/1:{minor}").symlink_to(folder)
        (node.dev / "devices").mkdir(exist_ok=True)
        file = node.dev / f"devices/vfio{minor}"
        os.mknod(file, 0o600 | stat.S_IFCHR, os.makedev(1, minor))
    settings = {"devices": [f"{node.dev}/devices/vfio*"], "pci-vendors": [NVIDIA]}
    plugin = GenericPlugin("gpu", {**settings, "sysfs": str(node.sysfs)})
    plugin.open()
    (device,) = plugin.list_devices()
    assert row(device) == ("gpu3", FIRST, [f"{node.dev}/devices/vfio3"])
    assert plugin.conditions() == []


def test_groups_of_any_vendor_are_devices_without_vendors(node: Node) -> None:
    node.group(1, *CASES["GPU with audio function"].cards)
    node.group(2, ("0000:03:00.0", INTEL, NIC), ("0000:04:00.0", NVIDIA, GPU))
    plugin = node.plugin()
    path = f"{node.dev}/2".strip("/").replace("/", ":")
    assert [device.stable_id for device in plugin.list_devices()] == [FIRST, path]
    assert plugin.conditions() == []


@pytest.mark.parametrize(
    ("driver", "is_missing"), [("", True), ("vfio-pci", True), ("nvidia", False)]
)
def test_card_without_a_group_is_a_condition(node: Node, driver: str, is_missing: bool) -> None:
    node.group(1, *CASES["GPU with audio function"].cards)
    node.card(SECOND, NVIDIA, GPU, driver)
    node.card("0000:02:00.1", NVIDIA, AUDIO, driver)
    plugin = node.plugin(NVIDIA)
    plugin.list_devices()
    reasons = [condition.reason for condition in plugin.conditions()]
    reason = f"{SECOND} is on the PCI bus, and has no device file like {node.dev}/[0-9]*"
    assert reasons == ([reason] if is_missing else [])


def test_table_without_devices_is_a_condition(node: Node) -> None:
    plugin = node.plugin(NVIDIA)
    assert plugin.list_devices() == []
    reasons = [condition.reason for condition in plugin.conditions()]
    assert reasons == [f"no device file matches {node.dev}/[0-9]*"]


def test_group_with_a_function_in_use_is_unhealthy(node: Node) -> None:
    """VFIO opens such a group, and refuses its devices: "group 1 is not viable"."""
    node.group(1, *CASES["GPU with audio function"].cards)
    driver = node.sysfs / "bus/pci/devices/0000:01:00.1/driver"
    driver.unlink()
    driver.symlink_to(node.sysfs / "bus/pci/drivers/snd_hda_intel")
    plugin = node.plugin(NVIDIA)
    (device,) = plugin.list_devices()
    reason = "its VFIO group cannot be opened: 0000:01:00.1 has the driver snd_hda_intel"
    assert (device.stable_id, device.health, device.reason) == (FIRST, "unhealthy", reason)
    driver.unlink()
    assert plugin.list_devices()[0].health == "healthy"


def test_card_that_sysfs_refuses_concerns_itself_alone(node: Node) -> None:
    node.group(1, (FIRST, NVIDIA, GPU))
    node.group(2, (SECOND, NVIDIA, GPU))
    plugin = node.plugin(NVIDIA)
    before = plugin.list_devices()
    vendor = node.sysfs / "bus/pci/devices" / SECOND / "vendor"
    vendor.unlink()
    vendor.mkdir()  # even root cannot read it
    first, second = plugin.list_devices()
    assert first == before[0]
    assert (second.stable_id, second.health) == (SECOND, "unhealthy")
    assert second.reason == f"{vendor}: Is a directory"
    fresh = node.plugin(NVIDIA)
    assert fresh.list_devices() == [before[0]]
    file = f"{node.dev}/2"
    assert next(c.reason for c in fresh.conditions()) == (
        f"'{file}' is left out: {vendor}: Is a directory"
    )
