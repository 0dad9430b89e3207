"""All of agentd that an accelerator plugin may import.

A plugin is a class behind an entry point in the group `agentd.accelerators`. agentd
calls its methods with data and takes data back, so that a plugin can live in another
process; the methods block, and every call has a deadline. Amounts are plain decimals in
text, as on the wire (`"1"`, `"0.05"`, `"8589934592"`).

    class Blinker(AcceleratorPlugin):
        def open(self) -> None: ...
        def slot_types(self) -> list[SlotTypeInfo]:
            return [SlotTypeInfo(f"{self.name}.device")]
        def list_devices(self) -> list[DeviceInfo]:
            return [DeviceInfo("blinker0", stable_id="BL-17", slot=f"{self.name}.device")]
        def container_edits(self, allocation, features) -> ContainerEdits:
            return ContainerEdits(env={"BLINKERS": ",".join(d.id for d in allocation)})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, ClassVar

from agentd.core.devices import natural_key
from agentd.core.kernel.edits import ContainerEdits, DeviceNode, DeviceRequest, Mount
from agentd.core.names import did_you_mean
from agentd.core.partition.auto_split import split_units
from agentd.core.slots import SlotKind, parse_base_units

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "MEMORY_SLOT_KEYS",
    "NODE_ID_VARIABLE",
    "AcceleratorPlugin",
    "AllocatedDevice",
    "ContainerEdits",
    "DeviceInfo",
    "DeviceNode",
    "DeviceRequest",
    "Features",
    "KernelEvent",
    "Measurement",
    "Mount",
    "NotPresent",
    "PartitionInfo",
    "SettingProblem",
    "SlotTypeInfo",
    "dealt_in_groups",
    "memory_offered",
    "memory_slot",
    "memory_slot_problems",
    "memory_slots",
    "on_pci_bus",
    "size_in_bytes",
    "unknown_settings",
]

API_VERSION = 1
ENTRY_POINT_GROUP = "agentd.accelerators"
NODE_ID_VARIABLE = "AGENTD_NODE_ID"
"""Where a plugin finds the id of its node, in its environment."""
MEMORY_SLOT_KEYS = ("memory-slot", "memory-quantum")
"""The settings of plugins that offer the memory of their devices as a secondary slot."""
_MEBIBYTE = 1 << 20
GPU_CLASSES = ("03", "12")
"""PCI base classes of GPUs: display controllers and processing accelerators.

https://admin.pci-ids.ucw.cz/read/PD
"""


class NotPresent(Exception):
    """This node has none of the plugin's hardware; to be raised by `open`, after a look at the bus.

    It is believed for as long as the daemon lives: the slots are unknown on this node. Where there
    is hardware and no driver yet, raise anything else, and `open` is tried again.
    """


@dataclass(frozen=True, slots=True)
class SlotTypeInfo:
    """A slot that the plugin's devices offer.

    `name` is the device name, or the device name, a dot and more. `kind` is `count`,
    `bytes` or `unique`. `quantum` is the smallest step in which agentd allocates it: at most 1
    for counts, at most 1 GiB for bytes. A request may ask for one slot of each `exclusive_group`
    only. `unit` is for people.
    `is_enforced` says that a kernel which was given a part of a device cannot use more of it,
    whatever it does; else the slot stands in the kernel's `not_enforced`.
    `primary` makes it a secondary slot, of kind `count` or `bytes`, of devices that offer the slot
    of that name. It takes the exclusive group of its primary.
    """

    name: str
    kind: str = "count"
    quantum: str = "1"
    exclusive_group: str | None = None
    unit: str = ""
    is_enforced: bool = False
    primary: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device, as it is now.

    `id` is a suggestion (agentd keeps the one it gave first). `stable_id` always names the same
    physical device. `slot` and `capacity` are its primary slot; `secondary` maps up to seven
    further slots of the same device to their capacities, such as GPU memory beside GPU shares.
    `parent` is the stable id of the device that it is a part of. `health` is `healthy`,
    `unhealthy` (with a `reason`) or `unknown`. If it `is_simulated`, other daemons of the host may
    offer a device of the same stable id.
    """

    id: str
    stable_id: str
    slot: str
    capacity: str = "1"
    aliases: Sequence[str] = ()
    parent: str | None = None
    model: str = ""
    numa_node: int | None = None
    health: str = "healthy"
    reason: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    is_simulated: bool = False
    secondary: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """A kernel's share of a device.

    `slot` and `amount` are those of the primary slot; `amounts` has every slot of the device.
    """

    id: str
    stable_id: str
    slot: str
    amount: str
    amounts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Features:
    """The runtime of a kernel (`docker`, `systemd`, `process`), and its ways to devices.

    `cdi` says that names of the Container Device Interface are taken, from the specifications
    in `cdi_spec_dirs`; `device_requests` that those of a vendor's driver are.
    """

    runtime: str
    cdi: bool = False
    device_requests: bool = False
    cdi_spec_dirs: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The usage of a device by one process of this host; memory in bytes, None if unknown."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements of a device; None is unknown. Percent, bytes, degrees Celsius, watts.

    `processes` are those that use it, as the driver tells; None where it does not.
    """

    stable_id: str
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    processes: Sequence[ProcessUse] | None = None


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A step in the life of a kernel that holds some of the plugin's devices.

    `step` is `before-create`, `after-start`, `before-stop` or `after-stop`.
    """

    step: str
    kernel_id: str
    devices: Sequence[AllocatedDevice]


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A division of a plugin's devices: agents to ids of devices.

    Each device belongs to one agent at most. Devices that are left out belong to no agent. Agents
    get equal numbers of the devices with the same slots, or numbers that differ by one. If they
    do not, `reason` says why, and becomes a warning.
    """

    devices: Mapping[str, Sequence[str]]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A key of the plugin's table that cannot be used, and what would be."""

    key: str
    why: str


def unknown_settings(settings: Mapping[str, Any], known: Iterable[str]) -> list[SettingProblem]:
    """Return a problem, with the nearest known key, for each key that is not in `known`."""
    known = [*known, "plugin", "required"]
    problems = []
    for key in settings:
        if key not in known:
            hint = did_you_mean(key, known)
            problems.append(SettingProblem(key, f"unknown key; {hint}allowed: {', '.join(known)}"))
    return problems


def size_in_bytes(value: object) -> int:
    """Return a size of the settings in bytes: a number, or a text such as `80g` or `512MiB`.

    Raises:
        ValueError: it is not a size.
    """
    return parse_base_units(value, SlotKind.BYTES)


def memory_slot(name: str, primary: str, quantum: object = _MEBIBYTE) -> SlotTypeInfo:
    """Return the secondary slot `NAME.mem` of devices that offer `primary`."""
    step = str(size_in_bytes(quantum))
    return SlotTypeInfo(f"{name}.mem", "bytes", step, unit="bytes", primary=primary)


def memory_slots(name: str, primary: str, settings: Mapping[str, Any]) -> list[SlotTypeInfo]:
    """Return the memory slot that the settings ask for: one if `memory-slot` is true."""
    quantum = settings.get("memory-quantum", _MEBIBYTE)
    return [memory_slot(name, primary, quantum)] if settings.get("memory-slot") else []


def memory_offered(name: str, settings: Mapping[str, Any], size: int) -> dict[str, str]:
    """Return the `secondary` of a device with `size` bytes of memory, by the settings.

    Empty without `memory-slot`, and for a device with less memory than the quantum (0: its memory
    cannot be read), which has no secondary slot.
    """
    slots = memory_slots(name, "", settings)
    return {slot.name: str(size) for slot in slots if size >= int(slot.quantum)}


def memory_slot_problems(settings: Mapping[str, Any]) -> list[SettingProblem]:
    """Return what is wrong with `memory-slot` and `memory-quantum`."""
    problems = []
    if not isinstance(settings.get("memory-slot", False), bool):
        problems.append(SettingProblem("memory-slot", "expected true or false"))
    quantum = settings.get("memory-quantum", _MEBIBYTE)
    try:
        size = size_in_bytes(quantum)
    except ValueError:
        size = 0
    if size % _MEBIBYTE or not 0 < size <= _MEBIBYTE << 10:
        why = f'invalid size {quantum!r}: expected whole MiB up to 1 GiB, such as "1m"'
        problems.append(SettingProblem("memory-quantum", why))
    elif "memory-quantum" in settings and not settings.get("memory-slot"):
        problems.append(SettingProblem("memory-quantum", "is not used without memory-slot = true"))
    return problems


def dealt_in_groups(groups: Iterable[Iterable[str]], agents: Sequence[str]) -> dict[str, list[str]]:
    """Return the device ids of each agent, with groups kept together where possible.

    `groups` holds every device once, alone if it has no group. Agents get as many devices as with
    `auto-split-order = "id"`. Groups are dealt from the largest to the smallest. Each goes to the
    agent with the fewest places left among those that have room for all of it. If no agent has,
    it fills the agent with the most places left, and its other devices are a group of their own.
    Single devices fill the agents in order. The result does not depend on the order of groups.

    Raises:
        ValueError: there are no agents.
    """
    waiting = [
        (-len(ids), natural_key(ids[0]), ids)
        for ids in (sorted(group, key=natural_key) for group in groups)
        if ids
    ]
    heapify(waiting)
    counts = split_units(sum(len(ids) for *_, ids in waiting), len(agents))
    left = dict(zip(agents, counts, strict=True))
    dealt: dict[str, list[str]] = {agent: [] for agent in agents}
    while waiting:
        *_, ids = heappop(waiting)
        if len(ids) == 1:
            agent = next(agent for agent in agents if left[agent])
        else:
            fitting = [agent for agent in agents if left[agent] >= len(ids)]
            agent = (
                min(fitting, key=left.__getitem__) if fitting else max(agents, key=left.__getitem__)
            )
        taken, rest = ids[: left[agent]], ids[left[agent] :]
        dealt[agent] += taken
        left[agent] -= len(taken)
        if rest:
            heappush(waiting, (-len(rest), natural_key(rest[0]), rest))
    return {agent: sorted(ids, key=natural_key) for agent, ids in dealt.items()}


def on_pci_bus(
    vendor: str, classes: Sequence[str] = GPU_CLASSES, sysfs: Path = Path("/sys")
) -> list[str]:
    """Return the addresses of a vendor's devices on the PCI bus, whether they have a driver or not.

    `vendor` is a PCI vendor id such as `10de`, `classes` the first digits of class codes. The
    kernel tells both in `/sys/bus/pci/devices/ADDRESS` (Documentation/ABI/testing/sysfs-bus-pci).
    """

    def text(path: Path) -> str:
        try:
            return path.read_text(encoding="ascii").strip().removeprefix("0x")
        except OSError:
            return ""

    return sorted(
        device.name
        for device in (sysfs / "bus/pci/devices").glob("*")
        if text(device / "vendor") == vendor and text(device / "class").startswith(tuple(classes))
    )


class AcceleratorPlugin(ABC):
    """One family of devices; `name` is its device name, the table's name in the configuration.

    agentd calls `validate` first, on the class, then makes the object, and calls `open`
    before anything else. Raise to say that something does not work: the message is shown
    to the operator.
    """

    api_version: ClassVar[int] = API_VERSION
    needs_table: ClassVar[bool] = False
    """Whether it does nothing without a table of its own in the configuration."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self.settings = settings

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        """Return everything that is wrong with a table; by default any key is."""
        return unknown_settings(settings, ())

    @abstractmethod
    def open(self) -> None:
        """Connect to the driver or library.

        Raises:
            NotPresent: this node has none of the hardware.
            Exception: anything else is tried again, with growing pauses.
        """

    def close(self) -> None:  # noqa: B027 - optional, and empty by default
        """Close the driver or library."""

    @abstractmethod
    def slot_types(self) -> Sequence[SlotTypeInfo]:
        """Return the slots its devices offer; fixed while the daemon lives."""

    @abstractmethod
    def list_devices(self) -> Sequence[DeviceInfo]:
        """Return all devices that are there now, the unhealthy ones too."""

    @abstractmethod
    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        """Return what a kernel needs to use these devices; for none, how to hide them all."""

    def partition(
        self, devices: Sequence[DeviceInfo], agents: Sequence[str]
    ) -> PartitionInfo | None:
        """Divide the devices among the agents; None deals them in the order of their ids.

        For devices that belong together, such as GPUs joined by links. Called in auto-split with
        `auto-split-order = "plugin"`, after the first listing. `devices` have the ids that agentd
        gave them, in natural order; missing ones that agentd remembers are among them, with health
        `unknown`. The answer is kept and used again while agents, devices and their slots are the
        same. It may not depend on the order of devices.
        """
        del devices, agents
        return None

    def measure(self) -> Sequence[Measurement]:
        """Return what the devices do now."""
        return ()

    def wait_for_change(self, timeout_s: float) -> bool:
        """Wait for something to happen to the devices; True if it did, within `timeout_s`.

        For libraries that tell of events. Called again and again, in a thread of its own beside
        the other methods, until `close`; a wait may end early. After True the devices are listed
        again. Without it they are listed now and then.
        """
        del timeout_s
        return False

    def kernel_event(self, event: KernelEvent) -> None:  # noqa: B027 - the same
        """Learn of a kernel's life; nothing that happens here changes it."""
