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
        self._last_texts: dict[tuple[str, str], str] = {}
        self._unreadable: dict[str, str] = {}

    def open(self) -> None:
        addresses = on_pci_bus(_VENDOR, sysfs=self._sysfs_root)
        on_bus = f"; on the PCI bus: {', '.join(addresses)}" if addresses else ""
        try:
            smi.initialise()
        except smi.NoLibraryError as error:
            if not addresses:
                raise NotPresent(f"no AMD GPU on the PCI bus, and {error}") from None
            raise RuntimeError(f"no AMD driver: {error}{on_bus}") from None
        except RuntimeError as error:
            raise RuntimeError(f"{error}{on_bus}") from None

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
        compute = self._read_text(gpu.pci, "current_compute_partition")
        memory = self._read_text(gpu.pci, "current_memory_partition")
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
        for gpu in smi.list_gpus(self._last):
            self._read_text(gpu.pci, "unique_id")
            reason = self._unreadable.get(gpu.pci)
            if reason is None or (gpu.pci, "unique_id") in self._last_texts:
                gpus.append(gpu)
            else:
                log_once(f"{gpu.pci} is left out: {reason}")
        return gpus

    def list_devices(self) -> Sequence[DeviceInfo]:
        devices = []
        for gpu in self._gpus():
            node, slot = self._render_node(gpu), self._slot(gpu)
            whole, stable_id = self._physical_id(gpu), self._stable_id(gpu, slot)
            numa_node = self._numa_node(gpu.pci)
            problem = self._health_problem(gpu, node)
            devices.append(
                DeviceInfo(
                    id=f"{self.name}{gpu.index}",
                    stable_id=stable_id,
                    slot=slot,
                    aliases=[gpu.pci] if stable_id == whole != gpu.pci else [],
                    parent=None if slot == self._whole_slot else whole,
                    model=gpu.model,
                    numa_node=numa_node,
                    health="unhealthy" if problem else "healthy",
                    reason=problem,
                    attributes={"memory": str(gpu.memory_bytes), "pci": gpu.pci},
                    secondary=self._secondary_slots(gpu, slot),
                )
            )
        return devices

    def _health_problem(self, gpu: smi.AmdGpu, node: str | None) -> str:
        if not node:
            return f"{gpu.pci} has no render node in sysfs"
        if self.settings.get("memory-slot") and not gpu.memory_bytes:
            return "AMD SMI does not tell its memory"
        return gpu.problem or self._unreadable.get(gpu.pci, "")

    def _secondary_slots(self, gpu: smi.AmdGpu, slot: str) -> dict[str, str]:
        if slot != self._whole_slot:
            return {}
        return memory_offered(self.name, self.settings, gpu.memory_bytes)

    def _physical_id(self, gpu: smi.AmdGpu) -> str:
        unique = self._unique_id(gpu.pci)
        return f"GPU-{unique}" if unique else gpu.pci

    def _stable_id(self, gpu: smi.AmdGpu, slot: str) -> str:
        is_part = gpu.partition_index or slot != self._whole_slot
        return (
            f"{self._physical_id(gpu)}-p{gpu.partition_index}"
            if is_part
            else self._physical_id(gpu)
        )

    def _unique_id(self, pci: str) -> str:
        text = self._read_text(pci, "unique_id")
        return text if re.fullmatch(r"[0-9a-f]{16}", text) and int(text, 16) else ""

    def _numa_node(self, pci: str) -> int | None:
        text = self._read_text(pci, "numa_node")
        return int(text) if text.isdigit() else None

    def _read_text(self, pci: str, name: str) -> str:
        """Return the content of a file of a GPU, empty without one.

        A file that became unreadable has its last content: the driver refuses some while it resets
        a GPU.
        """
        try:
            text = (self._sysfs / pci / name).read_text(encoding="ascii").strip().lower()
        except OSError as error:
            if (pci, name) in self._last_texts or not isinstance(error, FileNotFoundError):
                self._unreadable[pci] = f"{name} cannot be read: {error.strerror}"
            return self._last_texts.get((pci, name), "")
        self._last_texts[pci, name] = text
        return text

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        if not allocation:
            return ContainerEdits(env={"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
        gpu_by_id = {self._stable_id(gpu, self._slot(gpu)): gpu for gpu in self._gpus()}
        if missing := [device.id for device in allocation if device.stable_id not in gpu_by_id]:
            raise LookupError(f"no answer from {', '.join(missing)}")
        gpus = [gpu_by_id[device.stable_id] for device in allocation]
        indices = ",".join(str(index) for index in range(len(gpus)))
        nodes = [_KFD, *filter(None, (self._render_node(gpu) for gpu in gpus))]
        if len(nodes) <= len(gpus):
            raise LookupError(f"{', '.join(d.id for d in allocation)}: no render node in sysfs")
        groups = self.settings.get("groups", [])
        numbers = [*map(group_id, groups)] if groups else _owner_groups(nodes)
        # A container has only its own GPUs; outside all are visible and are named.
        visible = (
            indices if features.runtime == "docker" else ",".join(map(self._runtime_name, gpus))
        )
        return ContainerEdits(
            env={"ROCR_VISIBLE_DEVICES": visible, "HIP_VISIBLE_DEVICES": indices},
            device_nodes=tuple(DeviceNode(node, node) for node in nodes),
            groups=tuple(numbers),
        )

    def _runtime_name(self, gpu: smi.AmdGpu) -> str:
        """Return the runtime's name of a GPU outside of containers: its serial number or index."""
        unique = self._unique_id(gpu.pci)
        return f"GPU-{unique}" if unique and not gpu.partition_index else str(gpu.index)

    def _render_node(self, gpu: smi.AmdGpu) -> str | None:
        names = sorted(path.name for path in (self._sysfs / gpu.pci / "drm").glob("renderD*"))
        return (
            f"/dev/dri/{names[gpu.partition_index]}" if gpu.partition_index < len(names) else None
        )

    def measure(self) -> Sequence[Measurement]:
        gpus = self._gpus()
        return [smi.measure_gpu(gpu.index, self._stable_id(gpu, self._slot(gpu))) for gpu in gpus]


def _owner_groups(nodes: Sequence[str]) -> list[str]:
    """Return the numbers of the groups that own device files, except root's."""
    groups = []
    for node in nodes:
        try:
            groups.append(Path(node).stat().st_gid)
        except OSError:
            continue
    return [str(number) for number in dict.fromkeys(groups) if number]
