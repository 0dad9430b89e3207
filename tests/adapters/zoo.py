"""Plugins that behave, and many that do not; entry points of the tests name them."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentd.plugin_api import (
    AcceleratorPlugin,
    AllocatedDevice,
    ContainerEdits,
    DeviceInfo,
    Features,
    SettingProblem,
    SlotTypeInfo,
)

release = threading.Event()


class Good(AcceleratorPlugin):
    """One device; knows one setting."""

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        return [SettingProblem(key, "unknown key") for key in settings if key != "speed"]

    def open(self) -> None: ...

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        return [SlotTypeInfo(f"{self.name}.device")]

    def list_devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(f"{self.name}0", f"S-{self.name}", f"{self.name}.device")]

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        return ContainerEdits(env={self.name.upper(): ",".join(d.id for d in allocation)})


class NeedsTable(Good):
    needs_table: ClassVar[bool] = True


class OldApi(Good):
    api_version: ClassVar[int] = 0


class RaisesAtOpen(Good):
    def open(self) -> None:
        raise RuntimeError("no driver\nhere")


class ExitsAtOpen(Good):
    def open(self) -> None:
        raise SystemExit(3)


class StopsIteration(Good):
    def open(self) -> None:
        raise StopIteration


class RaisesAtList(Good):
    def list_devices(self) -> Sequence[DeviceInfo]:
        raise OSError("device lost")


class Late(Good):
    def open(self) -> None:
        release.wait(20)


class OutsidePrefix(Good):
    def slot_types(self) -> Sequence[SlotTypeInfo]:
        return [SlotTypeInfo("cpu")]


def lying(name: str, **changes: Any) -> type[Good]:
    """A plugin whose one device is not as it should be."""

    def list_devices(self: Good) -> Sequence[DeviceInfo]:
        info = {"id": "d0", "stable_id": "S-0", "slot": f"{self.name}.device", **changes}
        return [DeviceInfo(**info)] * changes.pop("times", 1)

    return type(name, (Good,), {"list_devices": list_devices})


NegativeAmount = lying("NegativeAmount", capacity="-1")
NanAmount = lying("NanAmount", capacity="NaN")
HugeAmount = lying("HugeAmount", capacity="9" * 40)
OddId = lying("OddId", id="a/b c")
UnknownSlot = lying("UnknownSlot", slot="x.y")
BadHealth = lying("BadHealth", health="so-so")


class Twice(Good):
    def list_devices(self) -> Sequence[DeviceInfo]:
        return [*super().list_devices(), *super().list_devices()]


class ListsNonsense(Good):
    def list_devices(self) -> Sequence[DeviceInfo]:
        return ["cuda0"]  # type: ignore[list-item]


NotAPlugin = 42


OddParent = lying("OddParent", parent=5)
OddAliases = lying("OddAliases", aliases="GPU")
OddNode = lying("OddNode", numa_node=-1)


class OddEdits(Good):
    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        return ContainerEdits(env={1: 2})  # type: ignore[dict-item]


class ListsSlowly(Good):
    """A generator, which does its waiting when it is read."""

    def list_devices(self) -> Sequence[DeviceInfo]:
        release.wait(20)
        yield from super().list_devices()  # type: ignore[misc]


class MadeSlowly(Good):
    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        release.wait(20)
        super().__init__(name, settings)
