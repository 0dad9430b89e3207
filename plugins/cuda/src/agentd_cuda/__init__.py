"""NVIDIA GPUs: whole (`cuda.device`), in shares (`cuda.shares`), or as MIG parts.

`cuda0` is for people. The UUID is the identity, so a new order after a reboot changes nothing, and
the PCI address is an alias. A GPU in MIG mode offers only its parts, each a unique slot such as
`cuda.device:1g.10gb-mig`.

Health: an Xid event makes a GPU unhealthy, or the MIG part that it names, unless jobs cause it. If
the driver reports the required recovery, that decides, and the GPU is healthy again once none is
required. Otherwise it needs a clear by an operator, for which agentd waits over restarts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pynvml

from agentd.plugin_api import (
    MODE_KEYS,
    AcceleratorPlugin,
    AllocatedDevice,
    ConditionInfo,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    DeviceRead,
    DeviceRequest,
    Features,
    Measurement,
    NotPresent,
    PartitionInfo,
    SettingProblem,
    SlotTypeInfo,
    dealt_by_slots,
    memory_offered,
    mode_problems,
    mode_slots,
    on_pci_bus,
    primary_slot,
    size_in_bytes,
    unknown_settings,
)
from agentd_cuda import bus, cdi, links, mps, nvml
from agentd_cuda.files import COMMON, MIG_MINORS, device_files
from agentd_cuda.xids import APPLICATION_XIDS, Xid, XidWatch

_KEYS = (*MODE_KEYS, "memory", "ignored-xids", "sysfs", *mps.KEYS)
XID_HOLDS_S = 60.0
"""Minimum seconds for which an Xid counts, whatever recovery the driver reports."""
_IMEX = 5
_RECOVERY = {
    1: "a GPU reset",
    2: "a reboot of the node",
    3: "a peer-to-peer drain",
    4: "a drain and a reset",
    6: "a bus reset",
    7: "a reboot of the system",
}
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; 0 means no action, and `_IMEX` concerns no GPU alone."""


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
        try:
            is_size = size_in_bytes(settings.get("memory", "1m")) >= 1 << 20
        except ValueError:
            is_size = False
        if not is_size:
            problems.append(SettingProblem("memory", 'expected a size such as "119g"'))
        return problems + mps.problems(settings)

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(name, settings)
        self._sysfs = Path(settings.get("sysfs", "/sys"))
        self._on_bus: list[str] = []
        self._gpus = nvml.Gpus()
        self._listed: list[DeviceRead[int, nvml.Gpu]] = []
        self._owners: dict[str, tuple[DeviceRead[int, nvml.Gpu], nvml.MigPart | None]] = {}
        """The GPU of each GPU and part by stable id, and the part."""
        self._is_fresh = False
        """Whether `slot_types` has read the GPUs since they were listed."""
        self._watch = XidWatch(frozenset(settings.get("ignored-xids", APPLICATION_XIDS)))
        self._xids: dict[str, Xid] = {}
        self._unfit: dict[int, str] = {}
        self._mps = mps.MpsServer.of(settings)

    def open(self) -> None:
        self._start_nvml()
        if self._mps is not None:
            unfit = (
                f"{self.name}{index}: {reason}" for index, reason in self._unfit_gpus().items()
            )
            if problem := self._mps.unavailable_reason() or "; ".join(unfit):
                raise RuntimeError(problem)
        self._watch.wait(0)  # from now on, no Xid is missed

    def _start_nvml(self) -> None:
        """Start NVML.

        If its library is installed, the bus proves nothing: not every GPU is on PCI.
        """
        self._on_bus = addresses = on_pci_bus(bus.VENDOR, sysfs=self._sysfs)
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

    def _unfit_gpus(self) -> dict[int, str]:
        """Return why MPS cannot limit clients, for each GPU where it cannot."""
        reasons, _ = nvml.call_each(mps.unsupported_reason)
        return {index: reason for index, reason in reasons.items() if reason}

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        self._read()
        profiles = {part.profile for _, part in self._owners.values() if part}
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

    def _read(self) -> None:
        self._listed, self._is_fresh = self._gpus.read(), True
        self._owners = {gpu.identity: (gpu, None) for gpu in self._listed}
        for gpu in self._listed:
            parts = gpu.state.parts if gpu.state else ()
            self._owners |= {part.identity: (gpu, part.state) for part in parts}

    def list_devices(self) -> Sequence[DeviceInfo]:
        if not self._is_fresh:  # one read for slots and devices, which then fit each other
            self._read()
        self._is_fresh = False
        self._watch.is_due = True
        self._assign_xids()
        if self._mps is not None:
            self._unfit = self._unfit_gpus()
        return [device for gpu in self._listed for device in self._devices(gpu)]

    def _devices(self, gpu: DeviceRead[int, nvml.Gpu]) -> Sequence[DeviceInfo]:
        state = gpu.state
        problem = self._health_problem(gpu)
        try:
            numa_node = nvml.numa_node(state.pci, self._sysfs) if state else None
        except OSError as error:
            numa_node = None
            problem = problem or f"its NUMA node cannot be read: {error.strerror}"
        memory_bytes = self._memory_bytes(state)
        reason, needs_clear = self._trouble(gpu.identity, state, problem)
        whole = DeviceInfo(
            id=f"{self.name}{gpu.key}",
            stable_id=gpu.identity,
            slot=primary_slot(self.name, self.settings),
            aliases=[state.pci] if state and state.pci else [],
            model=state.model if state else "",
            numa_node=numa_node,
            health="unhealthy" if reason else "healthy",
            reason=reason,
            attributes={"memory": str(memory_bytes)},
            files=_listed_files(state, None),
            needs_clear=needs_clear,
        )
        if state is None or not state.is_mig:
            memory = memory_offered(self.name, self.settings, memory_bytes)
            return [replace(whole, secondary=memory)]
        return [self._part(whole, state, part, part.state) for part in state.parts if part.state]

    def _part(
        self,
        whole: DeviceInfo,
        gpu: nvml.Gpu,
        read: DeviceRead[int, nvml.MigPart],
        part: nvml.MigPart,
    ) -> DeviceInfo:
        problem = f"no answer: {read.problem}" if read.problem else part.problem
        problem = whole.reason or problem
        reason, needs_clear = self._trouble(read.identity, gpu, problem)
        return replace(
            whole,
            id=f"{whole.id}:{read.key}",
            stable_id=read.identity,
            slot=self._mig_slot(part.profile),
            aliases=[],
            parent=whole.stable_id,
            parent_aliases=whole.aliases,
            health="unhealthy" if reason else "healthy",
            reason=reason,
            attributes={"memory": str(part.memory_bytes), "profile": part.profile},
            files=_listed_files(gpu, part),
            needs_clear=whole.needs_clear or needs_clear,
        )

    def _memory_bytes(self, gpu: nvml.Gpu | None) -> int:
        """Return the memory of a GPU, that of the settings if its driver reports none."""
        if gpu is None:
            return 0
        return gpu.memory_bytes or size_in_bytes(self.settings.get("memory", 0))

    def _health_problem(self, gpu: DeviceRead[int, nvml.Gpu]) -> str:
        if gpu.problem or gpu.state is None:
            return f"no answer: {gpu.problem}"
        if self._mps is not None and not gpu.state.is_mig:
            problem = self._mps.unavailable_reason() or self._unfit.get(gpu.key, "")
            if problem:
                return problem
        _, has_failed = gpu.state.remapping
        if has_failed:
            return "remapping of its memory rows failed; replace it"
        action = gpu.state.recovery
        if not action or action == _IMEX:
            return ""
        return f"the driver requires {_RECOVERY.get(action, f'recovery action {action}')}"

    def _assign_xids(self) -> None:
        """Assign the Xids since the last listing to the parts that they name, or to the GPU."""
        while self._watch.seen:
            xid = self._watch.seen.popleft()
            parts = [
                (stable_id, part)
                for stable_id, (gpu, part) in self._owners.items()
                if part and gpu.identity == xid.uuid
            ]
            if xid.gpu_instance is None or not parts:
                self._xids[xid.uuid] = xid
            else:
                self._xids |= {stable_id: xid for stable_id, part in parts if xid.concerns(part)}

    def _trouble(self, stable_id: str, gpu: nvml.Gpu | None, problem: str) -> tuple[str, bool]:
        """Return a device's problem and Xid, and whether no driver reports the end of the Xid."""
        if (xid := self._xids.get(stable_id)) is None:
            return problem, False
        text = f"Xid {xid.number}"
        if gpu is not None and gpu.recovery is None:
            return "; ".join(filter(None, [problem, text, "waits for agentctl clear"])), True
        if gpu is not None and time.monotonic() - xid.seen_s > XID_HOLDS_S:
            del self._xids[stable_id]
            return problem, False
        return problem or text, False

    def clear(self, device_ids: Sequence[str]) -> None:
        for stable_id in device_ids:
            self._xids.pop(stable_id, None)
            if stable_id in self._owners:
                self._xids.pop(self._owners[stable_id][0].identity, None)

    def conditions(self) -> Sequence[ConditionInfo]:
        listed = [gpu.state.pci if gpu.state else "" for gpu in self._listed]
        silent = self._gpus.reads.describe_unidentified()
        found = [*map(ConditionInfo, silent), *bus.conditions(self._on_bus, listed, self._sysfs)]
        unwatched, fabric = {}, {}
        for gpu in self._listed:
            if gpu.state and not gpu.problem:
                unwatched[gpu.key] = self._watch.problem or self._watch.refusals.get(gpu.key, "")
                fabric[gpu.key] = "" if gpu.state.is_mig else gpu.state.fabric_problem
                found += self._gpu_conditions(gpu.key, gpu.identity, gpu.state)
        for words, names in self._gpus_by_words(unwatched):
            found.append(ConditionInfo(f"Xids of {names} are not watched: {words}"))
        for words, names in self._gpus_by_words(fabric):
            reason = f"the NVLink fabric of {names} is not set up: {words}"
            found.append(ConditionInfo(reason, "CUDA needs it: start nvidia-fabricmanager"))
        return found

    def _gpus_by_words(self, words_of: Mapping[int, str]) -> Iterator[tuple[str, str]]:
        """Yield each text of the driver with the names of its GPUs."""
        for words in dict.fromkeys(filter(None, words_of.values())):
            indices = (index for index, text in words_of.items() if text == words)
            yield words, ", ".join(f"{self.name}{index}" for index in indices)

    def _gpu_conditions(self, index: int, uuid: str, gpu: nvml.Gpu) -> Iterator[ConditionInfo]:
        name = f"{self.name}{index}"
        lacks_memory = self.settings.get("memory-slot") and not self._memory_bytes(gpu)
        is_forbidden = any(text.endswith(nvml.NO_PERMISSION) for text in gpu.silent_parts)
        rows = (
            (
                gpu.recovery == _IMEX,
                f"the driver of {name} requires a recovery of its IMEX domain",
                "nvidia-imex-ctl shows the domain",
            ),
            (
                gpu.remapping[0],
                f"{name} waits for a reset, which remaps rows of its memory",
                "reset the GPU when no kernel uses it",
            ),
            (
                lacks_memory and not gpu.is_mig,
                f"{name} reports no memory, and offers no {self.name}.mem",
                f'set memory = "…" in [plugins.{self.name}]',
            ),
            (
                gpu.is_mig and not gpu.parts and not gpu.silent_parts,
                f"{name} is in MIG mode and has no instances",
                "create instances, or leave MIG mode",
            ),
            (
                is_forbidden,
                f"{name} is in MIG mode, and agentd has no permission to open its instances",
                "run agentd as a user who may read /dev/nvidia-caps",
            ),
        )
        yield from (ConditionInfo(reason, remedy, uuid) for holds, reason, remedy in rows if holds)
        for sentence in () if is_forbidden else gpu.silent_parts:
            yield ConditionInfo(f"{name}: {sentence}", stable_id=uuid)

    def partition(
        self, devices: Sequence[DeviceInfo], agents: Sequence[str]
    ) -> PartitionInfo | None:
        handles, _ = nvml.call_each(lambda handle: handle)
        uuid_of = {gpu.key: gpu.identity for gpu in self._listed}
        groups = links.close_groups(
            {uuid_of[index]: handle for index, handle in handles.items() if index in uuid_of}
        )
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
        memory = {gpu.identity: self._memory_bytes(gpu.state) for gpu in self._listed}
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
            files = [file for device in allocation for file in self._device_files(device)]
            return ContainerEdits(env=env, device_nodes=_device_nodes([*files, *COMMON]))
        return ContainerEdits(env=env)

    def _device_files(self, device: AllocatedDevice) -> list[str]:
        """Return the files of a device as last read; the driver is not asked about others.

        Raises:
            LookupError: it has not been listed, or its files are not known.
        """
        if device.stable_id not in self._owners:
            raise LookupError(f"{device.stable_id} does not answer")
        gpu, part = self._owners[device.stable_id]
        return device_files(gpu.state, part, MIG_MINORS)

    def measure(self) -> Sequence[Measurement]:
        results, _ = nvml.call_each(nvml.measurements)
        return [measurement for found in results.values() for measurement in found]

    def wait_for_change(self, timeout_s: float) -> bool:
        return self._watch.wait(timeout_s)


def _nvidia_uuid(stable_id: str) -> str:
    """Return NVIDIA's name of a device: drivers before R470 have `MIG-GPU-…/1/0`."""
    return stable_id.replace(":", "/") if stable_id.startswith("MIG-GPU-") else stable_id


def _listed_files(gpu: nvml.Gpu | None, part: nvml.MigPart | None) -> Sequence[str]:
    try:
        return device_files(gpu, part, MIG_MINORS)
    except LookupError:
        return ()


def _device_nodes(files: Sequence[str]) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(file, file) for file in dict.fromkeys(files))
