"""A GPU that answers in part: it keeps its form, and concerns no other GPU.

Five GPUs; the last one has two MIG instances. Each case is one state of a driver, as public reports
of GPU nodes describe them, and is tried while agentd runs and across a restart.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from agentd.core.devices import Device, Health
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitOrder, SplitRules
from agentd.events import EventLog
from agentd.pluginhost.assignment import AssignmentRules
from agentd.pluginhost.host import PluginHost
from agentd.services.devices import NodeDevices
from agentd.services.protocols import PluginState
from agentd.state.folder import StateFolder
from agentd.state.schemas import SavedDevices
from core.machines import CPU, GIB, MEM, cores, memory
from plugins.test_cuda import Node, library, node

__all__ = ("library", "node")

AGENTS = ("a", "b")
NUMA_NODES = (0, 1, 0, 1, 1)
WHOLE = "".join(
    f"gpu uuid=GPU-{n} pci=00000000:0{n}:00.0 mig={{mig{n}}} recovery=0 events=8 name=NVIDIA H100\n"
    for n in range(5)
)
PARTS = """mig gpu=4 idx=0 uuid=MIG-0 gi=1 ci=0 gslices=1 cslices=1 mem_mb=9984 {name0}
mig gpu=4 idx=1 uuid=MIG-1 gi=2 ci=0 gslices=3 cslices=3 mem_mb=40448 {name1}
"""
NAMED = {"name0": "name=NVIDIA H100 MIG 1g.10gb+me", "name1": "name=NVIDIA H100 MIG 3g.40gb"}


def gpus(*lines: str, is_mig: bool = True, names: dict[str, str] = NAMED) -> str:
    whole = WHOLE.format(mig0=0, mig1=0, mig2=0, mig3=0, mig4=int(is_mig))
    return "\n".join([whole + (PARTS.format(**names) if is_mig else ""), *lines, ""])


def fails(*functions: str, code: int = 16, gpu: str = "4") -> tuple[str, ...]:
    return tuple(f"fail {function} {code} {gpu}" for function in functions)


class Place(NamedTuple):
    """All that the trouble of a driver must not change."""

    stable_id: str
    slots: tuple[object, ...]
    numa_node: int | None
    agents: tuple[str, ...]


class Machine:
    """The devices of a daemon in auto-split, over restarts of the daemon."""

    def __init__(self, node: Node, folder: Path, order: SplitOrder, settings: dict) -> None:
        self.node, self.settings = node, settings
        self.order = order
        self.rules = SplitRules(
            AllocationMode.AUTO_SPLIT, tuple(AgentRule(agent) for agent in AGENTS), order=order
        )
        self.store = StateFolder(folder / "state", "n")
        self.store.open(folder / "locks")
        self.sysfs = folder / "sys"
        for n, numa_node in enumerate(NUMA_NODES):
            device = self.sysfs / f"bus/pci/devices/0000:0{n}:00.0"
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{numa_node}\n")

    async def start(self) -> None:
        rules = AssignmentRules(AGENTS, self.store) if self.order is SplitOrder.PLUGIN else None
        self.host: PluginHost = await self.node.plugin(
            rules, sysfs=str(self.sysfs), **self.settings
        )
        host_devices = [*cores(4), memory(8 * GIB)]
        self.devices = NodeDevices(
            self.host, self.store, self.rules, (CPU, MEM), host_devices, EventLog()
        )
        self.devices.discover()

    async def restart(self) -> None:
        await self.host.close()
        await self.start()

    async def kill_plugin(self) -> None:
        plugin = self.host._instances["cuda"]
        os.kill(plugin._process.pid, signal.SIGKILL)
        await self.until(lambda: plugin.state is not PluginState.READY)
        await self.host.retry("cuda")

    @property
    def places(self) -> dict[str, Place]:
        return {
            device.device_id.id: Place(
                device.stable_id,
                device.slots,
                device.numa_node,
                tuple(self.devices.split.owners(device.device_id)),
            )
            for device in self.cuda
        }

    @property
    def cuda(self) -> list[Device]:
        return list(self.devices.inventory.by_name["cuda"])

    @property
    def slot_types(self) -> set[str]:
        return set(self.devices.inventory.slot_types)

    async def until(self, holds: Callable[[], bool]) -> None:
        self.devices.refresh("cuda")
        async with asyncio.timeout(15):
            changes = self.host.changes()
            while not holds():
                await anext(changes)
                self.devices.refresh("cuda")

    def health(self) -> dict[str, str]:
        return {d.stable_id: "gone" if d.gone else d.health.value for d in self.cuda}

    def reasons(self) -> set[str]:
        return {d.reason for d in self.cuda if d.health is Health.UNHEALTHY}

    def is_quiet(self) -> bool:
        """Whether nobody is told to restart agentd, or of a new device."""
        return not any(
            "restart agentd" in text or " new " in text for text in self.devices.warnings
        )


WELL = dict.fromkeys(("GPU-0", "GPU-1", "GPU-2", "GPU-3", "MIG-0", "MIG-1"), "healthy")
SICK = WELL | dict.fromkeys(("MIG-0", "MIG-1"), "unhealthy")
ABSENT = WELL | dict.fromkeys(("MIG-0", "MIG-1"), "gone")
SHARES = {"mode": "shares", "memory-slot": True}


@pytest.fixture
async def machine(node: Node, tmp_path: Path, request) -> AsyncIterator[Machine]:
    order, settings = getattr(request, "param", (SplitOrder.ID, SHARES))
    node.say(gpus())
    made = Machine(node, tmp_path, order, settings)
    await made.start()
    yield made
    made.store.close()


EVERYTHING = (
    "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode",
    "nvmlDeviceGetName", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMaxMigDeviceCount",
)  # fmt: skip
IDENTITY_ONLY = fails(*EVERYTHING)


@pytest.mark.parametrize(
    "machine",
    [(order, settings) for order in SplitOrder for settings in ({}, SHARES)],
    indirect=True,
    ids=[f"{order.value}, {kind}" for order in SplitOrder for kind in ("whole", "memory-slot")],
)
async def test_gpu_with_identity_alone_moves_no_device(machine: Machine) -> None:
    places = machine.places
    assert machine.health() == WELL
    assert {place.agents for place in places.values()} == {("a",), ("b",)}
    async with keeping_places(machine):
        machine.node.say(gpus(*IDENTITY_ONLY))
        await machine.until(lambda: machine.health() == SICK)
        assert machine.is_quiet()
        await machine.kill_plugin()
        await machine.until(lambda: machine.health() == SICK)
        assert machine.places == places
        for _ in range(2):
            await machine.restart()
            assert (machine.health(), machine.places) == (SICK, places)
        assert machine.reasons() == {"no answer: GPU requires restart"}
    await machine.restart()
    assert (machine.places, machine.health()) == (places, WELL)


class Fault(NamedTuple):
    """The devices that one failing function of NVML makes unhealthy, on GPU 2 and GPU 4.

    `refused` are those for refused permission, `unknown` those that a new process cannot list.
    """

    function: str
    sick: frozenset[str]
    refused: frozenset[str]
    unknown: frozenset[str] = frozenset()


NONE: frozenset[str] = frozenset()
MIG = frozenset({"MIG-0", "MIG-1"})
BOTH = MIG | {"GPU-2"}
FAULTS = {
    "handle": Fault("nvmlDeviceGetHandleByIndex_v2", BOTH, BOTH, BOTH),
    "identity": Fault("nvmlDeviceGetUUID", BOTH, BOTH, BOTH),
    "PCI address": Fault("nvmlDeviceGetPciInfo_v3", BOTH, BOTH),
    "MIG mode": Fault("nvmlDeviceGetMigMode", BOTH, BOTH),
    "number of MIG instances": Fault("nvmlDeviceGetMaxMigDeviceCount", MIG, MIG),
    "MIG instance handles": Fault("nvmlDeviceGetMigDeviceHandleByIndex", MIG, MIG, MIG),
    "MIG instance attributes": Fault("nvmlDeviceGetAttributes_v2", MIG, MIG),
    "memory": Fault("nvmlDeviceGetMemoryInfo", BOTH, frozenset({"GPU-2"})),
    "name": Fault("nvmlDeviceGetName", BOTH, MIG),
    "recovery": Fault("nvmlDeviceGetFieldValues", BOTH, NONE),
    "minor number": Fault("nvmlDeviceGetMinorNumber", NONE, NONE),
    "NUMA node": Fault("nvmlDeviceGetNumaNodeId", NONE, NONE),
    "power": Fault("nvmlDeviceGetPowerUsage", NONE, NONE),
}
CODES = {15: "GPU is lost", 999: "Unknown Error", 10: "Timeout", 4: "Insufficient Permissions",
         16: "GPU requires restart"}  # fmt: skip


def with_sick(sick: frozenset[str], unknown: frozenset[str] = NONE) -> dict[str, str]:
    return WELL | dict.fromkeys(sick, "unhealthy") | dict.fromkeys(unknown, "gone")


@asynccontextmanager
async def keeping_places(machine: Machine, well: str | None = None) -> AsyncIterator[None]:
    """Trouble that moves no device, and after which all are well without a word."""
    before = machine.places, machine.slot_types
    yield
    assert (machine.places, machine.slot_types) == before
    machine.node.say(well or gpus())
    await machine.until(lambda: machine.health() == WELL)
    assert (machine.places, machine.slot_types) == before
    assert machine.is_quiet()


@pytest.mark.parametrize("name", FAULTS)
async def test_failing_function_keeps_the_form_of_a_gpu(machine: Machine, name: str) -> None:
    fault = FAULTS[name]
    async with keeping_places(machine):
        for code, words in CODES.items():
            sick = fault.refused if code == 4 else fault.sick
            lines = [line for gpu in "24" for line in fails(fault.function, code=code, gpu=gpu)]
            machine.node.say(gpus(*lines))
            expected = with_sick(sick), {f"no answer: {words}"} if sick else set()
            await machine.until(
                lambda expected=expected: (machine.health(), machine.reasons()) == expected
            )
        await machine.restart()
        assert machine.health() == with_sick(fault.sick, fault.unknown)


async def test_unreadable_numa_node_keeps_the_form_of_a_gpu(machine: Machine) -> None:
    places, file = machine.places, machine.sysfs / "bus/pci/devices/0000:02:00.0/numa_node"
    file.unlink()
    file.mkdir()  # even root cannot read it
    sick = with_sick(frozenset({"GPU-2"}))
    await machine.until(lambda: machine.health() == sick)
    await machine.restart()
    assert (machine.places, machine.health()) == (places, sick)
    assert machine.reasons() == {"its NUMA node cannot be read: Is a directory"}


SITUATIONS = {
    # k8s-device-plugin 231 and 2038: Xid 79, and not even a handle
    "fallen off the bus": (gpus().replace("mig=1", "mig=1 lost=1"), MIG, MIG),
    # nvidia-smi: "Unable to determine the device handle for GPU ...: Unknown Error"
    "lost behind its handle": (gpus().replace("mig=1", "mig=1 lost=2"), MIG, MIG),
    # a GPU in MIG mode after an uncorrectable error
    "recovery required": (gpus().replace("mig=1 recovery=0", "mig=1 recovery=1"), MIG, NONE),
    # GPUs are busy, and nvidia-smi shows "ERR!" for fan and power
    "ERR! in its measurements": (
        gpus(*fails("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperatureV", code=999)), NONE, NONE,
    ),
    # a board of five GPUs that all need a reset, after a fault of NVLink
    "all GPUs": (
        gpus(*fails(*EVERYTHING, gpu="")), frozenset(WELL), NONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
async def test_gpu_in_trouble_is_well_when_it_answers(machine: Machine, name: str) -> None:
    text, sick, unknown = SITUATIONS[name]
    async with keeping_places(machine):
        machine.node.say(text)
        await machine.until(lambda: machine.health() == with_sick(sick))
        assert machine.is_quiet()
        await machine.restart()
        assert machine.health() == with_sick(sick, unknown)


async def test_xid_of_an_instance_leaves_the_others_of_its_gpu(machine: Machine) -> None:
    places = machine.places
    machine.node.say(gpus("xid id=1 gpu=4 code=48 gi=1 ci=0"))
    await machine.until(lambda: machine.health() == with_sick(frozenset({"MIG-0"})))
    assert (machine.places, machine.reasons()) == (places, {"Xid 48"})


async def test_unnamed_instances_without_attributes_keep_their_places(machine: Machine) -> None:
    """Drivers that do not name profiles, and know nothing of an instance (go-nvml 60)."""
    old = {"name0": "name=NVIDIA H100", "name1": "name=NVIDIA H100"}
    machine.node.say(gpus(names=old))
    machine.store.save_devices(SavedDevices([]))
    await machine.restart()
    async with keeping_places(machine, gpus(names=old)):
        machine.node.say(gpus(*fails("nvmlDeviceGetAttributes_v2", code=6), names=old))
        await machine.until(lambda: machine.health() == with_sick(MIG))
        await machine.restart()
        assert machine.health() == with_sick(MIG, MIG)


@pytest.mark.parametrize("machine", [(order, SHARES) for order in SplitOrder], indirect=True)
async def test_gpu_of_a_late_driver_has_its_last_form(machine: Machine) -> None:
    async with keeping_places(machine):
        places = machine.places
        machine.node.say(gpus("init 9"))
        await machine.restart()
        assert (machine.places, set(machine.health().values())) == (places, {"gone"})
        machine.node.say(gpus(*IDENTITY_ONLY))
        await machine.host.retry("cuda")
        await machine.until(lambda: machine.health() == SICK)


async def test_gpu_that_left_mig_mode_in_trouble_is_whole(machine: Machine) -> None:
    places = machine.places
    machine.node.say(gpus(*IDENTITY_ONLY))
    await machine.until(lambda: machine.health() == SICK)
    machine.node.say(gpus(is_mig=False))
    await machine.until(lambda: "GPU-4" in machine.health())
    assert machine.health() == ABSENT | {"GPU-4": "healthy"}
    assert {name: machine.places[name] for name in places} == places
    machine.node.say(gpus(*IDENTITY_ONLY, is_mig=False))
    await machine.until(lambda: machine.health()["GPU-4"] == "unhealthy")
    await machine.restart()
    assert machine.health()["GPU-4"] == "unhealthy"
    machine.node.say(gpus(is_mig=False))
    await machine.until(lambda: machine.health()["GPU-4"] == "healthy")


async def test_gpu_that_entered_mig_mode_in_trouble_has_parts(machine: Machine) -> None:
    other = {"name0": "name=NVIDIA H100 MIG 1g.10gb+me", "name1": "name=NVIDIA H100 MIG 3g.40gb"}
    new = gpus(names=other).replace("MIG-0", "MIG-8").replace("MIG-1", "MIG-9")
    machine.node.say(gpus(*IDENTITY_ONLY))
    await machine.until(lambda: machine.health() == SICK)
    machine.node.say(new)
    parts = {"MIG-8": "healthy", "MIG-9": "healthy"}
    await machine.until(lambda: machine.health() == ABSENT | parts)
    machine.node.say(new + "\n".join(IDENTITY_ONLY))
    sick = dict.fromkeys(parts, "unhealthy")
    await machine.until(lambda: machine.health() == ABSENT | sick)
    await machine.restart()
    assert machine.health() == ABSENT | sick, "the instances of before stay missing"


async def test_renumbered_gpus_keep_their_forms(machine: Machine) -> None:
    """`nvmlDeviceDiscoverGpus` renumbers the GPUs of a process that runs."""
    places = machine.places
    lines = gpus().splitlines()
    moved = [*lines[4:5], *lines[:4], *(line.replace("gpu=4", "gpu=0") for line in lines[5:])]
    machine.node.say("\n".join([*moved, *fails(*EVERYTHING, gpu="0"), ""]))
    await machine.until(lambda: "unhealthy" in str(machine.health()))
    assert set(machine.health()) == set(WELL)
    machine.node.say("\n".join([*moved, ""]))
    await machine.until(lambda: machine.health() == WELL)
    assert {name: place.stable_id for name, place in machine.places.items()} == {
        name: place.stable_id for name, place in places.items()
    }
