"""NVIDIA GPUs: whole (`cuda.device`), in shares (`cuda.shares`), or as MIG parts.

`cuda0` is for people. The UUID is the identity, so a new order after a reboot changes nothing, and
the PCI address is an alias. A GPU in MIG mode offers only its parts, each a unique slot such as
`cuda.device:1g.10gb-mig`.

Health: an Xid event makes a GPU unhealthy, unless it is one that jobs cause. If the driver reports
the required recovery, that decides, and the GPU is healthy again once none is required. Otherwise
it stays unhealthy until the plugin's process restarts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pynvml

from agentd.plugin_api import (
    MODE_KEYS,
    AcceleratorPlugin,
    AllocatedDevice,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    DeviceRequest,
    Features,
    Measurement,
    NotPresent,
    PartitionInfo,
    SettingProblem,
    SlotTypeInfo,
    dealt_by_slots,
    log_once,
    memory_offered,
    mode_problems,
    mode_slots,
    on_pci_bus,
    primary_slot,
    unknown_settings,
)
from agentd_cuda import cdi, links, mps, nvml
from agentd_cuda.files import device_files

_KEYS = (*MODE_KEYS, "ignored-xids", "sysfs", *mps.KEYS)
_VENDOR = "10de"
APPLICATION_XIDS = (13, 31, 43, 45, 68, 109)
"""Xids that a job causes and the GPU survives; NVIDIA's own k8s-device-plugin ignores them, too."""
XID_HOLDS_S = 60.0
"""Minimum seconds for which an Xid counts, whatever recovery the driver reports."""
_WAIT_MS = 200
"""Longest wait for an event: `nvmlShutdown` blocks until it is over (seen with driver 580)."""


class CudaPlugin(AcceleratorPlugin):
    """GPUs as NVML lists them."""

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        problems = unknown_settings(settings, _KEYS) + mode_problems(settings)
        xids = settings.get("ignored-xids", [])
        if not isinstance(xids, list) or not all(type(xid) is int for xid in xids):
            problems.append(SettingProblem("ignored-xids", "expected a list of Xid numbers"))
        if not isinstance(settings.get("sysfs", ""), str):
            problems.append(SettingProblem("sysfs", "expected the path of a folder"))
        if settings.get("memory-slot") is True and settings.get("mode") != "shares":
            problems.append(SettingProblem("memory-slot", 'needs mode = "shares"'))
        return problems + mps.problems(settings)

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(name, settings)
        self._sysfs = Path(settings.get("sysfs", "/sys"))
        self._ignored_xids = frozenset(settings.get("ignored-xids", APPLICATION_XIDS))
        self._event_set: Any = None
        self._xids: dict[str, tuple[int, float]] = {}
        self._last: dict[int, nvml.Gpu] = {}
        self._uuids: dict[int | None, str] = {}
        self._failed_waits = 0
        self._mps = mps.MpsServer.of(settings)

    def open(self) -> None:
        self._start_nvml()
        if self._mps is not None and (
            problem := self._mps.unavailable_reason() or self._mps_problem()
        ):
            raise RuntimeError(problem)
        try:
            self._event_set = nvml.call_optional(pynvml.nvmlEventSetCreate)
        except pynvml.NVMLError as error:
            log_once(f"no events: {error}")
        for index, handle in nvml.handles() if self._event_set is not None else ():
            try:
                self._register(handle)
            except pynvml.NVMLError as error:
                log_once(f"no events of GPU {index}: {error}")

    def _start_nvml(self) -> None:
        """Start NVML.

        If its library is installed, the bus proves nothing: not every GPU is on PCI.
        """
        addresses = on_pci_bus(_VENDOR, sysfs=self._sysfs)
        on_bus = f"; on the PCI bus: {', '.join(addresses)}" if addresses else ""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            if not addresses:
                reason = "no NVIDIA GPU on the PCI bus, and libnvidia-ml.so.1 is not installed"
                raise NotPresent(reason) from None
            reason = f"no NVIDIA driver: libnvidia-ml.so.1 is not installed{on_bus}"
            raise RuntimeError(reason) from None
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML does not start: {error}{on_bus}") from None

    def _mps_problem(self) -> str:
        reasons = ((index, mps.unsupported_reason(handle)) for index, handle in nvml.handles())
        return "; ".join(f"{self.name}{index}: {reason}" for index, reason in reasons if reason)

    def _register(self, handle: Any) -> None:
        self._uuids[_handle_address(handle)] = pynvml.nvmlDeviceGetUUID(handle)
        supported = nvml.call_optional(pynvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
        if event_types := supported & pynvml.nvmlEventTypeXidCriticalError:
            nvml.call_optional(
                pynvml.nvmlDeviceRegisterEvents, handle, event_types, self._event_set
            )

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        profiles = {part.profile for gpu in self._gpus() for part in gpu.parts}
        return [
            *mode_slots(self.name, self.settings, unit="GPU"),
            *(
                SlotTypeInfo(self._mig_slot(profile), "unique", exclusive_group="mode")
                for profile in sorted(profiles)
            ),
        ]

    def _mig_slot(self, profile: str) -> str:
        """Return a profile's slot; a `+` becomes a `.`, as in NVIDIA's own k8s-device-plugin."""
        return f"{self.name}.device:{profile.replace('+', '.')}-mig"

    def list_devices(self) -> Sequence[DeviceInfo]:
        return [device for gpu in self._gpus() for device in self._devices(gpu)]

    def _devices(self, gpu: nvml.Gpu) -> Sequence[DeviceInfo]:
        problem = self._health_problem(gpu)
        try:
            numa_node = nvml.numa_node(gpu.pci, self._sysfs)
        except OSError as error:
            numa_node = None
            problem = problem or f"its NUMA node cannot be read: {error.strerror}"
        whole = DeviceInfo(
            id=f"{self.name}{gpu.index}",
            stable_id=gpu.uuid,
            slot=primary_slot(self.name, self.settings),
            aliases=[gpu.pci] if gpu.pci else [],
            model=gpu.model,
            numa_node=numa_node,
            health="unhealthy" if problem else "healthy",
            reason=problem,
            attributes={"memory": str(gpu.memory_bytes)},
        )
        if not gpu.is_mig:
            memory = memory_offered(self.name, self.settings, gpu.memory_bytes)
            return [replace(whole, secondary=memory)]
        return [
            replace(
                whole,
                id=f"{whole.id}:{part.index_on_gpu}",
                stable_id=nvml.stable_id(part.uuid),
                slot=self._mig_slot(part.profile),
                aliases=[],
                parent=gpu.uuid,
                health="unhealthy" if problem or part.problem else "healthy",
                reason=problem or part.problem,
                attributes={"memory": str(part.memory_bytes), "profile": part.profile},
            )
            for part in gpu.parts
        ]

    def _gpus(self) -> list[nvml.Gpu]:
        """Read all GPUs; one that does not answer has its last known values, and the reason."""
        gpus: dict[str, nvml.Gpu] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                self._last[index] = gpu = nvml.read_gpu(index, self._last.get(index))
            except pynvml.NVMLError as error:
                log_once(f"GPU {index} is left out; its identity cannot be read: {error}")
            else:
                gpus.setdefault(gpu.uuid, gpu)
        return list(gpus.values())

    def _health_problem(self, gpu: nvml.Gpu) -> str:
        if gpu.problem:
            return gpu.problem
        if self._mps is not None and not gpu.is_mig and (problem := self._mps.unavailable_reason()):
            return problem
        xid, since = self._xids.get(gpu.uuid, (0, 0.0))
        if xid and gpu.reports_recovery and time.monotonic() - since > XID_HOLDS_S:
            del self._xids[gpu.uuid]
            return ""
        return f"Xid {xid}" if xid else ""

    def wait_for_change(self, timeout_s: float) -> bool:
        if self._event_set is None:
            time.sleep(timeout_s)
            return False
        try:
            event = pynvml.nvmlEventSetWait(self._event_set, min(_WAIT_MS, int(timeout_s * 1000)))
        except pynvml.NVMLError_Timeout:
            return False
        except pynvml.NVMLError as error:
            log_once(f"waiting for events fails: {error}")
            self._failed_waits += 1
            time.sleep(min(timeout_s, 2.0**self._failed_waits))
            return self._failed_waits == 1
        self._failed_waits = 0
        uuid = self._uuids.get(_handle_address(event.device))
        xid = int(event.eventData)
        if uuid is None or xid in self._ignored_xids:
            return False
        self._xids[uuid] = (xid, time.monotonic())
        return True

    def partition(
        self, devices: Sequence[DeviceInfo], agents: Sequence[str]
    ) -> PartitionInfo | None:
        handles = {
            self._last[index].uuid: handle
            for index, handle in nvml.handles()
            if index in self._last
        }
        groups = links.close_groups(handles)
        group_of = {uuid: number for number, group in enumerate(groups) for uuid in group}
        return dealt_by_slots(devices, agents, group_of)

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        if self._mps is not None:
            self._mps.require(features.runtime)
        if not allocation:
            return ContainerEdits(
                env={"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""}
            )
        edits = self._gpu_edits(allocation, features)
        shares = [device for device in allocation if device.slot == f"{self.name}.shares"]
        if self._mps is None or not shares:
            return edits
        memory = {gpu.uuid: gpu.memory_bytes for gpu in self._gpus()}
        mps_shares = [
            mps.MpsShare(share, int(device.amounts.get(f"{self.name}.mem", whole * share)))
            for device in shares
            for share, whole in [(Decimal(device.amount), memory.get(device.stable_id, 0))]
        ]
        client = self._mps.edits(mps_shares)
        return replace(edits, env={**edits.env, **client.env}, mounts=client.mounts)

    def _gpu_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        uuids = tuple(_nvidia_uuid(device.stable_id) for device in allocation)
        visible = ",".join(uuids)
        env = {"CUDA_VISIBLE_DEVICES": visible, "NVIDIA_VISIBLE_DEVICES": visible}
        if features.cdi and (names := cdi.resolve_names(uuids, features.cdi_spec_dirs)):
            return ContainerEdits(env={**env, "NVIDIA_VISIBLE_DEVICES": "void"}, cdi=names)
        if features.device_requests:
            return ContainerEdits(env=env, device_requests=(DeviceRequest("nvidia", uuids),))
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if features.runtime == "systemd":  # systemd closes all files that are not named
            return ContainerEdits(env=env, device_nodes=_device_nodes(device_files(uuids)))
        return ContainerEdits(env=env)

    def measure(self) -> Sequence[Measurement]:
        measurements: list[Measurement] = []
        for _, handle in nvml.handles():
            with suppress(pynvml.NVMLError):
                measurements += nvml.measurements(handle)
        return measurements


def _nvidia_uuid(stable_id: str) -> str:
    """Return NVIDIA's name of a device: drivers before R470 have `MIG-GPU-…/1/0`."""
    return stable_id.replace(":", "/") if stable_id.startswith("MIG-GPU-") else stable_id


def _handle_address(handle: Any) -> int | None:
    """Return the address of a GPU's handle, which identifies it even if the GPU is lost."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _device_nodes(files: Sequence[str]) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(file, file) for file in files)
