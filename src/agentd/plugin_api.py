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
from pathlib import Path
from typing import Any, ClassVar

from agentd.core.kernel.edits import ContainerEdits, DeviceNode, DeviceRequest, Mount
from agentd.core.names import did_you_mean

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
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
    "SettingProblem",
    "SlotTypeInfo",
    "on_pci_bus",
    "unknown_settings",
]

API_VERSION = 1
ENTRY_POINT_GROUP = "agentd.accelerators"
NODE_ID_VARIABLE = "AGENTD_NODE_ID"
"""Where a plugin finds the id of its node, in its environment."""
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
    `bytes` or `unique`; `quantum` the smallest step it is given in, at most 1 for counts.
    A request may ask for one slot of each `exclusive_group` only. `unit` is for people.
    `is_enforced` says that a kernel which was given a part of a device cannot use more of it,
    whatever it does; else the slot stands in the kernel's `not_enforced`.
    """

    name: str
    kind: str = "count"
    quantum: str = "1"
    exclusive_group: str | None = None
    unit: str = ""
    is_enforced: bool = False


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device, as it is now.

    `id` is a suggestion (agentd keeps the one it gave first), `stable_id` names the physical
    thing for good. `parent` is the stable id of what it is a part of. `health` is `healthy`,
    `unhealthy` (with a `reason`) or `unknown`. One that `is_simulated` is not
    hardware: other daemons of the host may serve one with the same stable id.
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


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """A share of a device that a kernel was given."""

    id: str
    stable_id: str
    slot: str
    amount: str


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
    """What one process of this machine uses of a device: memory in bytes, None if not known."""

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

    def measure(self) -> Sequence[Measurement]:
        """Return what the devices do now."""
        return ()

    def wait_for_change(self, timeout_s: float) -> bool:
        """Wait for something to happen to the devices; True if it did, within `timeout_s`.

        For libraries that tell of events. Called again and again, in a thread of its own beside
        the other methods; after True the devices are listed again. Without it they are listed
        now and then.
        """
        del timeout_s
        return False

    def kernel_event(self, event: KernelEvent) -> None:  # noqa: B027 - the same
        """Learn of a kernel's life; nothing that happens here changes it."""
