"""AMD GPUs in compute partitions, as drivers and AMD SMI show them in the field.

AMD SMI lists the processors of a GPU under its PCI address, or under functions that do not exist
(https://github.com/ROCm/rocm-systems/issues/5805). All render nodes but the first are those of
platform devices, seven for each GPU, used or not
(https://github.com/ROCm/k8s-device-plugin/issues/157).
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentd.plugin_api import AllocatedDevice, DeviceInfo, Features
from agentd_rocm import RocmPlugin, smi
from native.libraries import amdsmi_library

SERIALS = tuple(f"a2f6ed0b5ee5f9{number:02}" for number in range(8))
BUSES = (0x05, 0x26, 0x46, 0x65, 0x85, 0xA6, 0xC6, 0xE5)
MODES = {"spx": 1, "dpx": 2, "tpx": 3, "qpx": 4, "cpx": 8}
MAX_PARTITIONS = 8


class Form(NamedTuple):
    """The names that one generation of drivers gives to partitions."""

    has_functions: bool
    location_shift: int | None
    platform: str


FORMS = {
    "one address": Form(False, None, "amdgpu_xcp_{}"),
    "one address, partition in KFD's bits 31 to 28": Form(False, 28, "amdgpu_xcp_{}"),
    "functions in AMD SMI": Form(True, None, "amdgpu_xcp.{}"),
    "functions in AMD SMI and KFD": Form(True, 0, "amdgpu_xcp.{}"),
}
ONE = FORMS["one address"]


class Node:
    """A node with GPUs in a folder: sysfs, and the file that AMD SMI reads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sysfs = folder, folder / "sys"

    def write(self, form: Form, *modes: str, more: str = "") -> None:
        """Write a GPU for each mode; `more` are lines such as `fail FUNCTION STATUS GPU`."""
        lines, number = ["handles big"], 1
        for gpu, mode in enumerate(modes):
            pci = f"0000:{BUSES[gpu]:02x}:00.0"
            for name, text in {
                "vendor": "0x1002", "class": "0x120000", "unique_id": SERIALS[gpu],
                "numa_node": str(gpu), "current_memory_partition": "NPS1",
                "current_compute_partition": mode.upper(),
            }.items():  # fmt: skip
                write(self.sysfs / "bus/pci/devices" / pci / name, text)
            for index in range(MAX_PARTITIONS):
                minor = 128 + MAX_PARTITIONS * gpu + index
                xcp = form.platform.format((MAX_PARTITIONS - 1) * gpu + index - 1)
                below = f"devices/platform/{xcp}" if index else f"bus/pci/devices/{pci}"
                write(self.sysfs / below / f"drm/renderD{minor}/dev", f"226:{minor}")
            for index in range(MODES[mode]):
                shift = form.location_shift
                self.processor(number, gpu, index, 0 if shift is None else index << shift)
                address = f"{pci[:-1]}{index}" if form.has_functions else pci
                lines.append(f"gpu pci={address} mem={1 << 30} name=AMD Instinct MI300X")
                number += 1
        write(self.folder / "gpus", "\n".join([*lines, more]))

    def processor(self, number: int, gpu: int, index: int, partition: int) -> None:
        minor = 128 + MAX_PARTITIONS * gpu + index
        properties = {
            "cpu_cores_count": 0, "drm_render_minor": minor, "domain": 0,
            "location_id": BUSES[gpu] << 8 | partition, "unique_id": int(SERIALS[gpu], 16),
        }  # fmt: skip
        text = "\n".join(f"{name} {value}" for name, value in properties.items())
        write(self.sysfs / f"class/kfd/kfd/topology/nodes/{number}/properties", text)

    def plugin(self, **settings: Any) -> RocmPlugin:
        plugin = RocmPlugin("rocm", {"sysfs": str(self.sysfs), **settings})
        plugin.open()
        return plugin


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


@pytest.fixture
def node(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Iterator[Node]:
    node = Node(tmp_path)
    monkeypatch.setenv("ROCM_PATH", str(amdsmi_library(tmp_path_factory).parents[1]))
    monkeypatch.setenv("FAKE_AMDSMI_FILE", str(tmp_path / "gpus"))
    monkeypatch.setattr("pyrsmi.rocml._driver_initialized", lambda: True)
    write(node.sysfs / "class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96")
    yield node
    smi.shut_down()
    logging.disable(logging.NOTSET)


def row(device: DeviceInfo) -> tuple[str, str, list[str]]:
    return device.stable_id, device.slot, [*device.files]


def expected(gpu: int, mode: str) -> list[tuple[str, str, list[str]]]:
    """The rows of a GPU's devices."""
    serial, minor = f"GPU-{SERIALS[gpu]}", 128 + MAX_PARTITIONS * gpu
    if mode == "spx":
        return [(serial, "rocm.device", [f"/dev/dri/renderD{minor}"])]
    return [
        (f"{serial}-p{n}", f"rocm.device:{mode}_nps1", [f"/dev/dri/renderD{minor + n}"])
        for n in range(MODES[mode])
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_each_partition_is_a_device_with_its_own_render_node(
    node: Node, form: str, mode: str
) -> None:
    node.write(FORMS[form], mode, "spx")
    plugin = node.plugin()
    devices = plugin.list_devices()
    assert [row(device) for device in devices] == expected(0, mode) + expected(1, "spx")
    assert {(device.health, device.reason) for device in devices} == {("healthy", "")}
    assert [device.id for device in devices] == [f"rocm{n}" for n in range(len(devices))]
    parents = {device.parent for device in devices[:-1]}
    assert parents == {None if mode == "spx" else f"GPU-{SERIALS[0]}"}
    assert {device.attributes["pci"] for device in devices[:-1]} == {"0000:05:00.0"}
    assert plugin.conditions() == []


@pytest.mark.parametrize("form", FORMS)
def test_eight_gpus_in_cpx_are_64_devices(node: Node, form: str) -> None:
    node.write(FORMS[form], *["cpx"] * 8)
    plugin = node.plugin()
    rows = [row(device) for device in plugin.list_devices()]
    assert rows == [found for gpu in range(8) for found in expected(gpu, "cpx")]
    assert len({file for *_, files in rows for file in files}) == 64
    assert plugin.conditions() == []


@pytest.mark.parametrize(
    ("runtime", "has_own_serials", "visible"),
    [
        ("docker", False, "0,1"),
        ("process", False, f"3,GPU-{SERIALS[1]}"),
        ("systemd", False, "0,1"),
        ("docker", True, "0,1"),
        ("process", True, f"GPU-0000000000000004,GPU-{SERIALS[1]}"),
        ("systemd", True, f"GPU-0000000000000004,GPU-{SERIALS[1]}"),
    ],
)
def test_kernel_gets_the_render_nodes_of_its_partitions(
    node: Node, runtime: str, has_own_serials: bool, visible: str
) -> None:
    """The runtime's serial number is KFD's: https://github.com/ROCm/container-toolkit/issues/116."""
    node.write(FORMS["functions in AMD SMI"], "cpx", "spx")
    if has_own_serials:
        for number in range(1, 9):
            file = node.sysfs / f"class/kfd/kfd/topology/nodes/{number}/properties"
            own = file.read_text().replace(str(int(SERIALS[0], 16)), str(number))
            file.write_text(own)
    ids = f"GPU-{SERIALS[0]}-p3", f"GPU-{SERIALS[1]}"
    given = [AllocatedDevice("rocm", stable_id, "", "1") for stable_id in ids]
    edits = node.plugin().container_edits(given, Features(runtime))
    files = [device_node.host_path for device_node in edits.device_nodes]
    assert files == ["/dev/kfd", "/dev/dri/renderD131", "/dev/dri/renderD136"]
    assert edits.env["ROCR_VISIBLE_DEVICES"] == visible


def test_gpu_without_serial_in_sysfs_has_its_name_of_kfd(node: Node) -> None:
    node.write(ONE, "spx")
    (node.sysfs / "bus/pci/devices/0000:05:00.0/unique_id").unlink()
    plugin = node.plugin()
    (device,) = plugin.list_devices()
    assert (device.stable_id, device.aliases, device.health) == ("0000:05:00.0", [], "healthy")
    given = [AllocatedDevice("rocm0", device.stable_id, device.slot, "1")]
    edits = plugin.container_edits(given, Features("process"))
    assert edits.env["ROCR_VISIBLE_DEVICES"] == f"GPU-{SERIALS[0]}"


ADDRESS, MEMORY = "amdsmi_get_gpu_device_bdf", "amdsmi_get_gpu_memory_total"


@pytest.mark.parametrize("partition", [0, 3, 7])
@pytest.mark.parametrize("function", [ADDRESS, MEMORY])
@pytest.mark.parametrize("is_from_the_start", [False, True])
def test_refusal_of_one_partition_concerns_it_alone(
    node: Node, partition: int, function: str, is_from_the_start: bool
) -> None:
    node.write(ONE, "cpx", "spx")
    plugin = node.plugin(mode="device")
    if not is_from_the_start:
        plugin.list_devices()
    trouble = f"fail {function} 10 {partition}"
    node.write(ONE, "cpx", "spx", more=trouble)
    devices = plugin.list_devices()
    rows = expected(0, "cpx") + expected(1, "spx")
    sick = devices.pop(partition)
    assert [row(device) for device in devices] == rows[:partition] + rows[partition + 1 :]
    assert {device.health for device in devices} == {"healthy"}
    assert sick.stable_id == rows[partition][0]
    assert (sick.health, sick.reason.endswith(": Permission denied")) == ("unhealthy", True)
    if not is_from_the_start:
        assert row(sick) == rows[partition]
    node.write(ONE, "cpx", "spx")
    assert [row(device) for device in plugin.list_devices()] == rows


def test_partition_without_processor_in_kfd_has_no_render_node(node: Node) -> None:
    node.write(ONE, "dpx")
    (node.sysfs / "class/kfd/kfd/topology/nodes/2/properties").unlink()
    plugin = node.plugin()
    first, second = plugin.list_devices()
    assert plugin.conditions() == [], "it is in its health"
    assert (first.health, second.health) == ("healthy", "unhealthy")
    assert second.reason == "0000:05:00.0 has no render node in sysfs"
    assert (second.stable_id, second.files) == (f"GPU-{SERIALS[0]}-p1", [])


def test_partition_without_minor_number_has_no_render_node(node: Node) -> None:
    """A processor for which Linux could not make a render node has the minor number 0 in KFD."""
    node.write(ONE, "cpx", "spx")
    file = node.sysfs / "class/kfd/kfd/topology/nodes/8/properties"
    file.write_text(file.read_text().replace("drm_render_minor 135", "drm_render_minor 0"))
    *others, last, whole = node.plugin().list_devices()
    rows = expected(0, "cpx") + expected(1, "spx")
    assert [row(device) for device in [*others, whole]] == rows[:7] + rows[8:]
    assert (last.stable_id, last.health, last.files) == (rows[7][0], "unhealthy", [])


def test_gpu_that_amd_smi_lacks_is_a_condition(node: Node) -> None:
    node.write(ONE, "spx", "spx")
    lines = (node.folder / "gpus").read_text().splitlines()
    write(node.folder / "gpus", "\n".join(lines[:2]))
    plugin = node.plugin()
    plugin.list_devices()
    (condition,) = plugin.conditions()
    assert condition.reason == "GPU 0000:26:00.0 is on the PCI bus, and AMD SMI does not list it"
    driver = node.sysfs / "bus/pci/devices/0000:26:00.0/driver"
    driver.symlink_to("../../../bus/pci/drivers/vfio-pci")
    plugin.list_devices()
    assert plugin.conditions() == [], "it is for virtual machines"


def test_gpu_partitioned_while_agentd_runs_is_a_condition(node: Node) -> None:
    node.write(ONE, "spx")
    plugin = node.plugin()
    plugin.list_devices()
    node.write(ONE, "cpx")
    lines = (node.folder / "gpus").read_text().splitlines()
    write(node.folder / "gpus", "\n".join(lines[:2]))
    plugin.list_devices()
    (condition,) = plugin.conditions()
    assert condition.reason == "GPU 0000:05:00.0 has 8 partitions, and AMD SMI lists 1"


def test_gpu_that_never_told_its_address_is_a_condition(node: Node) -> None:
    node.write(ONE, "spx", "spx", more=f"fail {ADDRESS} 7 1")
    for number in (1, 2):
        (node.sysfs / f"class/kfd/kfd/topology/nodes/{number}/properties").unlink()
    plugin = node.plugin()
    assert [row(device) for device in plugin.list_devices()] == expected(0, "spx")
    reasons = [condition.reason for condition in plugin.conditions()]
    words = "AMD SMI does not tell its PCI address: API call failed"
    assert f"GPU 1 does not answer: {words}" in reasons


def test_device_file_without_permission_is_a_condition(
    node: Node, tmp_path: Path, monkeypatch
) -> None:
    kfd = tmp_path / "kfd"
    kfd.touch()
    monkeypatch.setattr("agentd_rocm._KFD", str(kfd))
    monkeypatch.setattr(os, "access", lambda file, _: file != str(kfd))
    node.write(ONE, "spx")
    plugin = node.plugin()
    plugin.list_devices()
    (condition,) = plugin.conditions()
    assert condition.reason == f"agentd and its process kernels may not open {kfd}"
