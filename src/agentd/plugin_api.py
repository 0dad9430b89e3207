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

import grp
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, ClassVar

from agentd.core.devices import natural_key
from agentd.core.kernel.edits import ContainerEdits, DeviceNode, DeviceRequest, Mount
from agentd.core.names import did_you_mean
from agentd.core.partition.auto_split import split_units
from agentd.core.slots import SlotKind, parse_base_units
from agentd.device_reads import DeviceRead, DeviceReads, guard_each

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "MEMORY_SLOT_KEYS",
    "MODE_KEYS",
    "NODE_ID_VARIABLE",
    "AcceleratorPlugin",
    "AllocatedDevice",
    "ConditionInfo",
    "ContainerEdits",
    "DeviceInfo",
    "DeviceNode",
    "DeviceRead",
    "DeviceReads",
    "DeviceRequest",
    "Features",
    "KernelEvent",
    "Measurement",
    "Mount",
    "NotPresent",
    "PartitionInfo",
    "ProcessUse",
    "SettingProblem",
    "SlotTypeInfo",
    "dealt_by_slots",
    "dealt_in_groups",
    "group_id",
    "guard_each",
    "log_once",
    "memory_offered",
    "memory_slot",
    "memory_slot_problems",
    "memory_slots",
    "mode_problems",
    "mode_slots",
    "on_pci_bus",
    "primary_slot",
    "size_in_bytes",
    "unknown_settings",
]

API_VERSION = 1
ENTRY_POINT_GROUP = "agentd.accelerators"
NODE_ID_VARIABLE = "AGENTD_NODE_ID"
"""Where a plugin finds the id of its node, in its environment."""
MEMORY_SLOT_KEYS = ("memory-slot", "memory-quantum")
"""The settings of plugins that offer the memory of their devices as a secondary slot."""
MODE_KEYS = ("mode", "quantum", *MEMORY_SLOT_KEYS)
"""The settings of plugins that offer whole devices or shares of them."""
_QUANTA = {"device": "1", "shares": "0.01"}
"""The default quantum in each mode."""
_QUANTUM = re.compile(r"1(?:\.0+)?|0\.[0-9]{1,6}")
_MEBIBYTE = 1 << 20
GPU_CLASSES = ("03", "12")
"""PCI base classes of GPUs: display controllers and processing accelerators.

https://admin.pci-ids.ucw.cz/read/PD
"""


class NotPresent(Exception):
    """The node has none of the plugin's hardware; `open` raises this after it checked the bus.

    agentd then does not retry until it restarts or an operator retries the plugin, and the slots
    are unknown on this node. If there is hardware but no driver yet, raise any other exception:
    agentd then retries `open`.
    """


@dataclass(frozen=True, slots=True)
class SlotTypeInfo:
    """A slot that the plugin's devices offer.

    `name` is the device name, or begins with the device name and a dot. `kind` is `count`,
    `bytes` or `unique`. `quantum` is the smallest step in which agentd allocates it: at most 1
    for counts, at most 1 GiB for bytes. A request can use only one slot of each `exclusive_group`.
    `unit` is for display only.
    Set `is_enforced` if a kernel with a part of a device cannot use more of it, whatever it does;
    otherwise the slot is in the kernel's `not_enforced`.
    `primary` makes it a secondary slot, of kind `count` or `bytes`, of devices that offer the slot
    of that name. A secondary slot has the exclusive group of its primary.
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
    """The current state of a device.

    `id` is a suggestion; agentd keeps the id that it assigned first. `stable_id` always names the
    same physical device. `slot` and `capacity` are its primary slot; `secondary` maps up to seven
    further slots of the same device to their capacities, such as GPU memory beside GPU shares.
    `parent` is the stable id of the device that it is a part of, and `parent_aliases` are further
    names of that, such as its PCI address. `health` is `healthy`,
    `unhealthy` (with a `reason`) or `unknown`; an unhealthy one keeps the slots and parts that
    agentd saw last. If it `is_simulated`, other daemons on the host can serve a device with the
    same stable id. `files` are the device nodes that belong to this device alone, in the order in
    which Slurm's gres.conf names them. An unhealthy one `needs_clear` if the driver never
    reports the end of its trouble: agentd keeps it unhealthy, with this reason and also after a
    restart of the plugin, until an operator clears it.
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
    files: Sequence[str] = ()
    parent_aliases: Sequence[str] = ()
    needs_clear: bool = False


@dataclass(frozen=True, slots=True)
class ConditionInfo:
    """Something that an operator should know about the plugin, or about one of its devices.

    `reason` is a sentence, and `remedy` what the operator can do about it. Without `stable_id` it
    is about the plugin: hardware that is on the bus and missing in the driver, or events that
    nobody watches. An unhealthy device needs no condition: its reason is one.
    """

    reason: str
    remedy: str = ""
    stable_id: str = ""


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
    """The runtime of a kernel (`docker`, `systemd`, `process`), and how it accepts devices.

    With `cdi` it accepts names of the Container Device Interface, from the specifications in
    `cdi_spec_dirs`. With `device_requests` it accepts requests to a device driver of the engine.
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
    """The measurements of a device, in percent, bytes, degrees Celsius and watts; None is unknown.

    `processes` are the processes that use it, or None if the driver does not list them.
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

    Each device belongs to at most one agent. Devices that are left out belong to no agent. Agents
    get equal numbers of the devices with the same slots, or numbers that differ by one. For other
    numbers, `reason` is required, and becomes a warning.
    """

    devices: Mapping[str, Sequence[str]]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """An invalid key of the plugin's table, and the reason with the accepted values."""

    key: str
    why: str


def unknown_settings(settings: Mapping[str, Any], known: Iterable[str]) -> list[SettingProblem]:
    """Return a problem, with the nearest known key, for each key that is not in `known`."""
    known = [*known, "plugin", "required", "exclude"]
    problems = []
    for key in settings:
        if key not in known:
            hint = did_you_mean(key, known)
            problems.append(SettingProblem(key, f"unknown key; {hint}allowed: {', '.join(known)}"))
    return problems


def size_in_bytes(value: object) -> int:
    """Return a size of the settings in bytes: a number, or a string such as `80g` or `512MiB`.

    Raises:
        ValueError: the value is not a size.
    """
    return parse_base_units(value, SlotKind.BYTES)


def memory_slot(name: str, primary: str, quantum: object = _MEBIBYTE) -> SlotTypeInfo:
    """Return the secondary slot `NAME.mem` of devices that offer `primary`."""
    quantum_bytes = str(size_in_bytes(quantum))
    return SlotTypeInfo(f"{name}.mem", "bytes", quantum_bytes, unit="bytes", primary=primary)


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
    """Return the problems of `memory-slot` and `memory-quantum`."""
    problems = []
    if not isinstance(settings.get("memory-slot", False), bool):
        problems.append(SettingProblem("memory-slot", "expected true or false"))
    quantum = settings.get("memory-quantum", _MEBIBYTE)
    try:
        size = size_in_bytes(quantum)
    except ValueError:
        size = 0
    if size % _MEBIBYTE or not 0 < size <= _MEBIBYTE << 10:
        reason = f'invalid size {quantum!r}: expected whole MiB up to 1 GiB, such as "1m"'
        problems.append(SettingProblem("memory-quantum", reason))
    elif "memory-quantum" in settings and not settings.get("memory-slot"):
        problems.append(SettingProblem("memory-quantum", "is not used without memory-slot = true"))
    return problems


def primary_slot(name: str, settings: Mapping[str, Any]) -> str:
    """Return the slot that `mode` asks for: `NAME.device` or `NAME.shares`."""
    return f"{name}.{settings.get('mode', 'device')}"


def mode_slots(name: str, settings: Mapping[str, Any], unit: str = "") -> list[SlotTypeInfo]:
    """Return the slots that `MODE_KEYS` ask for: the primary one, and that of the memory."""
    slot = primary_slot(name, settings)
    quantum = _decimal(settings.get("quantum", _QUANTA[settings.get("mode", "device")]))
    primary = SlotTypeInfo(slot, "count", quantum, exclusive_group="mode", unit=unit)
    return [primary, *memory_slots(name, slot, settings)]


def mode_problems(settings: Mapping[str, Any]) -> list[SettingProblem]:
    """Return the problems of `MODE_KEYS`."""
    problems = []
    if settings.get("mode", "device") not in tuple(_QUANTA):
        reason = f"invalid mode {settings['mode']!r}: expected {' or '.join(_QUANTA)}"
        problems.append(SettingProblem("mode", reason))
    quantum = _decimal(settings.get("quantum", "1"))
    if not _QUANTUM.fullmatch(quantum) or not Decimal(quantum):
        reason = f'invalid quantum {quantum!r}: expected more than 0, at most 1, such as "0.01"'
        problems.append(SettingProblem("quantum", reason))
    return problems + memory_slot_problems(settings)


def _decimal(value: object) -> str:
    """Format a number of the settings as a plain decimal: TOML reads 0.00001 as 1e-05."""
    return format(Decimal(str(value)), "f") if isinstance(value, float) else str(value)


def group_id(name: str) -> str:
    """Return a group's number on this node, since an image has its own; the name if it has none."""
    try:
        return str(grp.getgrnam(name).gr_gid)
    except KeyError:
        return name


def log_once(text: str) -> None:
    """Print a text, which agentd logs, unless it was printed before."""
    if text not in _logged:
        _logged.add(text)
        print(text, flush=True)  # noqa: T201 - a plugin's output is the daemon's log


_logged: set[str] = set()


def dealt_by_slots(
    devices: Iterable[DeviceInfo], agents: Sequence[str], group_of: Mapping[str, object]
) -> PartitionInfo:
    """Return the division of devices with `dealt_in_groups`, for each combination of slots.

    `group_of` maps stable ids of devices, or of their parents, to groups. A device without one is
    in a group with the other parts of its parent.
    """
    groups: dict[tuple[str, ...], dict[object, list[str]]] = {}
    for device in devices:
        slots = device.slot, *sorted(device.secondary)
        owner_id = device.parent or device.stable_id
        ids_by_group = groups.setdefault(slots, {})
        ids_by_group.setdefault(group_of.get(owner_id, owner_id), []).append(device.id)
    dealt: dict[str, list[str]] = {agent: [] for agent in agents}
    for slots in sorted(groups):
        for agent, ids in dealt_in_groups(groups[slots].values(), agents).items():
            dealt[agent] += ids
    return PartitionInfo(dealt)


def dealt_in_groups(groups: Iterable[Iterable[str]], agents: Sequence[str]) -> dict[str, list[str]]:
    """Return the device ids of each agent, with groups kept together where possible.

    `groups` has every device once; a device without a group is alone in one. Agents get as many
    devices as with `auto-split-order = "id"`. Groups are dealt from the largest to the smallest.
    Each goes to the agent with the least room among those with room for the whole group. If there
    is none, it fills the agent with the most room, and its other devices form a new group.
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
    room = dict(zip(agents, counts, strict=True))
    dealt: dict[str, list[str]] = {agent: [] for agent in agents}
    while waiting:
        *_, ids = heappop(waiting)
        if len(ids) == 1:
            agent = next(agent for agent in agents if room[agent])
        else:
            fitting = [agent for agent in agents if room[agent] >= len(ids)]
            agent = (
                min(fitting, key=room.__getitem__) if fitting else max(agents, key=room.__getitem__)
            )
        taken, remaining = ids[: room[agent]], ids[room[agent] :]
        dealt[agent] += taken
        room[agent] -= len(taken)
        if remaining:
            heappush(waiting, (-len(remaining), natural_key(remaining[0]), remaining))
    return {agent: sorted(ids, key=natural_key) for agent, ids in dealt.items()}


def on_pci_bus(
    vendor: str, classes: Sequence[str] = GPU_CLASSES, sysfs: Path = Path("/sys")
) -> list[str]:
    """Return the addresses of a vendor's devices on the PCI bus, whether they have a driver or not.

    `vendor` is a PCI vendor id such as `10de`, and `classes` are the first digits of class codes.
    Both are in `/sys/bus/pci/devices/ADDRESS` (Documentation/ABI/testing/sysfs-bus-pci).
    """

    def read(path: Path) -> str:
        try:
            return path.read_text(encoding="ascii").strip().removeprefix("0x")
        except OSError:
            return ""

    return sorted(
        device.name
        for device in (sysfs / "bus/pci/devices").glob("*")
        if read(device / "vendor") == vendor and read(device / "class").startswith(tuple(classes))
    )


class AcceleratorPlugin(ABC):
    """A kind of device; `name` is its device name, which is the name of its table.

    agentd first calls `validate` on the class, then creates the object and calls `open`. To report
    a failure, raise an exception: agentd shows its message to the operator.
    """

    api_version: ClassVar[int] = API_VERSION
    needs_table: ClassVar[bool] = False
    """Whether the plugin needs its own table in the configuration to load."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self.settings = settings

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        """Return all problems of a table; by default every key is one."""
        return unknown_settings(settings, ())

    @abstractmethod
    def open(self) -> None:
        """Connect to the driver or library.

        Raises:
            NotPresent: this node has none of the hardware.
            Exception: any other failure; agentd retries with a growing backoff.
        """

    def close(self) -> None:  # noqa: B027 - optional, and empty by default
        """Close the driver or library."""

    @abstractmethod
    def slot_types(self) -> Sequence[SlotTypeInfo]:
        """Return the slots its devices offer; fixed while the daemon lives."""

    @abstractmethod
    def list_devices(self) -> Sequence[DeviceInfo]:
        """Return all present devices, including unhealthy ones."""

    def conditions(self) -> Sequence[ConditionInfo]:
        """Return what operators should know, as of the last `list_devices`, which precedes it."""
        return ()

    def clear(self, device_ids: Sequence[str]) -> None:  # noqa: B027 - optional, empty by default
        """Clear what waits for an operator about some devices, by stable id.

        This is for troubles that the driver never reports as over: such a device
        `needs_clear`. The stable id of a part comes with that of its parent. agentd lists the
        devices afterwards; if they are as before, there was nothing to clear.
        """

    @abstractmethod
    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        """Return the edits for a kernel with these devices; for no devices, those that hide all."""

    def partition(
        self, devices: Sequence[DeviceInfo], agents: Sequence[str]
    ) -> PartitionInfo | None:
        """Divide the devices among the agents; None deals them in the order of their ids.

        This is for devices that belong together, such as linked GPUs. agentd calls it in auto-split
        with `auto-split-order = "plugin"`, after the first listing. `devices` have the ids that
        agentd assigned, in natural order; they include missing devices that agentd remembers, with
        health `unknown`. agentd keeps the answer, and uses it again while agents, devices and their
        slots are the same. The answer may not depend on the order of devices.
        """
        del devices, agents
        return None

    def measure(self) -> Sequence[Measurement]:
        """Return the current measurements of the devices."""
        return ()

    def wait_for_change(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a change of the devices; return whether there was one.

        This is for libraries that report events. agentd calls it repeatedly until `close`, in its
        own thread beside the other methods; a wait may end early. After True, agentd lists the
        devices again at once. Otherwise it lists them every `health-interval`.
        """
        del timeout_s
        return False

    def kernel_event(self, event: KernelEvent) -> None:  # noqa: B027 - the same
        """Handle a step in a kernel's life; a failure does not affect the kernel."""
