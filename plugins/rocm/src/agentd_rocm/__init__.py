"""AMD GPUs: whole (`rocm.device`) or in shares (`rocm.shares`).

`rocm0` is for people. The identity is the number that the kernel's driver tells of the chip
(`unique_id` in sysfs), or else the PCI address, which is an alias otherwise. A kernel gets
`/dev/kfd`, the render nodes of its GPUs and the group that owns them; the GPUs are numbered
from zero inside a container, where only they are visible, and named outside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from agentd.plugin_api import (
    AcceleratorPlugin,
    AllocatedDevice,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    Features,
    Measurement,
    SettingProblem,
    SlotTypeInfo,
    unknown_settings,
)
from agentd_rocm import smi

_KEYS = ("mode", "quantum", "groups", "sysfs")
_MODES = ("device", "shares")
_QUANTUM = re.compile(r"1(?:\.0+)?|0\.[0-9]{1,6}")
_KFD = "/dev/kfd"


class RocmPlugin(AcceleratorPlugin):
    """GPUs as AMD SMI lists them."""

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        problems = unknown_settings(settings, _KEYS)
        if settings.get("mode", "device") not in _MODES:
            why = f"{settings['mode']!r} is no mode; allowed: {', '.join(_MODES)}"
            problems.append(SettingProblem("mode", why))
        quantum = str(settings.get("quantum", "1"))
        if not _QUANTUM.fullmatch(quantum) or not Decimal(quantum):
            why = f'{quantum!r} is no quantum; allowed: more than 0 and at most 1, such as "0.01"'
            problems.append(SettingProblem("quantum", why))
        groups = settings.get("groups", [])
        if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
            problems.append(SettingProblem("groups", 'allowed: a list such as ["render"]'))
        return problems

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(name, settings)
        self._sysfs = Path(settings.get("sysfs", "/sys")) / "bus/pci/devices"

    def open(self) -> None:
        smi.initialise()

    def close(self) -> None:
        smi.shut_down()

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        mode = self._mode
        quantum = str(self.settings.get("quantum", "1" if mode == "device" else "0.01"))
        return [SlotTypeInfo(f"{self.name}.{mode}", "count", quantum, "mode", unit="GPU")]

    @property
    def _mode(self) -> str:
        return str(self.settings.get("mode", "device"))

    def list_devices(self) -> Sequence[DeviceInfo]:
        return [
            DeviceInfo(
                id=f"{self.name}{gpu.index}",
                stable_id=self._identity(gpu.pci),
                slot=f"{self.name}.{self._mode}",
                aliases=[gpu.pci] if self._unique_id(gpu.pci) else [],
                model=gpu.model,
                numa_node=self._numa_node(gpu.pci),
                attributes={"memory": str(gpu.memory_bytes), "pci": gpu.pci},
            )
            for gpu in smi.gpus()
        ]

    def _identity(self, pci: str) -> str:
        unique = self._unique_id(pci)
        return f"GPU-{unique}" if unique else pci

    def _unique_id(self, pci: str) -> str:
        text = self._text(pci, "unique_id")
        return text if re.fullmatch(r"[0-9a-f]{16}", text) and int(text, 16) else ""

    def _numa_node(self, pci: str) -> int | None:
        text = self._text(pci, "numa_node")
        return int(text) if text.isdigit() else None

    def _text(self, pci: str, name: str) -> str:
        try:
            return (self._sysfs / pci / name).read_text(encoding="ascii").strip().lower()
        except OSError:
            return ""

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        if not allocation:
            return ContainerEdits(env={"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
        there = {self._identity(gpu.pci): gpu for gpu in smi.gpus()}
        if missing := [device.id for device in allocation if device.stable_id not in there]:
            raise LookupError(f"{', '.join(missing)} does not answer")
        given = [there[device.stable_id] for device in allocation]
        if features.runtime == "process":
            return ContainerEdits(env={"ROCR_VISIBLE_DEVICES": ",".join(map(self._named, given))})
        nodes = [_KFD, *(self._render_node(gpu.pci, gpu.index) for gpu in given)]
        visible = ",".join(str(place) for place in range(len(given)))
        return ContainerEdits(
            env={"ROCR_VISIBLE_DEVICES": visible},
            device_nodes=tuple(DeviceNode(node, node) for node in nodes),
            groups=tuple(self.settings.get("groups", ["render"])),
        )

    def _named(self, gpu: smi.Gpu) -> str:
        """Return how the runtime names a GPU from outside: its serial number, or its place."""
        unique = self._unique_id(gpu.pci)
        return f"GPU-{unique}" if unique else str(gpu.index)

    def _render_node(self, pci: str, index: int) -> str:
        nodes = sorted((self._sysfs / pci / "drm").glob("renderD*"))
        if not nodes:
            raise LookupError(f"{self.name}{index} ({pci}) has no render node in sysfs")
        return f"/dev/dri/{nodes[0].name}"

    def measure(self) -> Sequence[Measurement]:
        loads = [(gpu, smi.load_of(gpu.index)) for gpu in smi.gpus()]
        return [
            Measurement(
                self._identity(gpu.pci),
                load.utilization,
                load.used_bytes,
                load.total_bytes,
                load.temperature,
                load.power,
            )
            for gpu, load in loads
        ]
