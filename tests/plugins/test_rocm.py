"""The rocm plugin and the real `pyrsmi`, against a library that this test compiles."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.config.plugins import PluginTable
from agentd.core.devices import Device, Health
from agentd.core.slots import ONE
from agentd.plugin_api import Features, Measurement
from agentd.pluginhost.host import PluginHost
from agentd.pluginhost.instance import PluginTimeouts
from agentd.services.protocols import PluginState
from agentd_rocm import RocmPlugin, smi
from native.libraries import built
from plugins.rig import given

GPUS = """handles big
stderr libdrm: amdgpu.ids: No such file
gpu uuid=56ff74a1-0000-1000-80a2-f6ed0b5ee5f9 pci=0000:c1:00.0 mem=206141652992 used=297086976 \
util=12 temp=44 power=137 numa=1 lost=0 name=AMD Instinct MI300X OAM
gpu pci=0002:05:1f.7 mem=1024 numa=-1 lost=0 name=AMD Other
"""


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ROCm folder with a library that does what a file says, and a driver that is loaded."""
    folder = tmp_path_factory.mktemp("rocm")
    built("amdsmi.c", folder / "lib" / "libamd_smi.so")
    (folder / "bin").mkdir()
    cat = folder / "bin" / "cat"
    cat.write_text("#!/bin/sh\necho live\n")
    cat.chmod(0o755)
    sysfs = folder / "sys/bus/pci/devices/0000:c1:00.0"
    (sysfs / "drm/renderD129").mkdir(parents=True)
    (sysfs / "unique_id").write_text("a2f6ed0b5ee5f900\n")
    (sysfs / "numa_node").write_text("1\n")
    return folder


@pytest.fixture
def gpus(root: Path, tmp_path: Path, monkeypatch) -> Path:
    """The file that the library reads."""
    file = tmp_path / "gpus"
    file.write_text(GPUS)
    monkeypatch.setenv("ROCM_PATH", str(root))
    monkeypatch.setenv("FAKE_AMDSMI_FILE", str(file))
    monkeypatch.setenv("PATH", f"{root}/bin:{os.environ['PATH']}")
    return file


@pytest.fixture
async def host(root: Path, gpus: Path) -> AsyncIterator[PluginHost]:
    made = plugin(sysfs=str(root / "sys"))
    await made.open(10)
    yield made
    await made.close()


@pytest.fixture
def gpu(tmp_path: Path, gpus: Path) -> Path:
    """The folder in sysfs of a GPU that is partitioned, in a tree that a test may change."""
    folder = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    (folder / "drm/renderD129").mkdir(parents=True)
    (folder / "../0002:05:1f.7/drm/renderD130").mkdir(parents=True)
    for name, text in (("unique_id", "a2f6ed0b5ee5f900"), ("numa_node", "1"),
                       ("current_memory_partition", "NPS4")):  # fmt: skip
        (folder / name).write_text(f"{text}\n")
    return folder


def plugin(**settings) -> PluginHost:
    table = PluginTable(name="rocm", plugin="rocm", settings=settings)
    return PluginHost(
        [table], ["rocm"], features=Features("docker"), timeouts=PluginTimeouts(5, 0.1)
    )


def devices(host: PluginHost) -> list[Device]:
    assert host.listings(), host.statuses()
    return list(host.listings()[0].devices)


async def test_gpus_are_found_and_named_for_good(host: PluginHost) -> None:
    first, second = devices(host)
    assert (first.device_id.id, first.stable_id) == ("rocm0", "GPU-a2f6ed0b5ee5f900")
    assert (first.aliases, first.numa_node) == (("0000:c1:00.0",), 1)
    assert first.model == "AMD Instinct MI300X OAM"
    assert first.attributes["memory"] == "206141652992"
    assert (second.stable_id, second.numa_node) == ("0002:05:1f.7", None)


async def test_memory_slot_offers_the_memory_of_each_gpu(host: PluginHost, root: Path) -> None:
    shared = plugin(sysfs=str(root / "sys"), mode="shares", **{"memory-slot": True})
    await shared.open(10)
    listing = shared.listings()[0]
    await shared.close()
    assert [(t.name, t.quantum, t.primary) for t in listing.slot_types] == [
        ("rocm.shares", ONE // 100, None),
        ("rocm.mem", 1 << 20, "rocm.shares"),
    ]
    assert [d.slot_names for d in listing.devices] == [
        ("rocm.shares", "rocm.mem"),
        ("rocm.shares",),
    ], "the second one has less memory than the quantum"
    assert listing.devices[0].capacity_of("rocm.mem") == 206141652992


async def test_measurements(host: PluginHost) -> None:
    async with asyncio.timeout(10):
        while not host.measurements():
            await asyncio.sleep(0.02)
    measured = host.measurements()["rocm"][0]
    assert measured == Measurement(
        "GPU-a2f6ed0b5ee5f900", 12.0, 297086976, 206141652992, 44.0, 137.0
    )


async def test_edits(host: PluginHost) -> None:
    one = given("rocm", "GPU-a2f6ed0b5ee5f900")
    docker = await host.container_edits(one, Features("docker"))
    assert [node.host_path for node in docker.device_nodes] == ["/dev/kfd", "/dev/dri/renderD129"]
    assert (docker.env, docker.groups) == (
        {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"},
        (),
    )
    process = await host.container_edits(one, Features("process"))
    visible = {"ROCR_VISIBLE_DEVICES": "GPU-a2f6ed0b5ee5f900", "HIP_VISIBLE_DEVICES": "0"}
    assert process.env == visible
    hidden = await host.container_edits(given("rocm"), Features("docker"))
    assert hidden.env == {"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("compute", "memory", "slot"),
    [("SPX", "NPS1", "rocm.device"), ("CPX", "NPS4", "rocm.device:cpx_nps4"),
     ("DPX", "NPS1", "rocm.device:dpx_nps1"), ("", "", "rocm.device"),
     ("../x", "NPS1", "rocm.device")],
)  # fmt: skip
async def test_partitions_have_slots_of_their_own(
    gpu: Path, tmp_path: Path, compute: str, memory: str, slot: str
) -> None:
    (gpu / "current_compute_partition").write_text(f"{compute}\n")
    (gpu / "current_memory_partition").write_text(f"{memory}\n")
    made = plugin(sysfs=str(tmp_path / "sys"))
    await made.open(10)
    (listing,) = made.listings()
    await made.close()
    first = listing.devices[0]
    assert first.slot == slot
    whole = "GPU-a2f6ed0b5ee5f900"
    is_part = slot != "rocm.device"
    assert (first.stable_id, first.parent) == ((f"{whole}-p0", whole) if is_part else (whole, None))
    assert (first.parent_aliases or first.aliases) == ("0000:c1:00.0",)
    assert [found.name for found in listing.slot_types] == [*dict.fromkeys(["rocm.device", slot])]


def test_unavailable_measurement_is_none() -> None:
    assert smi._parse_number(2**16 - 1) is None
    assert smi._parse_number(2**32 - 1) is None
    assert smi._parse_number(137) == 137
    assert smi.pci_address(3 << 32 | 0xC1 << 8) == "0003:c1:00.0"


async def test_no_library_is_one_line_and_offers_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    for vendor, state, why in (
        ("10de", PluginState.ABSENT, "open: no AMD GPU on the PCI bus, and libamd_smi"),
        ("1002", PluginState.PENDING, "open: RuntimeError: no AMD driver: libamd_smi.so is not"),
    ):
        device = tmp_path / vendor / "bus/pci/devices/0000:c1:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"0x{vendor}\n")
        (device / "class").write_text("0x120000\n")
        made = plugin(sysfs=str(tmp_path / vendor))
        await made.open(10)
        (status,) = made.statuses()
        await made.close()
        assert status.state is state
        assert status.reason.startswith(why)
        assert made.listings() == []


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"mode": "x"}, "mode"), ({"quantum": "0"}, "quantum"), ({"groups": "render"}, "groups"),
     ({"grups": []}, "grups")],
)  # fmt: skip
def test_wrong_settings_are_named(settings, key) -> None:
    assert key in [problem.key for problem in RocmPlugin.validate(settings)]


SHARES = {"mode": "shares", "memory-slot": True}
NO_ADDRESS = "fail amdsmi_get_gpu_device_bdf 2 0"
HIDDEN = ("unique_id", NO_ADDRESS)
"""Faults that leave a GPU without identity in a process that has not seen it before."""
NOT_SUPPORTED = "Command not supported"
UNREADABLE = "cannot be read: Is a directory"


async def until(host: PluginHost, reason: str) -> Device:
    async with asyncio.timeout(15):
        changes = host.changes()
        while (first := devices(host)[0]).reason != reason:
            await anext(changes)
    return first


def form(device: Device) -> tuple[object, ...]:
    return device.stable_id, device.slots, device.aliases, device.parent, device.numa_node


@pytest.mark.parametrize("compute", ["SPX", "CPX"])
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("fail amdsmi_get_gpu_memory_total 2 0", f"its memory: {NOT_SUPPORTED}"),
        (NO_ADDRESS, f"its PCI address: {NOT_SUPPORTED}"),
        ("unique_id", UNREADABLE),
        ("current_compute_partition", UNREADABLE),
        ("current_memory_partition", UNREADABLE),
        ("numa_node", UNREADABLE),
    ],
)
async def test_gpu_in_trouble_keeps_its_form(
    gpu: Path, tmp_path: Path, compute: str, trouble: str, reason: str
) -> None:
    (gpu / "current_compute_partition").write_text(compute)
    made = plugin(sysfs=str(tmp_path / "sys"), **SHARES)
    await made.open(10)
    try:
        (listing,) = made.listings()
        before = [form(device) for device in listing.devices]
        if reason is UNREADABLE:
            reason = f"{trouble} {UNREADABLE}"
            content = (gpu / trouble).read_text()
            (gpu / trouble).unlink()
            (gpu / trouble).mkdir()  # even root cannot read it
        else:
            reason = f"AMD SMI does not tell {reason}"
            (tmp_path / "gpus").write_text(f"{GPUS}{trouble}\n")
        first = await until(made, reason)
        assert first.health is Health.UNHEALTHY
        assert [form(device) for device in devices(made)] == before
        assert devices(made)[1].health is Health.HEALTHY

        again = plugin(sysfs=str(tmp_path / "sys"), **SHARES)
        await again.open(10)
        found = again.listings()[0].with_last_form(listing.devices).devices
        await again.close()
        if trouble not in HIDDEN:
            assert (found[0].health, form(found[0])) == (Health.UNHEALTHY, before[0])
        assert [form(device) for device in found[-1:]] == before[1:], "it is left out"

        (tmp_path / "gpus").write_text(GPUS)
        if reason.endswith(UNREADABLE):
            (gpu / trouble).rmdir()
            (gpu / trouble).write_text(content)
        assert (await until(made, "")).health is Health.HEALTHY
        assert [form(device) for device in devices(made)] == before
    finally:
        await made.close()
