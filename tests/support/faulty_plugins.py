"""Plugins that behave, and many that do not; entry points of the tests name them."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentd.plugin_api import (
    AcceleratorPlugin,
    AllocatedDevice,
    ConditionInfo,
    ContainerEdits,
    DeviceInfo,
    Features,
    KernelEvent,
    Measurement,
    NotPresent,
    PartitionInfo,
    SettingProblem,
    SlotTypeInfo,
)


def wait_for(settings: Mapping[str, Any]) -> None:
    """Wait for a file to appear, as a slow driver would."""
    while not Path(settings["file"]).exists():
        time.sleep(0.01)


class Good(AcceleratorPlugin):
    """One device; knows two settings."""

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        return [
            SettingProblem(key, "unknown key")
            for key in settings
            if key not in ("speed", "file", "gate", "nap")
        ]

    def open(self) -> None: ...

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        return [SlotTypeInfo(f"{self.name}.device")]

    def list_devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(f"{self.name}0", f"S-{self.name}", f"{self.name}.device")]

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        return ContainerEdits(env={self.name.upper(): ",".join(d.id for d in allocation)})


def plugin(**members: Any) -> type[Good]:
    """Return a plugin with other members."""
    return type("Plugin", (Good,), members)


def fail(error: BaseException) -> Any:
    raise error


NeedsTable = plugin(needs_table=True)
OldApi = plugin(api_version=0)
NotAPlugin = 42

RaisesAtOpen = plugin(open=lambda _: fail(RuntimeError("no driver\nhere")))
ExitsAtOpen = plugin(open=lambda _: fail(SystemExit(3)))
StopsIteration = plugin(open=lambda _: fail(StopIteration()))
CrashesAtOpen = plugin(open=lambda _: os.kill(os.getpid(), signal.SIGSEGV))
LeavesAtOpen = plugin(open=lambda _: os._exit(7))
ClosesEverything = plugin(open=lambda _: os.closerange(3, 256))
Late = plugin(open=lambda self: wait_for(self.settings))

RaisesAtList = plugin(list_devices=lambda _: fail(OSError("device lost")))
Twice = plugin(list_devices=lambda self: [*Good.list_devices(self), *Good.list_devices(self)])
ListsNonsense = plugin(list_devices=lambda _: ["cuda0"])
OutsidePrefix = plugin(slot_types=lambda _: [SlotTypeInfo("cpu")])
HalfUnique = plugin(slot_types=lambda self: [SlotTypeInfo(f"{self.name}.device", "unique", "0.5")])
OddEdits = plugin(container_edits=lambda *_: ContainerEdits(env={1: 2}))
Deaf = plugin(kernel_event=lambda *_: fail(RuntimeError("not now")))


def lying(**changes: Any) -> type[Good]:
    """Return a plugin whose one device is not as it should be."""

    def list_devices(self: Good) -> Sequence[DeviceInfo]:
        info = {"id": "d0", "stable_id": "S-0", "slot": f"{self.name}.device", **changes}
        return [DeviceInfo(**info)]

    return plugin(list_devices=list_devices)


NegativeAmount = lying(capacity="-1")
NanAmount = lying(capacity="NaN")
HugeAmount = lying(capacity="9" * 40)
OddId = lying(id="a/b c")
UnknownSlot = lying(slot="x.y")
BadHealth = lying(health="so-so")
OddParent = lying(parent=5)
OddAliases = lying(aliases="GPU")
OddNode = lying(numa_node=-1)
NeverClears = lying(id="one0", health="unhealthy", reason="Xid 79", needs_clear=True)


class Scripted(Good):
    """Does what the file says, at every listing: crash, hang, leak, raise, sick, none, two.

    Its edits are as the file says too: broken, groups, env.
    """

    leaked: ClassVar[list[bytes]] = []
    _never = threading.Event()

    def open(self) -> None:
        threading.Thread(target=self._never.wait, daemon=True).start()

    def _word(self) -> str:
        return Path(self.settings["file"]).read_text().strip()

    def list_devices(self) -> Sequence[DeviceInfo]:
        word = self._word()
        (device,) = super().list_devices()
        if word == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(1000)
        if word == "leak":
            self.leaked.append(b"x" * (32 << 20))
        if word == "raise":
            raise OSError("the driver is gone")
        if word == "sick":
            return [replace(device, health="unhealthy", reason="it coughs")]
        if word == "two":
            other = replace(device, id=f"{self.name}1", stable_id="S-other")
            return [device, other]
        return [] if word == "none" else [device]

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        if allocation and self._word() == "broken":
            raise OSError("driver gone")
        if allocation and self._word() == "groups":
            return ContainerEdits(groups=("g" * 256,))
        if allocation and self._word() == "env":
            return ContainerEdits(env={"X": "é" * 100_000})
        return super().container_edits(allocation, features)


class TellsOfChanges(Scripted):
    """Notices when the file has changed since the devices were listed, or the plugin was opened."""

    def open(self) -> None:
        self._listed = self._word()
        super().open()

    def list_devices(self) -> Sequence[DeviceInfo]:
        self._listed = self._word()
        return super().list_devices()

    def wait_for_change(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while self._word() == self._listed and time.monotonic() < end:
            time.sleep(0.01)
        return True


class Complains(Scripted):
    """Has a condition, and cannot measure, unless the file says silent."""

    def conditions(self) -> Sequence[ConditionInfo]:
        return [] if self._word() == "silent" else [ConditionInfo("it is not watched")]

    def measure(self) -> Sequence[Measurement]:
        if self._word() == "silent":
            time.sleep(0.2)
            return []
        raise OSError("no counters")


class LosesEvents(Scripted):
    """Cannot wait for events while the file says deaf."""

    def wait_for_change(self, timeout_s: float) -> bool:
        if self._word() == "deaf":
            raise OverflowError("no more events")
        time.sleep(0.01)
        return False


class AlwaysTellsOfChanges(Good):
    """Tells of a change without an end, and counts its listings in a file."""

    def list_devices(self) -> Sequence[DeviceInfo]:
        with Path(self.settings["file"]).open("a") as file:
            file.write("listed\n")
        return super().list_devices()

    def wait_for_change(self, timeout_s: float) -> bool:
        del timeout_s
        with Path(self.settings["file"]).open("a") as file:
            file.write("told\n")
        return True


class Hears(Good):
    """Writes down what it is told of kernels."""

    def kernel_event(self, event: KernelEvent) -> None:
        with Path(self.settings["file"]).open("a") as file:
            file.write(f"{event.step} {event.kernel_id} {event.devices[0].id}\n")


class MovesSlots(Good):
    """Its slots are others at every listing."""

    listings = 0

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        MovesSlots.listings += 1
        return [*super().slot_types(), SlotTypeInfo(f"{self.name}.x{MovesSlots.listings}")]


class SlowToHear(Hears):
    """Takes its time with each event."""

    def kernel_event(self, event: KernelEvent) -> None:
        wait_for({"file": self.settings["gate"]})
        super().kernel_event(event)


class WithHelpers(Scripted):
    """Starts programs in its own group, in another, and in a session of their own."""

    def open(self) -> None:
        super().open()
        for options in ({}, {"process_group": 0}, {"start_new_session": True}):
            subprocess.Popen(["sleep", self.settings["nap"]], **options)


class Prints(Good):
    def open(self) -> None:
        sys.stdout.write("to standard output\n")
        sys.stderr.write("to standard error\n" * 1000)


class Moves(Good):
    """Its device has another id at every listing."""

    listings = 0

    def list_devices(self) -> Sequence[DeviceInfo]:
        Moves.listings += 1
        return [replace(d, id=f"{d.id}{Moves.listings}") for d in super().list_devices()]


def __getattr__(name: str) -> type[Good]:
    """Make a plugin that looks into agentd, only where it is asked for."""
    if name != "LooksInside":
        raise AttributeError(name)
    importlib.import_module("agentd.core.kernel.reconcile")
    return Good


class Deals(Good):
    """Deals its five devices as the file says; by default each to another agent in turn."""

    def list_devices(self) -> Sequence[DeviceInfo]:
        slot = f"{self.name}.device"
        return [DeviceInfo(f"{self.name}{n}", f"S-{self.name}{n}", slot) for n in range(5)]

    def partition(
        self, devices: Sequence[DeviceInfo], agents: Sequence[str]
    ) -> PartitionInfo | None:
        ids = [device.id for device in devices]
        if "file" not in self.settings:
            return PartitionInfo({agent: ids[n :: len(agents)] for n, agent in enumerate(agents)})
        word = Path(self.settings["file"]).read_text().strip()
        if word == "raise":
            raise OSError("the links cannot be read")
        if word == "hang":
            time.sleep(1000)
        if word == "none":
            return None
        answers: Mapping[str, Any] = {
            "fair": {agents[0]: ids[0:4:2], agents[1]: ids[1:4:2]},
            "agent": {"c": ids},
            "device": {agents[0]: [f"{self.name}9"]},
            "twice": {agents[0]: ids[:1], agents[1]: ids[:1]},
            "unequal": {agents[0]: ids[:4]},
            "reasoned": {agents[0]: ids[:4]},
            "shape": {agents[0]: 5},
        }
        return PartitionInfo(answers[word], "one board has four" if word == "reasoned" else "")


class DealsByOrder(Deals):
    """Deals to the first agent what comes first, in whatever order it is asked."""

    def partition(
        self, devices: Sequence[DeviceInfo], agents: Sequence[str]
    ) -> PartitionInfo | None:
        return PartitionInfo({agents[0]: [device.id for device in devices[:1]]})


class ListsSlowly(Good):
    """A generator, which does its waiting when it is read."""

    def list_devices(self) -> Sequence[DeviceInfo]:
        wait_for(self.settings)
        yield from super().list_devices()  # type: ignore[misc]


class MadeSlowly(Good):
    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        wait_for(settings)
        super().__init__(name, settings)


class Moody(Good):
    """At `open` it does what the file in PLUGIN_MOOD says; no table is needed to tell it.

    `slow` raises as soon as the file says something else.
    """

    def _mood(self) -> str:
        return Path(os.environ["PLUGIN_MOOD"]).read_text().strip()

    def open(self) -> None:
        mood = self._mood()
        if mood == "absent":
            raise NotPresent("none on the bus")
        while mood == "slow" and self._mood() == "slow":
            time.sleep(0.01)
        if mood in ("raise", "slow"):
            raise RuntimeError("the driver is not loaded")
        if mood == "hang":
            time.sleep(1000)
        if mood == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        self._lies = mood == "lie"

    def list_devices(self) -> Sequence[DeviceInfo]:
        (device,) = super().list_devices()
        return [device, device] if self._lies else [device]
