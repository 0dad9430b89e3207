"""AMD GPUs: whole (`rocm.device`) or in shares (`rocm.shares`).

`rocm0` is for people. The identity is the driver's number of the chip (`unique_id` in sysfs), or
else the PCI address, which is an alias otherwise. A kernel gets `/dev/kfd`, the render nodes of its
GPUs and the groups that own them. The GPUs are numbered from zero in a container, where only they
are visible, and named outside.

A GPU in compute partitions is several processors with one PCI address, each with a render node; the
second and later ones are identified by their index on it. Partitions have slots of their own, such
as `rocm.device:cpx_nps4`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentd.plugin_api import (
    MODE_KEYS,
    AcceleratorPlugin,
    AllocatedDevice,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    Features,
    Measurement,
    NotPresent,
    SettingProblem,
    SlotTypeInfo,
    group_id,
    log_once,
    memory_offered,
    mode_problems,
    mode_slots,
    on_pci_bus,
    primary_slot,
    unknown_settings,
)
from agentd_rocm import smi

_KEYS = (*MODE_KEYS, "groups", "sysfs")
_PARTITION = re.compile(r"[a-z]{2,4}[0-9]?")
_KFD = "/dev/kfd"
_VENDOR = "1002"


class RocmPlugin(AcceleratorPlugin):
    """GPUs as AMD SMI lists them."""

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        problems = unknown_settings(settings, _KEYS) + mode_problems(settings)
        groups = settings.get("groups", [])
        if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
            problems.append(SettingProblem("groups", 'expected a list such as ["render"]'))
        if not isinstance(settings.get("sysfs", ""), str):
            problems.append(SettingProblem("sysfs", "expected the path of a folder"))
        if settings.get("memory-slot") is True and settings.get("mode") != "shares":
            problems.append(SettingProblem("memory-slot", 'needs mode = "shares"'))
        return problems

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(name, settings)
        self._sysfs_root = Path(settings.get("sysfs", "/sys"))
        self._sysfs = self._sysfs_root / "bus/pci/devices"
        self._last: dict[int, smi.AmdGpu] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._unreadable: dict[str, str] = {}

    def open(self) -> None:
        found = on_pci_bus(_VENDOR, sysfs=self._sysfs_root)
        seen = f"; on the PCI bus: {', '.join(found)}" if found else ""
        try:
            smi.initialise()
        except smi.NoLibraryError as error:
            if not found:
                raise NotPresent(f"no AMD GPU on the PCI bus, and {error}") from None
            raise RuntimeError(f"no AMD driver: {error}{seen}") from None
        except RuntimeError as error:
            raise RuntimeError(f"{error}{seen}") from None

    def close(self) -> None:
        smi.shut_down()

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        partitions = {self._slot(gpu) for gpu in self._gpus()} - {self._whole_slot}
        return [
            *mode_slots(self.name, self.settings, unit="GPU"),
            *(SlotTypeInfo(slot, exclusive_group="mode") for slot in sorted(partitions)),
        ]

    def _slot(self, gpu: smi.AmdGpu) -> str:
        """Return the slot of a GPU; a partition's is named as in AMD's own k8s-device-plugin.

        The driver reports the partitioning of a GPU, in compute and in memory
        (https://docs.kernel.org/gpu/amdgpu/driver-misc.html).
        """
        compute = self._text(gpu.pci, "current_compute_partition")
        memory = self._text(gpu.pci, "current_memory_partition")
        if not _PARTITION.fullmatch(compute) or compute == "spx":
            return self._whole_slot
        return f"{self.name}.device:{compute}_{memory if _PARTITION.fullmatch(memory) else 'nps1'}"

    @property
    def _whole_slot(self) -> str:
        return primary_slot(self.name, self.settings)

    def _gpus(self) -> list[smi.AmdGpu]:
        """Return the GPUs, without those whose serial number cannot be read and never was."""
        self._unreadable.clear()
        gpus = []
        for gpu in smi.gpus(self._last):
            self._text(gpu.pci, "unique_id")
            why = self._unreadable.get(gpu.pci)
            if why is None or (gpu.pci, "unique_id") in self._texts:
                gpus.append(gpu)
            else:
                log_once(f"{gpu.pci} is left out: {why}")
        return gpus

    def list_devices(self) -> Sequence[DeviceInfo]:
        found = []
        for gpu in self._gpus():
            node, slot = self._render_node(gpu), self._slot(gpu)
            whole, stable_id = self._whole(gpu), self._identity(gpu, slot)
            numa_node = self._numa_node(gpu.pci)
            trouble = self._trouble(gpu, node)
            found.append(
                DeviceInfo(
                    id=f"{self.name}{gpu.index}",
                    stable_id=stable_id,
                    slot=slot,
                    aliases=[gpu.pci] if stable_id == whole != gpu.pci else [],
                    parent=None if slot == self._whole_slot else whole,
                    model=gpu.model,
                    numa_node=numa_node,
                    health="unhealthy" if trouble else "healthy",
                    reason=trouble,
                    attributes={"memory": str(gpu.memory_bytes), "pci": gpu.pci},
                    secondary=self._secondary(gpu, slot),
                )
            )
        return found

    def _trouble(self, gpu: smi.AmdGpu, node: str | None) -> str:
        if not node:
            return f"{gpu.pci} has no render node in sysfs"
        if self.settings.get("memory-slot") and not gpu.memory_bytes:
            return "AMD SMI does not tell its memory"
        return gpu.trouble or self._unreadable.get(gpu.pci, "")

    def _secondary(self, gpu: smi.AmdGpu, slot: str) -> dict[str, str]:
        if slot != self._whole_slot:
            return {}
        return memory_offered(self.name, self.settings, gpu.memory_bytes)

    def _whole(self, gpu: smi.AmdGpu) -> str:
        unique = self._unique_id(gpu.pci)
        return f"GPU-{unique}" if unique else gpu.pci

    def _identity(self, gpu: smi.AmdGpu, slot: str) -> str:
        is_part = gpu.place or slot != self._whole_slot
        return f"{self._whole(gpu)}-p{gpu.place}" if is_part else self._whole(gpu)

    def _unique_id(self, pci: str) -> str:
        text = self._text(pci, "unique_id")
        return text if re.fullmatch(r"[0-9a-f]{16}", text) and int(text, 16) else ""

    def _numa_node(self, pci: str) -> int | None:
        text = self._text(pci, "numa_node")
        return int(text) if text.isdigit() else None

    def _text(self, pci: str, name: str) -> str:
        """Return the content of a file of a GPU, empty without one.

        A file that cannot be read any more is as it was last: the driver refuses some while it
        resets a GPU.
        """
        try:
            text = (self._sysfs / pci / name).read_text(encoding="ascii").strip().lower()
        except OSError as error:
            if (pci, name) in self._texts or not isinstance(error, FileNotFoundError):
                self._unreadable[pci] = f"{name} cannot be read: {error.strerror}"
            return self._texts.get((pci, name), "")
        self._texts[pci, name] = text
        return text

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        if not allocation:
            return ContainerEdits(env={"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
        there = {self._identity(gpu, self._slot(gpu)): gpu for gpu in self._gpus()}
        if missing := [device.id for device in allocation if device.stable_id not in there]:
            raise LookupError(f"no answer from {', '.join(missing)}")
        given = [there[device.stable_id] for device in allocation]
        places = ",".join(str(place) for place in range(len(given)))
        nodes = [_KFD, *filter(None, (self._render_node(gpu) for gpu in given))]
        if len(nodes) <= len(given):
            raise LookupError(f"{', '.join(d.id for d in allocation)}: no render node in sysfs")
        groups = self.settings.get("groups", [])
        numbers = [*map(group_id, groups)] if groups else _owners(nodes)
        # A container has only its own GPUs; outside all are visible and are named.
        named = places if features.runtime == "docker" else ",".join(map(self._named, given))
        return ContainerEdits(
            env={"ROCR_VISIBLE_DEVICES": named, "HIP_VISIBLE_DEVICES": places},
            device_nodes=tuple(DeviceNode(node, node) for node in nodes),
            groups=tuple(numbers),
        )

    def _named(self, gpu: smi.AmdGpu) -> str:
        """Return the runtime's name of a GPU outside of containers: its serial number or index."""
        unique = self._unique_id(gpu.pci)
        return f"GPU-{unique}" if unique and not gpu.place else str(gpu.index)

    def _render_node(self, gpu: smi.AmdGpu) -> str | None:
        names = sorted(path.name for path in (self._sysfs / gpu.pci / "drm").glob("renderD*"))
        return f"/dev/dri/{names[gpu.place]}" if gpu.place < len(names) else None

    def measure(self) -> Sequence[Measurement]:
        gpus = self._gpus()
        return [smi.measurement(gpu.index, self._identity(gpu, self._slot(gpu))) for gpu in gpus]


def _owners(nodes: Sequence[str]) -> list[str]:
    """Return the numbers of the groups that own device files, except root's."""
    found = []
    for node in nodes:
        try:
            found.append(Path(node).stat().st_gid)
        except OSError:
            continue
    return [str(number) for number in dict.fromkeys(found) if number]
