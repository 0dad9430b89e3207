"""The cuda plugin and the real `pynvml`, against a library that this test compiles."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agentd.config.plugins import PluginTable
from agentd.core.devices import Device, Health, SecondarySlot
from agentd.core.slots import ONE, SlotKind
from agentd.plugin_api import Features, Measurement, ProcessUse
from agentd.pluginhost.assignment import AssignmentRules
from agentd.pluginhost.host import PluginHost
from agentd.pluginhost.instance import PluginTimeouts
from agentd.services.protocols import PluginState
from agentd_cuda import CudaPlugin, nvml
from agentd_cuda.files import capability_minors
from agentd_rocm import RocmPlugin
from native.libraries import nvml_library
from plugins.rig import given
from support.fakes import FakeMemory

HEALTHY = """driver 570.124.06
init 0
gpu uuid=GPU-aaaa pci=00000000:3B:00.0 mem=85899345920 used=1024 util=7 temp=41 power=70500 \
lost=0 mig=0 recovery=0 events=8 name=NVIDIA H100 80GB HBM3
gpu uuid=GPU-bbbb pci=00000000:5E:00.0 mem=85899345920 used=0 util=0 temp=40 power=70000 \
lost=0 mig=0 recovery=-1 events=8 name=NVIDIA H100 80GB HBM3
proc gpu=0 pid=4711 mem=1000
proc gpu=0 pid=4712 mem=-1
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_library(tmp_path_factory)


class Node:
    """GPUs as the file says, and the plugin that lists them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.hosts: list[PluginHost] = []

    def say(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)

    async def plugin(self, dealing_rules: AssignmentRules | None = None, **settings) -> PluginHost:
        table = PluginTable(name="cuda", plugin="cuda", settings=settings)
        host = PluginHost(
            [table],
            ["cuda"],
            features=Features("docker"),
            timeouts=PluginTimeouts(5, health_interval_s=0.1),
            dealing_rules=dealing_rules,
        )
        self.hosts.append(host)
        await host.open(10)
        return host


@pytest.fixture
async def node(library: Path, tmp_path: Path, monkeypatch) -> AsyncIterator[Node]:
    made = Node(tmp_path / "gpus")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_NVML_FILE", str(made.file))
    made.say(HEALTHY)
    yield made
    for host in made.hosts:
        await host.close()


def devices(host: PluginHost) -> list[Device]:
    return list(host.listings()[0].devices)


async def until(host: PluginHost, holds: Callable[[list[Device]], bool]) -> list[Device]:
    async with asyncio.timeout(15):
        changes = host.changes()
        while not holds(devices(host)):
            await anext(changes)
    return devices(host)


async def test_a_healthy_node(node: Node) -> None:
    host = await node.plugin()
    first, second = devices(host)
    assert (first.device_id.id, first.stable_id) == ("cuda0", "GPU-aaaa")
    assert first.aliases == ("0000:3b:00.0",)
    assert (first.slot, first.capacity, first.health) == ("cuda.device", ONE, Health.HEALTHY)
    assert first.model == "NVIDIA H100 80GB HBM3"
    assert second.stable_id == "GPU-bbbb"
    async with asyncio.timeout(10):
        while not host.measurements():
            await asyncio.sleep(0.02)
    measured = host.measurements()["cuda"][0]
    used = [ProcessUse(4711, 1000), ProcessUse(4712)]
    assert measured == Measurement("GPU-aaaa", 7.0, 1024, 85899345920, 41.0, 70.5, used)


@pytest.mark.parametrize(
    "trouble",
    [
        "nvmlDeviceGetMigMode 13",
        "nvmlDeviceGetFieldValues 13",
        "nvmlDeviceGetPowerUsage 13",
        "nvmlEventSetCreate 13",
        "nvmlDeviceGetSupportedEventTypes 13",
        "nvmlDeviceRegisterEvents 999 0",
        "nvmlDeviceGetSupportedEventTypes 15 0",
        "nvmlEventSetCreate 999",
    ],
)
async def test_driver_without_a_function_or_events_still_serves(node: Node, trouble: str) -> None:
    node.say(f"{HEALTHY}fail {trouble}\n")
    first, second = devices(await node.plugin())
    assert (first.stable_id, second.stable_id) == ("GPU-aaaa", "GPU-bbbb")
    assert second.health is Health.HEALTHY


async def test_an_xid_of_a_gpu_that_is_lost_with_it_counts(node: Node) -> None:
    host = await node.plugin()
    gone = HEALTHY.replace("lost=0", "lost=2", 1)
    node.say(f"{gone}xid id=1 gpu=0 code=79 gi=4294967295 ci=4294967295\n")
    await until(host, lambda found: found[0].health is Health.UNHEALTHY)
    node.say(HEALTHY.replace("recovery=0", "recovery=-1", 1))
    await until(host, lambda found: found[0].reason.startswith("Xid 79; "))


async def test_shares_by_setting(node: Node) -> None:
    host = await node.plugin(mode="shares", quantum="0.1")
    (slot,) = host.listings()[0].slot_types
    assert (slot.name, slot.quantum, slot.exclusive_group) == ("cuda.shares", ONE // 10, "mode")


def bus(sysfs: Path, *devices: tuple[str, str, str]) -> str:
    for address, vendor, device_class in devices:
        folder = sysfs / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"0x{vendor}\n")
        (folder / "class").write_text(f"0x{device_class}\n")
    return str(sysfs)


@pytest.mark.parametrize(
    ("devices", "state", "why"),
    [
        ((), PluginState.ABSENT, "no NVIDIA GPU on the PCI bus, and libnvidia-ml.so.1 is not"),
        ((("0000:3b:00.0", "1002", "030200"), ("0000:00:1f.3", "10de", "040300")),
         PluginState.ABSENT, "no NVIDIA GPU on the PCI bus"),
        ((("0000:3b:00.0", "10de", "030200"), ("0000:5e:00.0", "10de", "030000")),
         PluginState.PENDING, "; on the PCI bus: 0000:3b:00.0, 0000:5e:00.0"),
    ],
)  # fmt: skip
async def test_missing_library_falls_back_to_the_bus(
    monkeypatch, tmp_path: Path, devices, state: PluginState, why: str
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    sysfs = bus(tmp_path / "sys", *devices)
    host = await Node(tmp_path / "none").plugin(sysfs=sysfs)
    if host.listings():
        pytest.skip("this machine has a real NVIDIA driver")
    (status,) = host.statuses()
    assert status.state is state
    assert why in status.reason
    await host.close()


async def test_it_closes_while_it_waits_for_events(node: Node) -> None:
    """NVML shuts down once a wait has ended; a stop of agentd waited for that with a real GPU."""
    host = await node.plugin()
    with capture_logs() as logged:
        await host.close()
    assert not [entry for entry in logged if entry["event"] == "plugin.close_failed"]


async def test_a_driver_that_is_not_loaded_says_so(node: Node) -> None:
    node.say(HEALTHY.replace("init 0", "init 9"))
    host = await node.plugin()
    (status,) = host.statuses()
    assert (status.state, host.listings()) == (PluginState.PENDING, [])
    assert "NVML does not start: Driver Not Loaded" in status.reason
    edits = await host.container_edits(given("cuda"), Features("process"))
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""}
    node.say(HEALTHY)
    assert (await host.retry("cuda")).state is PluginState.READY
    assert [d.stable_id for d in devices(host)] == ["GPU-aaaa", "GPU-bbbb"]


async def test_a_gpu_in_mig_mode_offers_its_parts_alone(node: Node) -> None:
    mig = HEALTHY.replace("lost=0 mig=0 recovery=0", "lost=0 mig=1 maxmig=7 recovery=0")
    node.say(mig + (
        "mig gpu=0 idx=0 uuid=MIG-1 gi=1 ci=0 gslices=1 cslices=1 mem_mb=9984 name=x\n"
        "mig gpu=0 idx=2 uuid=MIG-2 gi=2 ci=0 gslices=3 cslices=3 mem_mb=40448 name=x\n"
    ))  # fmt: skip
    host = await node.plugin()
    small, large, whole = devices(host)
    assert (small.device_id.id, small.stable_id, small.parent) == ("cuda0:0", "MIG-1", "GPU-aaaa")
    assert (small.slot, small.kind) == ("cuda.device:1g.10gb-mig", SlotKind.UNIQUE)
    assert (small.aliases, small.parent_aliases) == ((), ("0000:3b:00.0",))
    assert (large.device_id.id, large.slot) == ("cuda0:2", "cuda.device:3g.40gb-mig")
    assert (whole.device_id.id, whole.slot) == ("cuda1", "cuda.device")


@pytest.mark.parametrize(
    ("slices", "memory_mib", "profile"),
    [((1, 1), 9984, "1g.10gb"), ((3, 3), 40448, "3g.40gb"), ((3, 1), 40448, "1c.3g.40gb"),
     ((7, 7), 81920, "7g.80gb")],
)  # fmt: skip
def test_profiles_are_named_as_nvidia_names_them(slices, memory_mib, profile) -> None:
    assert nvml.profile_name(*slices, memory_mib << 20, 80 << 30) == profile


def test_half_a_gib_is_rounded_up_as_nvidia_does() -> None:
    assert nvml.profile_name(3, 3, 69632 << 20, 143771 << 20) == "3g.71gb"
    assert nvml.profile_name(1, 1, 22500 << 20, 183359 << 20) == "1g.23gb"


PROFILES = {
    "A30": "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb",
    "A100 40GB": "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb",
    "A100, H100 80GB": "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
    "H200 141GB": "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
    "B200 180GB": "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb",
    "GB200 186GB": "1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb",
    "RTX PRO 6000": "1g.24gb 1g.24gb+me 1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 2g.48gb 2g.48gb+gfx"
    " 2g.48gb+me.all 2g.48gb-me 4g.96gb 4g.96gb+gfx",
    "a part of a part": "1c.3g.40gb 2c.4g.40gb 1c.2g.48gb+gfx",
}
"""https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html"""


@pytest.mark.parametrize("gpu", PROFILES)
async def test_profiles_keep_their_attributes_in_the_slot(node: Node, gpu: str) -> None:
    profiles = PROFILES[gpu].split()
    mig = HEALTHY.replace("lost=0 mig=0 recovery=0", "lost=0 mig=1 maxmig=16 recovery=0")
    for place, profile in enumerate(profiles):
        mig += (
            f"mig gpu=0 idx={place} uuid=MIG-{place} gi={place} ci=0 gslices=1 cslices=1"
            f" mem_mb=9984 used={place} name=NVIDIA GPU MIG {profile}\n"
        )
    node.say(f"{mig}proc gpu=0 mig=1 pid=99 mem=7\n")
    host = await node.plugin()
    slots = [device.slot for device in devices(host) if device.parent]
    assert slots == [f"cuda.device:{profile.replace('+', '.')}-mig" for profile in profiles]
    await until_measured(host, len(profiles) + 1)
    measured = {item.stable_id: item for item in host.measurements()["cuda"]}
    assert "GPU-aaaa" not in measured
    part = measured["MIG-1"]
    assert (part.memory_used_bytes, part.memory_total_bytes) == (1, 9984 << 20)
    assert (part.temperature_c, part.power_w) == (41, None)
    assert part.processes == [ProcessUse(99, 7)]


def test_pci_address_is_written_as_sysfs_does() -> None:
    assert nvml.pci_address("00010000:E1:00.0") == "10000:e1:00.0"


def test_the_reference_lists_the_slots_of_every_gpu() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/slots.md").read_text()
    for profile in " ".join(PROFILES.values()).split():
        assert f"`{profile.replace('+', '.')}`" in page


async def until_measured(host: PluginHost, count: int) -> None:
    async with asyncio.timeout(10):
        while len(host.measurements().get("cuda", ())) != count:
            await asyncio.sleep(0.02)


async def test_xid_makes_a_gpu_unhealthy_unless_a_job_caused_it(node: Node) -> None:
    host = await node.plugin()
    node.say(HEALTHY + "xid id=1 gpu=1 code=31 gi=4294967295 ci=4294967295\n"
             "xid id=2 gpu=0 code=79 gi=4294967295 ci=4294967295\n")  # fmt: skip
    first, second = await until(host, lambda found: found[0].health is Health.UNHEALTHY)
    assert (first.reason, second.health) == ("Xid 79", Health.HEALTHY)


async def test_new_event_set_knows_no_xid_of_before(node: Node) -> None:
    node.say(f"{HEALTHY}xid id=1 gpu=0 code=79\n")
    host = await node.plugin()
    node.say(f"{HEALTHY}xid id=1 gpu=0 code=79\nxid id=2 gpu=1 code=79\n")
    first, _ = await until(host, lambda found: found[1].health is Health.UNHEALTHY)
    assert first.health is Health.HEALTHY


async def test_another_order_after_a_reboot_keeps_the_identities(node: Node) -> None:
    before = {d.stable_id: d.aliases for d in devices(await node.plugin())}
    head, first, second = HEALTHY.strip().rsplit("\ngpu ", 2)
    node.say(f"{head}\ngpu {second}\ngpu {first}\n")
    after = devices(await node.plugin())
    assert [d.stable_id for d in after] == ["GPU-bbbb", "GPU-aaaa"]
    assert {d.stable_id: d.aliases for d in after} == before


async def test_edits_name_gpus_by_uuid_in_the_best_way(node: Node, tmp_path: Path) -> None:
    host = await node.plugin()
    two = given("cuda", "GPU-aaaa", "GPU-bbbb")
    none = await host.container_edits(given("cuda"), Features("docker", device_requests=True))
    assert none.env == {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""}
    assert not none.device_requests
    requests = await host.container_edits(two, Features("docker", device_requests=True))
    assert requests.device_requests[0].device_ids == ("GPU-aaaa", "GPU-bbbb")
    assert requests.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-aaaa,GPU-bbbb"
    spec = {"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-aaaa"}, {"name": "0"}]}
    (tmp_path / "nvidia.yaml").write_text(json.dumps(spec))
    with_cdi = Features("docker", cdi=True, device_requests=True, cdi_spec_dirs=[str(tmp_path)])
    one = await host.container_edits(given("cuda", "GPU-aaaa"), with_cdi)
    assert (one.cdi, one.device_requests) == (("nvidia.com/gpu=GPU-aaaa",), ())
    assert one.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert (await host.container_edits(two, with_cdi)).device_requests
    plain = await host.container_edits(two, Features("process"))
    assert plain.env["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa,GPU-bbbb"
    assert plain.device_nodes == ()
    unit = await host.container_edits(two, Features("systemd"))
    assert unit.env == plain.env
    assert [node.host_path for node in unit.device_nodes] == [
        "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ]  # fmt: skip


def test_the_driver_s_list_of_capabilities_is_read(tmp_path: Path) -> None:
    listed = tmp_path / "mig-minors"
    assert capability_minors(listed) == {}
    listed.write_text("config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n\n")
    assert capability_minors(listed)["gpu0/gi1/access"] == 12
    assert capability_minors(listed)["gpu0/gi1/ci0/access"] == 13


def test_the_numa_node_comes_from_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    for text, node in (("1\n", 1), ("-1\n", None)):
        (folder / "numa_node").write_text(text)
        assert nvml.numa_node("0000:3b:00.0", tmp_path) == node
    assert nvml.numa_node("0000:ff:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"mode": "half"}, "mode"),
        ({"quantum": "2"}, "quantum"),
        ({"quantum": "0"}, "quantum"),
        ({"quantum": "1e-2"}, "quantum"),
        ({"ignored-xids": ["13"]}, "ignored-xids"),
        ({"ignored-xids": 13}, "ignored-xids"),
        ({"moed": 1}, "moed"),
    ],
)
def test_wrong_settings_are_named(settings, key) -> None:
    assert key in [problem.key for problem in CudaPlugin.validate(settings)]
    assert CudaPlugin.validate({"mode": "shares", "quantum": "0.05", "ignored-xids": [13]}) == []


def four_gpus(*lines: str, **changes: str) -> str:
    """Four GPUs, each under a host bridge of its own unless `gpuN` says otherwise."""
    gpus = [f"gpu uuid=GPU-{n} {changes.get(f'gpu{n}', '')} name=GPU" for n in range(4)]
    return "\n".join([*gpus, *lines])


LINKS = {
    "none": (four_gpus(), ["0 1", "2 3"]),
    "pairs": (four_gpus("link gpu=0 to=3", "link gpu=1 to=2"), ["0 3", "1 2"]),
    "one pair": (four_gpus("link gpu=1 to=3"), ["1 3", "0 2"]),
    "chain of three, which does not fit into two places": (
        four_gpus("link gpu=0 to=3", "link gpu=3 to=1"), ["0 1", "2 3"],
    ),
    "bridge": (four_gpus(gpu1="bridge=7", gpu2="bridge=7"), ["1 2", "0 3"]),
    "bridge beside an NVLink, which counts": (
        four_gpus("link gpu=0 to=2", gpu1="bridge=7", gpu2="bridge=7"), ["0 2", "1 3"],
    ),
    "lost": (four_gpus("link gpu=0 to=3", gpu1="lost=2"), ["0 3", "2"]),
    "unread": (
        four_gpus("link gpu=0 to=3", "link gpu=1 to=2", "fail nvmlDeviceGetP2PStatus 15 1"),
        ["0 3", "1 2"],
    ),
    "unsupported": (
        four_gpus("link gpu=0 to=3", "fail nvmlDeviceGetP2PStatus 3"), ["0 1", "2 3"],
    ),
    "parts": (
        four_gpus(
            "link gpu=0 to=2",
            *(f"mig gpu=1 idx={n} uuid=MIG-{n} gi={n} name=GPU MIG 1g.10gb" for n in range(4)),
            gpu1="mig=1",
        ),
        ["0 1:0 1:1 2", "1:2 1:3 3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), LINKS.values(), ids=LINKS)
async def test_linked_gpus_go_to_one_agent(node: Node, text: str, expected: list[str]) -> None:
    node.say(text)
    host = await node.plugin(AssignmentRules(("a", "b"), FakeMemory()))
    listing = host.listings()[0]
    assert listing.assignment is not None
    id_of = {d.stable_id: d.device_id.id.removeprefix("cuda") for d in listing.devices}
    owned = listing.assignment.devices
    assert [" ".join(sorted(id_of[n] for n in owned[agent])) for agent in "ab"] == expected


async def test_memory_slot_offers_the_memory_of_each_gpu(node: Node) -> None:
    node.say(four_gpus(gpu1="mem=42949672960", gpu2="mig=1", gpu3="mem=16777215"))
    host = await node.plugin(mode="shares", **{"memory-slot": True, "memory-quantum": "16m"})
    listing = host.listings()[0]
    assert [(t.name, t.quantum, t.primary, t.exclusive_group) for t in listing.slot_types] == [
        ("cuda.shares", ONE // 100, None, "mode"),
        ("cuda.mem", 16 << 20, "cuda.shares", "mode"),
    ]
    assert {d.device_id.id: d.secondary for d in listing.devices} == {
        "cuda0": (SecondarySlot("cuda.mem", SlotKind.BYTES, 80 << 30),),
        "cuda1": (SecondarySlot("cuda.mem", SlotKind.BYTES, 40 << 30),),
        "cuda3": (),
    }


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"memory-slot": True}, "memory-slot"),
        ({"memory-slot": True, "mode": "device"}, "memory-slot"),
        ({"memory-slot": "yes", "mode": "shares"}, "memory-slot"),
        ({"memory-quantum": "1m", "mode": "shares"}, "memory-quantum"),
        *(
            ({"memory-slot": True, "mode": "shares", "memory-quantum": size}, "memory-quantum")
            for size in ("1", "1.5m", "0", "2g", "x", [])
        ),
    ],
)
def test_memory_slot_that_cannot_be_is_named(settings, key) -> None:
    for plugin in (CudaPlugin, RocmPlugin):
        assert [problem.key for problem in plugin.validate(settings)] == [key]
