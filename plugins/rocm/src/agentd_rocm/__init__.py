"""AMD GPUs: whole (`rocm.device`) or in shares (`rocm.shares`).

`rocm0` is for people. The identity is the driver's number of the chip (`unique_id` in sysfs), or
else the PCI address, which is an alias otherwise. A kernel gets `/dev/kfd`, the render nodes of its
GPUs and the groups that own them. The GPUs are numbered from zero in a container, where only they
are visible, and named outside.

A GPU in compute partitions is several processors of one PCI device, each with a render node; they
are identified by their index on it. Partitions have slots of their own, such as
`rocm.device:cpx_nps4`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentd.plugin_api import (
    MODE_KEYS,
    AcceleratorPlugin,
    AllocatedDevice,
    ConditionInfo,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    DeviceRead,
    DeviceReads,
    Features,
    Measurement,
    NotPresent,
    SettingProblem,
    SlotTypeInfo,
    group_id,
    guard_each,
    memory_offered,
    mode_problems,
    mode_slots,
    on_pci_bus,
    primary_slot,
    unknown_settings,
)
from agentd_rocm import kfd, smi
from agentd_rocm.smi import GpuRefusedError

_KEYS = (*MODE_KEYS, "groups", "sysfs")
_PARTITION = re.compile(r"[a-z]{2,4}[0-9]?")
_SERIAL = re.compile(r"GPU-(?!0{16})[0-9a-f]{16}")
_COMPUTE = "current_compute_partition"
_KFD = "/dev/kfd"
_VENDOR = "1002"


class AmdGpu(msgspec.Struct, frozen=True):
    """A GPU, or a partition of one."""

    pci: str
    slot: str
    model: str
    memory_bytes: int
    numa_node: int | None
    render_node: str
    """Empty if Linux has none for it."""
    runtime_name: str
    """Its serial number or index in ROCm's runtime, where all GPUs are visible."""


class _Place(NamedTuple):
    """The PCI address of a processor, and its index among those with this address."""

    pci: str
    partition: int


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
        self._reads = DeviceReads[int, AmdGpu]("GPU", GpuRefusedError)
        self._listed: Sequence[DeviceRead[int, AmdGpu]] = ()
        self._addresses: dict[int, str] = {}
        self._places: dict[int, _Place] = {}
        self._refusals: Mapping[int, str] = {}
        self._processors: Mapping[str, Sequence[kfd.Processor]] = {}
        self._files_read: set[Path] = set()

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
        slots = {device.state.slot for device in self._read() if device.state}
        return [
            *mode_slots(self.name, self.settings, unit="GPU"),
            *(
                SlotTypeInfo(slot, exclusive_group="mode")
                for slot in sorted(slots - {self._whole_slot})
            ),
        ]

    @property
    def _whole_slot(self) -> str:
        return primary_slot(self.name, self.settings)

    def _read(self) -> list[DeviceRead[int, AmdGpu]]:
        self._processors = kfd.read_processors(self._sysfs_root)
        self._places, self._refusals = self._locate()
        return self._reads.read(range(smi.count_gpus()), self._identify, self._read_gpu)

    def _locate(self) -> tuple[dict[int, _Place], dict[int, str]]:
        """Return the places of processors, and the refusals to tell an address.

        A processor that refuses has its last address, or the one that KFD leaves for it.
        """
        indices = range(smi.count_gpus())
        reported, refused = guard_each(indices, smi.read_address, GpuRefusedError)
        for index, address in reported.items():
            self._addresses[index] = kfd.real_address(address, self._sysfs_root)
        addresses = self._addresses
        in_order = [pci for pci in sorted(self._processors) for _ in self._processors[pci]]
        if len(in_order) == len(indices) and all(
            in_order[index] == address for index, address in addresses.items()
        ):
            addresses = dict(enumerate(in_order))
        places, partitions = {}, Counter[str]()
        for index in sorted(addresses):
            places[index] = _Place(addresses[index], partitions[addresses[index]])
            partitions[addresses[index]] += 1
        return places, refused

    def _identify(self, index: int) -> str:
        """Return a GPU's serial number or PCI address, for a partition with its index."""
        if index not in self._places:
            raise GpuRefusedError(self._refusals[index])
        pci, partition = self._places[index]
        physical = self._serial(pci) or pci
        try:
            is_part = partition > 0 or self._is_partitioned(pci)
        except GpuRefusedError:
            if self._sysfs / pci / _COMPUTE in self._files_read:
                raise
            is_part = False  # agentd knows its form from earlier
        return f"{physical}-p{partition}" if is_part else physical

    def _serial(self, pci: str) -> str:
        """Return the serial number of a GPU, as ROCm's runtime writes it; empty if it has none."""
        serial = f"GPU-{self._read_text(pci, 'unique_id')}"
        return serial if _SERIAL.fullmatch(serial) else ""

    def _read_gpu(self, index: int, last: AmdGpu | None) -> AmdGpu:
        if index in self._refusals:
            raise GpuRefusedError(self._refusals[index])
        pci, partition = self._places[index]
        numa_node = self._read_text(pci, "numa_node")
        try:
            memory = smi.read_memory(index)
        except smi.NotReportedError:
            if self.settings.get("memory-slot") or (last and last.memory_bytes):
                raise
            memory = 0
        processors = self._processors.get(pci, ())
        processor = processors[partition] if partition < len(processors) else None
        render_nodes = sorted(path.name for path in (self._sysfs / pci / "drm").glob("renderD*"))
        render_node = f"/dev/dri/{render_nodes[0]}" if render_nodes and not partition else ""
        return AmdGpu(
            pci=pci,
            slot=self._slot(pci),
            model=smi.read_model(index) or (last.model if last else ""),
            memory_bytes=memory,
            numa_node=int(numa_node) if numa_node.isdigit() else None,
            render_node=render_node or (processor.render_node if processor else ""),
            runtime_name=processor.runtime_name
            if processor
            else (not partition and self._serial(pci)) or str(index),
        )

    def _slot(self, pci: str) -> str:
        """Return the slot of a GPU; a partition's is named as in AMD's own k8s-device-plugin.

        The driver reports the partitioning of a GPU, in compute and in memory
        (https://docs.kernel.org/gpu/amdgpu/driver-misc.html).
        """
        memory = self._read_text(pci, "current_memory_partition")
        if not self._is_partitioned(pci):
            return self._whole_slot
        compute = self._read_text(pci, _COMPUTE)
        return f"{self.name}.device:{compute}_{memory if _PARTITION.fullmatch(memory) else 'nps1'}"

    def _is_partitioned(self, pci: str) -> bool:
        compute = self._read_text(pci, _COMPUTE)
        return compute != "spx" and _PARTITION.fullmatch(compute) is not None

    def _read_text(self, pci: str, name: str) -> str:
        """Return the content of a file of a GPU, empty if the GPU never had it.

        Raises:
            GpuRefusedError: it is unreadable: the driver refuses some while it resets a GPU.
        """
        file = self._sysfs / pci / name
        try:
            text = file.read_text(encoding="ascii").strip().lower()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and file not in self._files_read:
                return ""
            raise GpuRefusedError(f"{name} cannot be read: {error.strerror}") from None
        self._files_read.add(file)
        return text

    def list_devices(self) -> Sequence[DeviceInfo]:
        self._listed = self._read()
        return [self._device_info(device) for device in self._listed]

    def _device_info(self, device: DeviceRead[int, AmdGpu]) -> DeviceInfo:
        identity, gpu = device.identity, device.state
        parent = identity.rpartition("-p")[0] or None
        info = DeviceInfo(
            f"{self.name}{device.key}",
            stable_id=identity,
            slot=self._whole_slot,
            parent=parent,
            health="unhealthy",
            reason=device.problem,
        )
        if gpu is None:
            return info
        problem = device.problem or self._health_problem(gpu)
        secondary = memory_offered(self.name, self.settings, gpu.memory_bytes)
        return replace(
            info,
            slot=gpu.slot,
            aliases=[] if parent or identity == gpu.pci else [gpu.pci],
            parent_aliases=[gpu.pci] if parent not in (None, gpu.pci) else [],
            model=gpu.model,
            numa_node=gpu.numa_node,
            health="unhealthy" if problem else "healthy",
            reason=problem,
            attributes={"memory": str(gpu.memory_bytes), "pci": gpu.pci},
            secondary=secondary if gpu.slot == self._whole_slot else {},
            files=[gpu.render_node] if gpu.render_node else [],
        )

    def _health_problem(self, gpu: AmdGpu) -> str:
        if not gpu.render_node:
            return f"{gpu.pci} has no render node in sysfs"
        if self.settings.get("memory-slot") and not gpu.memory_bytes:
            return "AMD SMI does not tell its memory"
        return ""

    def conditions(self) -> Sequence[ConditionInfo]:
        return [
            *(ConditionInfo(reason) for reason in self._reads.describe_unidentified()),
            *self._missing_gpus(),
            *self._unusable_files(),
        ]

    def _missing_gpus(self) -> Iterator[ConditionInfo]:
        """Yield the GPUs that Linux has and AMD SMI lacks, but for those of virtual machines."""
        listed = Counter(place.pci for place in self._places.values())
        for pci in on_pci_bus(_VENDOR, sysfs=self._sysfs_root):
            driver = self._sysfs / pci / "driver"
            if pci not in listed and driver.resolve().name != "vfio-pci":
                reason = f"GPU {pci} is on the PCI bus, and AMD SMI does not list it"
                yield ConditionInfo(reason, "look for amdgpu in the log of Linux")
        for pci, count in listed.items():
            if count < (expected := len(self._processors.get(pci, ()))):
                reason = f"GPU {pci} has {expected} partitions, and AMD SMI lists {count}"
                yield ConditionInfo(reason, "restart agentd")

    def _unusable_files(self) -> Iterator[ConditionInfo]:
        """Yield the device files that kernels lack, and those that agentd may not open."""
        nodes = [device.state.render_node for device in self._listed if device.state]
        files = [_KFD, *filter(None, nodes)]
        missing = [file for file in files if not Path(file).exists()]
        refused = [
            file for file in files if file not in missing and not os.access(file, os.R_OK | os.W_OK)
        ]
        if missing and self._sysfs_root == Path("/sys"):  # not the tree of another host
            reason = f"device files that kernels need are missing: {_join_first(missing)}"
            yield ConditionInfo(reason, "look for amdgpu in the log of Linux")
        if refused:
            reason = f"agentd and its process kernels may not open {_join_first(refused)}"
            yield ConditionInfo(reason, "add its user to the group of the file")

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        if not allocation:
            return ContainerEdits(env={"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
        gpu_by_id = {device.identity: device.state for device in self._read()}
        gpus = [gpu for device in allocation if (gpu := gpu_by_id.get(device.stable_id))]
        if missing := [device.id for device in allocation if not gpu_by_id.get(device.stable_id)]:
            raise LookupError(f"no answer from {', '.join(missing)}")
        indices = ",".join(str(index) for index in range(len(gpus)))
        nodes = [_KFD, *filter(None, (gpu.render_node for gpu in gpus))]
        if len(nodes) <= len(gpus):
            raise LookupError(f"{', '.join(d.id for d in allocation)}: no render node in sysfs")
        groups = self.settings.get("groups", [])
        numbers = [*map(group_id, groups)] if groups else _owner_groups(nodes)
        # A container has only its own GPUs, and a unit sees only those. A process sees all.
        names = [gpu.runtime_name for gpu in gpus]
        has_serials = all(map(_SERIAL.fullmatch, names))
        is_named = features.runtime == "process" or (features.runtime != "docker" and has_serials)
        visible = ",".join(names) if is_named else indices
        return ContainerEdits(
            env={"ROCR_VISIBLE_DEVICES": visible, "HIP_VISIBLE_DEVICES": indices},
            device_nodes=tuple(DeviceNode(node, node) for node in nodes),
            groups=tuple(numbers),
        )

    def measure(self) -> Sequence[Measurement]:
        return [smi.measure_gpu(device.key, device.identity) for device in self._listed]


def _owner_groups(nodes: Sequence[str]) -> list[str]:
    """Return the numbers of the groups that own device files, except root's."""
    groups = []
    for node in nodes:
        try:
            groups.append(Path(node).stat().st_gid)
        except OSError:
            continue
    return [str(number) for number in dict.fromkeys(groups) if number]


def _join_first(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
