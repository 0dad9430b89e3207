"""NVML's data about GPUs, as plain values; the only module that uses `pynvml`.

API: https://docs.nvidia.com/deploy/nvml-api/. A call that a driver or GPU does not support returns
None. A GPU or part that does not answer is as last seen, with the driver's reason; it affects only
itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pynvml
from msgspec.structs import replace

from agentd.plugin_api import Measurement, ProcessUse, log_once

_T = TypeVar("_T")
_RECOVERY = {1: "a GPU reset", 2: "a reboot", 3: "a peer-to-peer drain", 4: "a drain and a reset"}
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; 0 means no action."""
_PROFILE = re.compile(r"\bMIG ((?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:[+-][a-z]+(?:\.[a-z]+)*)*)$")
_NOT_OFFERED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
)
_NO_PART = (*_NOT_OFFERED, pynvml.NVML_ERROR_NOT_FOUND)
_UNSUPPORTED = (*_NOT_OFFERED, pynvml.NVML_ERROR_NO_PERMISSION)


class MigPart(msgspec.Struct, frozen=True):
    """A MIG device: its index on its GPU, and its profile, such as `1g.10gb+me`."""

    index_on_gpu: int
    uuid: str
    profile: str
    memory_bytes: int
    problem: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU; `problem` is why it cannot be used, and `is_mig` that only its parts can."""

    index: int
    uuid: str
    pci: str = ""
    model: str = ""
    memory_bytes: int = 0
    is_mig: bool = False
    parts: tuple[MigPart, ...] = ()
    problem: str = ""
    reports_recovery: bool = False


def call_optional(
    function: Callable[..., _T], *arguments: object, none_for: Collection[int] = _UNSUPPORTED
) -> _T | None:
    """Call NVML; None if driver or GPU do not support the call.

    Raises:
        NVMLError: any other failure.
    """
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in none_for:
            return None
        raise


def pci_address(bus_id: str) -> str:
    """Return a PCI address as Linux writes it: `00000000:3B:00.0` becomes `0000:3b:00.0`."""
    domain, _, bus_and_device = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{bus_and_device}"


def numa_node(pci: str, sysfs: Path = Path("/sys")) -> int | None:
    """Return the NUMA node of a PCI device, None if Linux assigns none (-1) or has no such device.

    Raises:
        OSError: it cannot be read.
    """
    try:
        text = (sysfs / "bus/pci/devices" / pci / "numa_node").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() else None


def handles() -> Iterator[tuple[int, Any]]:
    """Yield the index and handle of each reachable GPU."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            yield index, pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError:
            continue


def read_gpu(index: int, last: Gpu | None = None) -> Gpu:
    """Read a GPU; one that does not answer has its last known values and a `problem`.

    Raises:
        NVMLError: its identity is unreadable, and unknown.
    """
    gpu = last
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        if gpu is None or gpu.uuid != uuid:
            gpu = Gpu(index, uuid)
        if pci := call_optional(pynvml.nvmlDeviceGetPciInfo, handle, none_for=_NOT_OFFERED):
            gpu = replace(gpu, pci=pci_address(pci.busId))
        return _read_gpu(gpu, handle)
    except pynvml.NVMLError as error:
        if gpu is None:
            raise
        return replace(gpu, problem=f"no answer: {error}")


def _read_gpu(gpu: Gpu, handle: Any) -> Gpu:
    """Read everything but the identity.

    Refused permission counts as a failure, except for the memory of a GPU in MIG mode, which only
    monitors of all its parts may read.
    """
    mode = call_optional(pynvml.nvmlDeviceGetMigMode, handle, none_for=_NOT_OFFERED)
    is_mig = bool(mode and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    refused = _UNSUPPORTED if is_mig else _NOT_OFFERED
    memory = call_optional(pynvml.nvmlDeviceGetMemoryInfo, handle, none_for=refused)
    gpu = replace(gpu, memory_bytes=int(memory.total) if memory else gpu.memory_bytes)
    action = _recovery_action(handle)
    return replace(
        gpu,
        model=call_optional(pynvml.nvmlDeviceGetName, handle) or gpu.model,
        is_mig=is_mig,
        parts=tuple(_read_parts(handle, gpu)) if is_mig else (),
        problem=f"the driver requires {_RECOVERY.get(action, 'recovery')}" if action else "",
        reports_recovery=action is not None,
    )


def _recovery_action(handle: Any) -> int | None:
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    values = call_optional(pynvml.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def part_handles(handle: Any) -> Iterator[tuple[int, Any]]:
    """Yield the index and handle of each MIG device of a GPU."""
    for index in range(call_optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            yield index, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError as error:
            if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, *_UNSUPPORTED):
                raise


def _read_parts(handle: Any, gpu: Gpu) -> Iterator[MigPart]:
    """Yield the parts of a GPU; a silent one has its last known values and a `problem`."""
    last_part_by_index = {part.index_on_gpu: part for part in gpu.parts}
    for index in range(
        call_optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle, none_for=_NOT_OFFERED) or 0
    ):
        part = last_part_by_index.get(index)
        get_handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
        try:
            if (part_handle := call_optional(get_handle, handle, index, none_for=_NO_PART)) is None:
                continue
            uuid, profile = pynvml.nvmlDeviceGetUUID(part_handle), _profile_from_name(part_handle)
            if part is None or part.uuid != uuid:
                part = MigPart(index, uuid, profile, 0) if profile else None
            attributes = pynvml.nvmlDeviceGetAttributes(part_handle)
            memory_bytes = int(attributes.memorySizeMB) << 20
            if not profile:
                total = gpu.memory_bytes or int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
                slices = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
                profile = profile_name(*slices, memory_bytes, total)
            yield MigPart(index, uuid, profile, memory_bytes)
        except pynvml.NVMLError as error:
            if part is not None:
                yield replace(part, problem=f"no answer: {error}")
            else:
                log_once(f"MIG device {index} of GPU {gpu.index} is left out: {error}")


def _profile_from_name(part: Any) -> str:
    """Return the profile in a MIG device's name with its attributes, if there is one.

    Attributes (`+me`, `+gfx`, `-me`) are nowhere else: slices and memory do not reveal them.
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html
    """
    match = _PROFILE.search(
        call_optional(pynvml.nvmlDeviceGetName, part, none_for=_NOT_OFFERED) or ""
    )
    return match[1] if match else ""


def profile_name(gpu_slices: int, compute_slices: int, memory_bytes: int, total_bytes: int) -> str:
    """Return a MIG profile in NVIDIA's notation, such as `1g.10gb` or `1c.3g.40gb`.

    The memory is the GPU's, in whole GiB, times the part's eighths, rounded up; half a GiB is
    rounded up, too, as Go's math.Round does in NVIDIA's go-nvlib (pkg/nvlib/device/mig_profile.go).
    """
    eighths = ceil(Fraction(memory_bytes * 8, total_bytes)) if total_bytes else 0
    gib = floor(Fraction(eighths, 8) * ceil(Fraction(total_bytes, 2**30)) + Fraction(1, 2))
    lead = "" if compute_slices == gpu_slices else f"{compute_slices}c."
    return f"{lead}{gpu_slices}g.{gib}gb"


def stable_id(uuid: str) -> str:
    """Return a UUID as an identity, which has no slashes."""
    return uuid.replace("/", ":")


def measurements(handle: Any) -> list[Measurement]:
    """Return the measurement of a GPU, or those of the parts of one in MIG mode.

    A part has its own memory, and the temperature of its GPU. NVML measures neither utilization nor
    power of parts.

    Raises:
        NVMLError: it does not answer.
    """
    mode = call_optional(pynvml.nvmlDeviceGetMigMode, handle)
    is_mig = bool(mode and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    rates = None if is_mig else call_optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = None if is_mig else call_optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    temperature = call_optional(
        pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
    )
    results = []
    for device in [part for _, part in part_handles(handle)] if is_mig else [handle]:
        memory = call_optional(pynvml.nvmlDeviceGetMemoryInfo, device)
        results.append(
            Measurement(
                stable_id(pynvml.nvmlDeviceGetUUID(device)),
                None if rates is None else float(rates.gpu),
                None if memory is None else int(memory.used),
                None if memory is None else int(memory.total),
                None if temperature is None else float(temperature),
                None if milliwatts is None else milliwatts / 1000,
                _read_processes(device),
            )
        )
    return results


def _read_processes(handle: Any) -> list[ProcessUse] | None:
    """Return the processes on a GPU or a part, with their memory in bytes.

    A process that computes and draws is in both of NVML's lists, with the same memory.
    """
    lists = [
        call_optional(pynvml.nvmlDeviceGetComputeRunningProcesses, handle),
        call_optional(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
    ]
    if lists[0] is None:
        return None
    memory_by_pid = {
        process.pid: process.usedGpuMemory for processes in lists for process in processes or ()
    }
    return [
        ProcessUse(int(pid), None if used is None else int(used))
        for pid, used in memory_by_pid.items()
    ]
