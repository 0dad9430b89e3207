"""The generic plugin on device files that really can be opened."""

import grp
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from agentd.config.plugins import PluginTable
from agentd.core.slots import ONE
from agentd.errors import PluginUnavailable
from agentd.plugin_api import DeviceNode, Features, Mount
from agentd.pluginhost.host import PluginHost
from agentd.pluginhost.instance import PluginTimeouts
from agentd_generic import GenericPlugin
from plugins.rig import given
from support.needs import require

PROCESS = Features("process")


def node(path: Path, minor: int = 3) -> Path:
    """A device file; the null device's number 1:3, or another memory device's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    require("root")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    return path


def on_the_bus(sysfs: Path, pci: str, char: str, vendor: str = "1ae0", numa: int = 1) -> None:
    """Make the kernel say that a character device is behind a PCI device."""
    real = sysfs / "devices/pci0000:00" / pci
    (real / "accel").mkdir(parents=True, exist_ok=True)
    (real / "vendor").write_text(f"0x{vendor}\n")
    (real / "numa_node").write_text(f"{numa}\n")
    for link, target in (("bus/pci/devices/" + pci, real), ("dev/char/" + char, real / "accel")):
        (sysfs / link).parent.mkdir(parents=True, exist_ok=True)
        (sysfs / link).symlink_to(target)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., Awaitable[PluginHost]]]:
    """Open the plugin with settings."""
    hosts: list[PluginHost] = []

    async def make(**settings: object) -> PluginHost:
        table = PluginTable(name="tpu", plugin="generic", settings=settings)
        hosts.append(
            PluginHost([table], ["generic"], features=PROCESS, timeouts=PluginTimeouts(5, 0.1))
        )
        await hosts[-1].open(10)
        return hosts[-1]

    yield make
    for host in hosts:
        await host.close()


async def test_table_alone_defines_devices_and_edits(opened, tmp_path: Path) -> None:
    dev, sysfs = tmp_path / "dev", tmp_path / "sys"
    files = [node(dev / f"accel{n}", minor) for n, minor in ((2, 3), (10, 5))]
    (dev / "accel7").write_text("no device")
    on_the_bus(sysfs, "0000:00:05.0", "1:3")
    host = await opened(
        devices=[f"{dev}/accel[0-9]*"],
        sysfs=str(sysfs),
        companions=[f"{dev}/control"],
        **{"per-device": [f"{dev}/accel_ctl{{id}}"], "hidden-env": {"TPU_VISIBLE_CHIPS": ""}},
        env={"TPU_VISIBLE_CHIPS": "{ids}", "P": "{paths}", "U": "x {uuids}", "N": "{places}"},
        mounts=["/usr/lib/tpu"],
        groups=["render"],
    )
    first, second = sorted(host.listings()[0].devices, key=lambda d: d.numa_node is None)
    assert (first.device_id.id, first.stable_id, first.numa_node) == ("tpu2", "0000:00:05.0", 1)
    assert (second.device_id.id, second.numa_node) == ("tpu10", None)
    edits = await host.container_edits(given("tpu", first.stable_id, second.stable_id), PROCESS)
    assert edits.env == {
        "TPU_VISIBLE_CHIPS": "2,10",
        "P": f"{files[0]},{files[1]}",
        "U": f"x 0000:00:05.0,{second.stable_id}",
        "N": "0,1",
    }
    paths = [*map(str, files), f"{dev}/accel_ctl2", f"{dev}/accel_ctl10", f"{dev}/control"]
    assert edits.device_nodes == tuple(DeviceNode(path, path) for path in paths)
    assert edits.mounts == (Mount("/usr/lib/tpu", "/usr/lib/tpu"),)
    assert edits.groups == ("render",)
    assert (await host.container_edits(given("tpu"), PROCESS)).env == {"TPU_VISIBLE_CHIPS": ""}


async def test_devices_of_other_vendors_are_left_out(opened, tmp_path: Path) -> None:
    dev, sysfs = tmp_path / "dev", tmp_path / "sys"
    node(dev / "accel/accel0", 3)
    node(dev / "accel/accel1", 5)
    on_the_bus(sysfs, "0000:00:05.0", "1:3", vendor="1da3")
    on_the_bus(sysfs, "0000:00:06.0", "1:5", vendor="8086")
    settings = {"devices": [f"{dev}/accel/accel*"], "sysfs": str(sysfs), "pci-vendors": ["0x1DA3"]}
    host = await opened(**settings)
    assert [d.stable_id for d in host.listings()[0].devices] == ["0000:00:05.0"]


async def test_a_vfio_group_is_the_one_device_in_it(opened, tmp_path: Path) -> None:
    dev, sysfs = tmp_path / "dev", tmp_path / "sys"
    node(dev / "vfio/12", 3)
    node(dev / "vfio/vfio", 5)
    on_the_bus(sysfs, "0000:00:07.0", "9:9")
    (sysfs / "kernel/iommu_groups/12/devices/0000:00:07.0").mkdir(parents=True)
    host = await opened(devices=[f"{dev}/vfio/[0-9]*"], sysfs=str(sysfs))
    (device,) = host.listings()[0].devices
    assert (device.device_id.id, device.stable_id, device.numa_node) == (
        "tpu12", "0000:00:07.0", 1
    )  # fmt: skip


def test_file_keeps_its_address_when_sysfs_tells_none(tmp_path: Path) -> None:
    sysfs = tmp_path / "sys"
    group = node(tmp_path / "dev/vfio/12", 3)
    member = sysfs / "kernel/iommu_groups/12/devices/0000:00:07.0"
    member.mkdir(parents=True)
    plugin = GenericPlugin("tpu", {"devices": [str(group)], "sysfs": str(sysfs)})
    plugin.open()
    before = plugin.list_devices()
    assert [device.stable_id for device in before] == ["0000:00:07.0"]
    member.rmdir()
    assert plugin.list_devices() == before


async def test_many_names_of_one_file_are_one_device(opened, tmp_path: Path) -> None:
    file = node(tmp_path / "a/accel0")
    (tmp_path / "a/accel1").symlink_to(file)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    host = await opened(devices=[f"{tmp_path}/a/accel*", f"{tmp_path}/b/accel*"])
    assert [d.device_id.id for d in host.listings()[0].devices] == ["tpu0"]


async def test_one_odd_file_harms_no_other(opened, tmp_path: Path) -> None:
    """The same number twice, a name that is not an id, two files of one PCI function."""
    sysfs = tmp_path / "sys"
    files = [
        node(tmp_path / name, 3 + n) for n, name in enumerate(("x/a0", "y/a0", "x/a1", "x/a2"))
    ]
    node(tmp_path / "x/a 3")
    on_the_bus(sysfs, "0000:00:05.0", "1:5")
    (sysfs / "dev/char/1:6").symlink_to(sysfs / "dev/char/1:5")
    host = await opened(devices=[f"{tmp_path}/[xy]/a*"], sysfs=str(sysfs))
    found = {d.device_id.id: d.stable_id for d in host.listings()[0].devices}
    assert len(found) == len(set(found.values())) == len(files)
    assert {"tpu1", "tpu2"} < set(found)


async def test_places_are_those_that_the_kernel_sees(opened, tmp_path: Path) -> None:
    for n in (2, 10):
        node(tmp_path / f"accel{n}", n)
    host = await opened(devices=[f"{tmp_path}/accel*"], env={"CHIPS": "{places}"})
    last = host.listings()[0].devices[1]
    assert last.device_id.id == "tpu10"
    one = given("tpu", last.stable_id)
    assert (await host.container_edits(one, Features("docker"))).env == {"CHIPS": "0"}
    assert (await host.container_edits(one, PROCESS)).env == {"CHIPS": "1"}
    assert (await host.container_edits(given("tpu"), PROCESS)).env == {"CHIPS": ""}


async def test_groups_are_the_node_s(opened, tmp_path: Path) -> None:
    node(tmp_path / "accel0")
    host = await opened(devices=[f"{tmp_path}/accel*"], groups=["daemon", "no-such-group"])
    (device,) = host.listings()[0].devices
    edits = await host.container_edits(given("tpu", device.stable_id), Features("docker"))
    assert edits.groups == (str(grp.getgrnam("daemon").gr_gid), "no-such-group")


async def test_a_file_that_vanishes_is_a_device_that_is_gone(opened, tmp_path: Path) -> None:
    file = node(tmp_path / "accel0")
    host = await opened(devices=[f"{tmp_path}/accel*"])
    (device,) = host.listings()[0].devices
    file.unlink()
    with pytest.raises(PluginUnavailable, match="missing device file of tpu0"):
        await host.container_edits(given("tpu", device.stable_id), PROCESS)
    changes = host.changes()
    while host.listings()[0].devices:
        await anext(changes)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "devices"),
        ({"devices": "/dev/accel0"}, "devices"),
        ({"devices": ["dev/accel0"]}, "devices"),
        ({"devices": ["/dev/../accel0"]}, "devices"),
        ({"devices": ["/dev/a"], "env": {"A": "{idz}"}}, "env.A"),
        ({"devices": ["/dev/a"], "env": {"A": 1}}, "env"),
        ({"devices": ["/"]}, "devices"),
        ({"devices": ["/."]}, "devices"),
        ({"devices": ["/dev/a\0"]}, "devices"),
        ({"devices": ["/dev/a"], "env": {"A=B": "x"}}, "env.A=B"),
        ({"devices": ["/dev/a"], "hidden-env": {"A": "{ids}"}}, "hidden-env.A"),
        ({"devices": ["/dev/a"], "per-device": ["/dev/{ids}"]}, "per-device"),
        ({"devices": ["/dev/a"], "companions": ["/dev/b*"]}, "companions"),
        ({"devices": ["/dev/a"], "slot": "A.b"}, "slot"),
        ({"devices": ["/dev/a"], "companion": []}, "companion"),
        ({"devices": ["/dev/a"], "model": 1}, "model"),
        ({"devices": ["/dev/a"], "memory": "x"}, "memory"),
        ({"devices": ["/dev/a"], "memory": "1k"}, "memory"),
        ({"devices": ["/dev/a"], "memory": "1g", "slot": "mem"}, "slot"),
    ],
)
def test_wrong_settings_are_named(settings, key) -> None:
    assert key in [problem.key for problem in GenericPlugin.validate(settings)]


@pytest.mark.parametrize("pattern", ["/dev/**foo", "/dev/foo**/a", "/dev/**", "/dev/***/a"])
def test_generic_refuses_pattern_with_partial_double_star(pattern: str) -> None:
    (problem,) = GenericPlugin.validate({"devices": [pattern]})
    assert problem.why == (
        f"invalid pattern '{pattern}': expected '**' for folders, as in '/dev/**/accel*'"
    )
    assert GenericPlugin.validate({"devices": ["/dev/**/accel*"]}) == []


async def test_memory_of_each_device_is_a_slot_beside_it(opened, tmp_path: Path) -> None:
    for number in (0, 1):
        node(tmp_path / f"accel{number}")
    host = await opened(devices=[f"{tmp_path}/accel*"], memory="16g")
    (listing,) = host.listings()
    assert [(t.name, t.quantum, t.primary) for t in listing.slot_types] == [
        ("tpu.device", ONE, None),
        ("tpu.mem", 1 << 20, "tpu.device"),
    ]
    assert [d.capacity_of("tpu.mem") for d in listing.devices] == [16 << 30] * 2
