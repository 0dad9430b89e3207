"""NVIDIA's own states of the field: events, MIG, required recoveries, MPS, the bus, memory."""

import ctypes
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pynvml
import pytest

from agentd.pluginhost.process import PluginRefused
from agentd_cuda.files import device_files
from agentd_cuda.nvml import Gpu, MigPart
from agentd_cuda.xids import XidWatch
from native.libraries import nvml_library
from plugins.field.nvidia import (
    IDS,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    VENDOR,
    NvidiaRig,
    fails,
    gpu,
)
from plugins.field.rig import OpenPlugin, add_to_bus

WELL = [gpu(0), gpu(1), gpu(2)]
CLEAR = "; waits for agentctl clear"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch, tmp_path_factory) -> NvidiaRig:
    return NvidiaRig(tmp_path, monkeypatch, nvml_library(tmp_path_factory))


@pytest.fixture
async def plugin(rig: NvidiaRig) -> AsyncIterator[OpenPlugin]:
    opened = await OpenPlugin.start(rig)
    yield opened
    await opened.process.kill("over")


def sick(**reasons: str) -> dict[str, str]:
    return {f"GPU-{n}": reasons.get(n, "") for n in ("aaaa", "bbbb", "cccc")}


def xid(number: int, gpu: int, order: int = 1, **instances: int) -> str:
    fields = "".join(f" {key}={value}" for key, value in instances.items())
    return f"xid id={order} gpu={gpu} code={number}{fields}"


def is_sick(stable_id: str):
    def holds(listing) -> bool:
        return {d.stable_id: d.health for d in listing.devices}[stable_id] == "unhealthy"

    return holds


async def test_lost_gpu_does_not_delay_the_xids_of_others(
    rig: NvidiaRig, plugin: OpenPlugin
) -> None:
    await plugin.listing()
    rig.bring("lost behind its handle")
    await plugin.changed.wait()  # the event set has been replaced
    lost = [gpu(0), gpu(1, lost=2), gpu(2)]
    for number in range(1, 6):  # each was later than the one before, up to a minute
        rig.say(*lost, xid(31, 0, number), xid(48, 2, 10 + number))
        await plugin.until(is_sick(IDS[2]))
        await plugin.call("clear", [IDS[2]])
    assert await plugin.conditions() == []


class Unwatched(NamedTuple):
    """A driver without events, and the conditions about that."""

    lines: list[str]
    conditions: list[str]


UNWATCHED = {
    "no event set": Unwatched(
        [*WELL, *fails(UNKNOWN, "nvmlEventSetCreate")],
        ["Xids of cuda0, cuda1, cuda2 are not watched: Unknown Error"],
    ),
    "no event sets at all": Unwatched(
        [*WELL, *fails(NOT_SUPPORTED, "nvmlEventSetCreate")],
        ["Xids of cuda0, cuda1, cuda2 are not watched: Not Supported"],
    ),
    "waits that fail": Unwatched(
        [*WELL, *fails(UNKNOWN, "nvmlEventSetWait_v2")],
        ["Xids of cuda0, cuda1, cuda2 are not watched: Unknown Error"],
    ),
    "one GPU that cannot be registered": Unwatched(
        [*WELL, *fails(UNKNOWN, "nvmlDeviceRegisterEvents", gpu=1)],
        ["Xids of cuda1 are not watched: Unknown Error"],
    ),
    "one GPU without Xids": Unwatched(
        [gpu(0), gpu(1, events=0), gpu(2)], ["Xids of cuda1 are not watched: Not Supported"],
    ),
    "two GPUs that appear later": Unwatched([gpu(0)], []),
    "one GPU that is lost": Unwatched([gpu(0), gpu(1, lost=1), gpu(2)], []),
}  # fmt: skip


GARBAGE = b"\xf8\x02".decode(errors="surrogateescape")


async def test_name_that_is_no_text_keeps_no_gpu_away(rig: NvidiaRig) -> None:
    """As with driver 555 (gpuopenanalytics/pynvml 53)."""
    rig.say(gpu(0), gpu(1, name=GARBAGE), gpu(2))
    plugin = await OpenPlugin.start(rig)
    models = {n: device.model for n, device in (await plugin.devices()).items()}
    assert models == {IDS[0]: "NVIDIA H100", IDS[1]: "", IDS[2]: "NVIDIA H100"}
    assert await plugin.health() == sick()
    rig.say(gpu(0), gpu(1, uuid=GARBAGE), gpu(2))
    assert list((await plugin.health()).values())[1].startswith("no answer: 'utf-8' codec")
    await plugin.process.kill("over")


async def test_gpu_whose_rows_cannot_be_remapped_is_unhealthy(
    rig: NvidiaRig, plugin: OpenPlugin
) -> None:
    """Such a GPU kept its jobs failing until it was replaced (eks-node-monitoring-agent 245)."""
    rig.say(gpu(0, remap=0), gpu(1, remap=2), gpu(2, remap=1))
    assert await plugin.health() == sick(bbbb="remapping of its memory rows failed; replace it")
    assert await plugin.conditions() == ["cuda2 waits for a reset, which remaps rows of its memory"]


@pytest.mark.parametrize(("state", "words"), [(1, "not started"), (2, "in progress")])
async def test_fabric_that_is_not_set_up_is_a_condition(
    rig: NvidiaRig, plugin: OpenPlugin, state: int, words: str
) -> None:
    """Without it CUDA fails with error 802, while NVML lists all GPUs as usual."""
    rig.say(gpu(0, fabric=state), gpu(1, fabric=state), gpu(2, fabric=3))
    listing = await plugin.listing()
    assert {device.health for device in listing.devices} == {"healthy"}
    (condition,) = listing.conditions
    assert condition.reason == f"the NVLink fabric of cuda0, cuda1 is not set up: {words}"
    assert "nvidia-fabricmanager" in condition.remedy


@pytest.mark.parametrize("name", UNWATCHED)
async def test_unwatched_gpus_are_a_condition_until_watched(rig: NvidiaRig, name: str) -> None:
    case = UNWATCHED[name]
    rig.say(*case.lines)
    plugin = await OpenPlugin.start(rig)
    await plugin.until(
        lambda listing: (
            [c.reason for c in listing.conditions if "Xids" in c.reason] == case.conditions
        )
    )
    rig.bring()
    await plugin.until(lambda listing: not listing.conditions and len(listing.devices) == 3)
    rig.say(*WELL, xid(79, 1))
    await plugin.until(is_sick(IDS[1]))
    await plugin.process.kill("over")


def test_event_sets_that_always_fail_pause_within_bounds(monkeypatch) -> None:
    """After 1,024 failed waits the pause was beyond what a float can hold."""

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(UNKNOWN)

    pauses: list[float] = []
    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", refuse)
    monkeypatch.setattr("agentd_cuda.xids.time.sleep", pauses.append)
    watch = XidWatch(())
    for _ in range(1100):
        watch.wait(60)
    assert (pauses[0], max(pauses), watch.problem) == (1.0, 32.0, "Unknown Error")


def test_xid_behind_thousands_of_ignored_ones_is_seen_at_once(monkeypatch) -> None:
    """A GPU had 11,760 of Xid 45 (NVSentinel 1748); each took a wait of its own."""
    gpu_handle = ctypes.c_void_p(1)
    numbers = iter([*[45] * 11_760, 79])
    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", object)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda _: gpu_handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda _: "GPU-aaaa")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSupportedEventTypes", lambda _: 8)
    monkeypatch.setattr(pynvml, "nvmlDeviceRegisterEvents", lambda *_: None)
    monkeypatch.setattr(
        pynvml, "nvmlEventSetWait",
        lambda *_: SimpleNamespace(
            device=gpu_handle, eventData=next(numbers),
            gpuInstanceId=0xFFFFFFFF, computeInstanceId=0xFFFFFFFF,
        ),
    )  # fmt: skip
    watch = XidWatch({45})
    assert watch.wait(60)
    assert [(xid.uuid, xid.number) for xid in watch.seen] == [("GPU-aaaa", 79)]


RECOVERIES = {
    1: "the driver requires a GPU reset",
    2: "the driver requires a reboot of the node",
    3: "the driver requires a peer-to-peer drain",
    4: "the driver requires a drain and a reset",
    6: "the driver requires a bus reset",
    7: "the driver requires a reboot of the system",
    9: "the driver requires recovery action 9",
}


@pytest.mark.parametrize("action", RECOVERIES)
async def test_required_recovery_is_named(rig: NvidiaRig, plugin: OpenPlugin, action: int) -> None:
    rig.say(gpu(0), gpu(1, recovery=action), gpu(2))
    assert await plugin.health() == sick(bbbb=RECOVERIES[action])


async def test_imex_recovery_concerns_no_gpu(rig: NvidiaRig, plugin: OpenPlugin) -> None:
    rig.say(gpu(0), gpu(1, recovery=5), gpu(2))
    listing = await plugin.listing()
    assert {device.health for device in listing.devices} == {"healthy"}
    (condition,) = listing.conditions
    assert condition.reason == "the driver of cuda1 requires a recovery of its IMEX domain"
    assert condition.stable_id == IDS[1]


async def test_xid_without_recovery_report_waits_for_a_clear(
    rig: NvidiaRig, plugin: OpenPlugin
) -> None:
    silent = [gpu(0, recovery=-1), gpu(1, recovery=-1), gpu(2)]
    rig.say(*silent, xid(79, 0, 1), xid(48, 1, 2), xid(48, 2, 3))
    await plugin.until(is_sick(IDS[2]))
    assert await plugin.health() == sick(
        aaaa="Xid 79" + CLEAR, bbbb="Xid 48" + CLEAR, cccc="Xid 48"
    )
    listing = await plugin.listing()
    assert [device.needs_clear for device in listing.devices] == [True, True, False]
    await plugin.call("clear", [IDS[0]])
    assert await plugin.health() == sick(bbbb="Xid 48" + CLEAR, cccc="Xid 48")


@pytest.mark.parametrize("code", [10, LOST, UNKNOWN])
async def test_recovery_that_a_driver_fails_to_tell_once_is_the_last(
    rig: NvidiaRig, plugin: OpenPlugin, code: int
) -> None:
    rig.say(*WELL)
    await plugin.listing()
    rig.say(gpu(0, recovery=-code), *WELL[1:], xid(79, 0, 1))
    await plugin.until(is_sick(IDS[0]))
    device, *_ = (await plugin.listing()).devices
    assert (device.reason, device.needs_clear) == ("Xid 79", False)


async def test_xid_of_a_gpu_that_was_lost_later_can_be_cleared(
    rig: NvidiaRig, plugin: OpenPlugin
) -> None:
    silent = [gpu(0, recovery=-1), *WELL[1:]]
    rig.say(*silent, xid(79, 0, 1))
    await plugin.until(is_sick(IDS[0]))
    rig.say(gpu(0, recovery=-1, lost=1), *WELL[1:])
    assert await plugin.health() == sick(aaaa="no answer: GPU is lost; Xid 79" + CLEAR)
    await plugin.call("clear", [IDS[0]])
    assert await plugin.health() == sick(aaaa="no answer: GPU is lost")


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 94, 109])
async def test_xid_that_a_restart_of_the_job_ends_is_ignored(
    rig: NvidiaRig, plugin: OpenPlugin, number: int
) -> None:
    rig.say(*WELL, xid(number, 0, 1), xid(79, 1, 2))
    await plugin.until(is_sick(IDS[1]))
    assert await plugin.health() == sick(bbbb="Xid 79")


MIG = [
    gpu(0), gpu(1, mig=1, maxmig=7),
    "mig gpu=1 idx=0 uuid=MIG-1 gi=1 ci=0 gslices=3 cslices=1 mem_mb=40448 name=H MIG 1c.3g.40gb",
    "mig gpu=1 idx=1 uuid=MIG-2 gi=1 ci=1 gslices=3 cslices=2 mem_mb=40448 name=H MIG 2c.3g.40gb",
    "mig gpu=1 idx=2 uuid=MIG-3 gi=2 ci=0 gslices=1 cslices=1 mem_mb=9984 name=H MIG 1g.10gb",
    gpu(2),
]  # fmt: skip
XIDS_OF_INSTANCES = {
    "a compute instance": ({"gi": 1, "ci": 1}, {"MIG-2"}),
    "the only compute instance": ({"gi": 2, "ci": 0}, {"MIG-3"}),
    "a GPU instance": ({"gi": 1}, {"MIG-1", "MIG-2"}),
    "an instance that is gone": ({"gi": 5, "ci": 0}, set()),
    "the GPU": ({}, {"MIG-1", "MIG-2", "MIG-3"}),
}


@pytest.mark.parametrize("name", XIDS_OF_INSTANCES)
async def test_xid_of_a_mig_instance_concerns_it_alone(rig: NvidiaRig, name: str) -> None:
    instances, expected = XIDS_OF_INSTANCES[name]
    rig.say(*MIG)
    plugin = await OpenPlugin.start(rig)
    assert set(await plugin.health()) == {"GPU-aaaa", "GPU-cccc", "MIG-1", "MIG-2", "MIG-3"}
    rig.say(*MIG, xid(48, 1, 1, **instances), xid(79, 0, 2))
    await plugin.until(is_sick(IDS[0]))
    assert {n for n, reason in (await plugin.health()).items() if reason == "Xid 48"} == expected
    await plugin.call("clear", sorted(expected))
    assert {n for n, reason in (await plugin.health()).items() if reason} == {IDS[0]}
    await plugin.process.kill("over")


async def test_xid_of_an_instance_without_ids_closes_all_of_its_gpu(rig: NvidiaRig) -> None:
    unknown = fails(NOT_SUPPORTED, "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")
    rig.say(*MIG, *unknown)
    plugin = await OpenPlugin.start(rig)
    await plugin.listing()
    rig.say(*MIG, *unknown, xid(48, 1, 1, gi=2, ci=0))
    await plugin.until(is_sick("MIG-3"))
    assert {n for n, reason in (await plugin.health()).items() if reason} == {
        "MIG-1", "MIG-2", "MIG-3",
    }  # fmt: skip
    await plugin.process.kill("over")


async def test_required_reset_of_a_mig_gpu_concerns_all_parts(rig: NvidiaRig) -> None:
    rig.say(*MIG[:1], gpu(1, mig=1, maxmig=7, recovery=1), *MIG[2:])
    plugin = await OpenPlugin.start(rig)
    reset = "the driver requires a GPU reset"
    assert await plugin.health() == {
        "GPU-aaaa": "", "GPU-cccc": "", **dict.fromkeys(("MIG-1", "MIG-2", "MIG-3"), reset),
    }  # fmt: skip
    await plugin.process.kill("over")


HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
MIG_CONDITIONS = {
    "no instances": (
        [line for line in MIG if not line.startswith("mig")],
        "cuda1 is in MIG mode and has no instances", set(),
    ),
    "no permission": (
        [*MIG, *fails(NO_PERMISSION, HANDLE, gpu=1)],
        "cuda1 is in MIG mode, and agentd has no permission to open its instances", set(),
    ),
    "one of three lost": (
        [*MIG, *fails(LOST, HANDLE, gpu="1 1")],
        "cuda1: MIG instance 1 does not answer: GPU is lost", {"MIG-1", "MIG-3"},
    ),
    "one of three without attributes and profile": (
        [*(line.replace("name=H MIG 1g.10gb", "name=H") for line in MIG),
         *fails(LOST, "nvmlDeviceGetAttributes_v2", gpu="1 2")],
        "cuda1: MIG instance 2: GPU is lost", {"MIG-1", "MIG-2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIG_CONDITIONS)
async def test_mig_instance_that_is_missing_is_a_condition(rig: NvidiaRig, name: str) -> None:
    lines, reason, parts = MIG_CONDITIONS[name]
    rig.say(*lines)
    plugin = await OpenPlugin.start(rig)
    assert await plugin.conditions() == [reason]
    assert set(await plugin.health()) == {"GPU-aaaa", "GPU-cccc", *parts}
    rig.say(*MIG)
    assert await plugin.conditions() == []
    await plugin.process.kill("over")


async def test_instance_without_measurements_keeps_those_of_others(rig: NvidiaRig) -> None:
    rig.say(*MIG, *fails(UNKNOWN, "nvmlDeviceGetMemoryInfo", gpu="1 1"))
    plugin = await OpenPlugin.start(rig)
    measured = [measurement.stable_id for measurement in await plugin.measure()]
    assert measured == ["GPU-aaaa", "MIG-1", "MIG-3", "GPU-cccc"]
    await plugin.process.kill("over")


@pytest.fixture
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """The settings for an MPS control daemon that listens."""
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(folder / "control"))
        control.listen()
        yield {"mode": "shares", "share-control": "mps", "mps-pipe-directory": str(folder)}


async def test_lost_gpu_does_not_keep_the_others_from_mps(rig: NvidiaRig, mps) -> None:
    rig.bring("lost")
    plugin = await OpenPlugin.start(rig, **mps)
    assert await plugin.health() == {"GPU-aaaa": "", "GPU-cccc": ""}
    rig.say(gpu(0), gpu(1, mode=2), gpu(2))
    assert await plugin.health() == sick(bbbb="compute mode is Prohibited: no program can use it")
    rig.bring()
    assert await plugin.health() == sick()
    await plugin.process.kill("over")


async def test_lost_gpu_has_the_files_that_it_had(rig: NvidiaRig, plugin: OpenPlugin) -> None:
    files = {n: list(device.files) for n, device in (await plugin.devices()).items()}
    assert files == {n: [f"/dev/nvidia{k}"] for k, n in enumerate(IDS)}
    rig.say(*WELL, *fails(LOST, "nvmlDeviceGetMinorNumber", gpu=1))
    assert {n: list(device.files) for n, device in (await plugin.devices()).items()} == files


async def test_unit_of_a_gpu_without_a_known_file_is_refused(rig: NvidiaRig) -> None:
    rig.say(*WELL, *fails(LOST, "nvmlDeviceGetMinorNumber", gpu=1))
    plugin = await OpenPlugin.start(rig)
    assert [*(await plugin.devices())[IDS[1]].files] == []
    nodes = (await plugin.edits(IDS[0], IDS[2], runtime="systemd")).device_nodes
    assert [node.host_path for node in nodes] == [
        "/dev/nvidia0", "/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ]  # fmt: skip
    with pytest.raises(PluginRefused, match="the driver does not tell its minor number"):
        await plugin.edits(IDS[1], runtime="systemd")
    await plugin.process.kill("over")


def test_part_has_the_files_of_its_instances_in_slurm_s_order(tmp_path: Path) -> None:
    part = MigPart("1g.10gb", 1, gpu_instance=3, compute_instance=0)
    whole = Gpu("", "", 1, 2, True, (), (), 0, (0, 0), "")
    minors = tmp_path / "mig-minors"
    minors.write_text("gpu2/gi3/access 30\ngpu2/gi3/ci0/access 31\ngpu2/gi4/access 39\n")
    assert device_files(whole, part, minors) == [
        "/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31",
    ]  # fmt: skip
    minors.write_text("gpu2/gi3/access 30\n")
    with pytest.raises(LookupError, match="does not list gpu2/gi3/ci0/access"):
        device_files(whole, part, minors)


async def test_gpus_that_only_the_bus_has_are_a_condition(rig: NvidiaRig) -> None:
    add_to_bus(rig.sysfs, "0000:07:00.0", VENDOR, "vfio-pci")
    add_to_bus(rig.sysfs, "0000:08:00.0", VENDOR, "nvidia")
    (rig.sysfs / "bus/pci/devices/0000:08:00.0/physfn").symlink_to("../0000:00:00.0")
    add_to_bus(rig.sysfs, "0000:09:00.0", "1002", "amdgpu")
    rig.say()
    plugin = await OpenPlugin.start(rig)
    addresses = ", ".join(f"0000:0{n}:00.0" for n in range(3))
    missing = f"the NVIDIA driver does not list {addresses}, which the PCI bus has"
    listing = await plugin.listing()
    assert ([c.reason for c in listing.conditions], listing.devices) == ([missing], [])
    rig.bring()
    assert await plugin.conditions() == []
    await plugin.process.kill("over")


async def test_gpu_of_another_driver_is_named_until_it_leaves_the_bus(rig: NvidiaRig) -> None:
    folder = add_to_bus(rig.sysfs, "0000:0a:00.0", VENDOR, "nouveau")
    plugin = await OpenPlugin.start(rig)
    (reason,) = await plugin.conditions()
    assert "0000:0a:00.0 (driver: nouveau)" in reason
    (folder / "driver").unlink()
    (reason,) = await plugin.conditions()
    assert "0000:0a:00.0 (no driver)" in reason
    folder.rename(rig.sysfs / "removed")
    assert await plugin.conditions() == []
    await plugin.process.kill("over")


async def test_memory_that_no_driver_reports_is_set_or_missed(rig: NvidiaRig) -> None:
    rig.say(*WELL, *fails(NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo", gpu=1))
    offers = {"mode": "shares", "memory-slot": True}
    plugin = await OpenPlugin.start(rig, **offers)
    whole = {"cuda.mem": str(80 << 30)}
    secondary = {n: device.secondary for n, device in (await plugin.devices()).items()}
    assert secondary == {IDS[0]: whole, IDS[1]: {}, IDS[2]: whole}
    (condition,) = (await plugin.listing()).conditions
    assert condition.reason == "cuda1 reports no memory, and offers no cuda.mem"
    assert "memory = " in condition.remedy
    await plugin.process.kill("over")
    plugin = await OpenPlugin.start(rig, **offers, memory="119g")
    devices = await plugin.devices()
    assert devices[IDS[1]].secondary == {"cuda.mem": str(119 << 30)}
    assert devices[IDS[0]].secondary == whole
    assert await plugin.conditions() == []
    await plugin.process.kill("over")
