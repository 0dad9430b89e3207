"""NVML's data about GPUs, as plain values; the only module that uses `pynvml`.

API: https://docs.nvidia.com/deploy/nvml-api/. A call that a driver or GPU does not support returns
None. A GPU or part that refuses is as last read, with the driver's words; it affects only itself.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from functools import partial
from math import ceil, floor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pynvml

from agentd.plugin_api import DeviceRead, DeviceReads, Measurement, ProcessUse, guard_each

_T = TypeVar("_T")
_PROFILE = re.compile(r"\bMIG ((?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:[+-][a-z]+(?:\.[a-z]+)*)*)$")
_NOT_OFFERED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
)
_NO_PART = (*_NOT_OFFERED, pynvml.NVML_ERROR_NOT_FOUND)
_UNSUPPORTED = (*_NOT_OFFERED, pynvml.NVML_ERROR_NO_PERMISSION)
REFUSALS = (pynvml.NVMLError, UnicodeDecodeError)
"""Exceptions about one device; pynvml decodes text that some drivers fill with garbage."""
_FABRIC = {1: "not started", 2: "in progress"}
"""NVML_GPU_FABRIC_STATE: of GPUs that an NVSwitch joins; others have none."""
NO_PERMISSION = str(pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION))


class MigPart(msgspec.Struct, frozen=True):
    """A MIG device and its profile, such as `1g.10gb+me`; the ids of its instances, if known."""

    profile: str
    memory_bytes: int
    gpu_instance: int | None = None
    compute_instance: int | None = None
    problem: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU; with `is_mig` only its parts can be used, and `recovery` is the required action."""

    pci: str
    model: str
    memory_bytes: int
    minor: int | None
    is_mig: bool
    parts: Sequence[DeviceRead[int, MigPart]]
    silent_parts: Sequence[str]
    """A sentence for each part that has not told enough to be listed."""
    recovery: int | None
    remapping: Sequence[int]
    """Of memory rows: whether it waits for a reset, and whether it failed."""
    fabric_problem: str


def call_optional(
    function: Callable[..., _T], *arguments: object, none_for: Collection[int] = _UNSUPPORTED
) -> _T | None:
    """Call NVML; None if driver or GPU do not support the call, or the text is garbage.

    Raises:
        NVMLError: any other failure.
    """
    try:
        return function(*arguments)
    except UnicodeDecodeError:
        return None
    except pynvml.NVMLError as error:
        if error.value in none_for:
            return None
        raise


def _call_or_last(function: Callable[[Any], _T], handle: Any, last: _T) -> _T:
    """Call NVML about something that a device can do without; `last` if the driver refuses."""
    try:
        return function(handle)
    except pynvml.NVMLError:
        return last


def call_each(call: Callable[[Any], _T]) -> tuple[dict[int, _T], dict[int, str]]:
    """Call a function with the handle of each GPU; return results and refusals by index."""
    handle_of = pynvml.nvmlDeviceGetHandleByIndex
    indices = range(pynvml.nvmlDeviceGetCount())
    return guard_each(indices, lambda index: call(handle_of(index)), *REFUSALS)


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


class Gpus:
    """The GPUs of the driver and their parts, over many reads."""

    def __init__(self) -> None:
        self.reads = DeviceReads[int, Gpu]("GPU", *REFUSALS)
        self._part_reads: dict[str, DeviceReads[int, MigPart]] = {}

    def read(self) -> list[DeviceRead[int, Gpu]]:
        """Read all GPUs; a GPU needs nothing but its identity."""
        handle_of = pynvml.nvmlDeviceGetHandleByIndex
        return self.reads.read(
            range(pynvml.nvmlDeviceGetCount()),
            lambda index: pynvml.nvmlDeviceGetUUID(handle_of(index)),
            lambda index, last: self._read_gpu(index, handle_of(index), last),
        )

    def _read_gpu(self, index: int, handle: Any, last: Gpu | None) -> Gpu:
        """Read everything but the identity.

        Refused permission counts as a failure, except for the memory of a GPU in MIG mode, which
        only monitors of all its parts may read.
        """
        pci = call_optional(pynvml.nvmlDeviceGetPciInfo, handle, none_for=_NOT_OFFERED)
        mode = call_optional(pynvml.nvmlDeviceGetMigMode, handle, none_for=_NOT_OFFERED)
        is_mig = bool(mode and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
        refused = _UNSUPPORTED if is_mig else _NOT_OFFERED
        memory = call_optional(pynvml.nvmlDeviceGetMemoryInfo, handle, none_for=refused)
        total = int(memory.total) if memory else last.memory_bytes if last else 0
        parts, silent_parts = self._read_parts(handle, total) if is_mig else ([], [])
        return Gpu(
            pci=pci_address(pci.busId) if pci else last.pci if last else "",
            model=call_optional(pynvml.nvmlDeviceGetName, handle) or (last.model if last else ""),
            memory_bytes=total,
            minor=_call_or_last(partial(_minor, index), handle, last.minor if last else None),
            is_mig=is_mig,
            parts=parts,
            silent_parts=silent_parts,
            recovery=_recovery_action(handle, last.recovery if last else None),
            remapping=_call_or_last(_remapping, handle, last.remapping if last else (0, 0)),
            fabric_problem=_call_or_last(
                _fabric_problem, handle, last.fabric_problem if last else ""
            ),
        )

    def _read_parts(
        self, handle: Any, total_bytes: int
    ) -> tuple[list[DeviceRead[int, MigPart]], list[str]]:
        """Return the parts of a GPU, and a sentence for each that cannot be listed."""
        handle_of = partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle)
        reads = self._part_reads.setdefault(
            pynvml.nvmlDeviceGetUUID(handle), DeviceReads("MIG instance", *REFUSALS)
        )
        count = call_optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle, none_for=_NOT_OFFERED)
        handles, refused = guard_each(
            range(count or 0),
            partial(call_optional, handle_of, none_for=_NO_PART),
            pynvml.NVMLError,
        )
        found = reads.read(
            [index for index in range(count or 0) if index in refused or handles[index]],
            lambda index: stable_id(pynvml.nvmlDeviceGetUUID(handle_of(index))),
            lambda index, last: _read_part(handle, handle_of(index), total_bytes, last),
        )
        silent = [f"MIG instance {part.key}: {part.problem}" for part in found if not part.state]
        return [part for part in found if part.state], [*reads.describe_unidentified(), *silent]


def _minor(index: int, handle: Any) -> int:
    """Return the minor number of a GPU: its index where the driver has none, off the PCI bus."""
    minor = call_optional(pynvml.nvmlDeviceGetMinorNumber, handle, none_for=_NOT_OFFERED)
    return index if minor is None else int(minor)


def _recovery_action(handle: Any, last: int | None) -> int | None:
    """Return the required action, `last` if the driver fails to tell, None if it reports none."""
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = call_optional(pynvml.nvmlDeviceGetFieldValues, handle, [field]) if field else None
    if not values or values[0].nvmlReturn in _UNSUPPORTED:
        return None
    return int(values[0].value.uiVal) if values[0].nvmlReturn == pynvml.NVML_SUCCESS else last


def _remapping(handle: Any) -> Sequence[int]:
    _, _, waits_for_reset, has_failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return waits_for_reset, has_failed


def _fabric_problem(handle: Any) -> str:
    """Return why the NVLink fabric of a GPU is not set up, empty if it is or if there is none."""
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return _FABRIC.get(info.state, "")


def _read_part(handle: Any, part: Any, total_bytes: int, last: MigPart | None) -> MigPart:
    """Read everything but the identity; a part with a profile is listed without its attributes."""
    gpu_instance = _call_or_last(
        pynvml.nvmlDeviceGetGpuInstanceId, part, last.gpu_instance if last else None
    )
    compute_instance = _call_or_last(
        pynvml.nvmlDeviceGetComputeInstanceId, part, last.compute_instance if last else None
    )
    profile = _profile_from_name(part)
    try:
        attributes = pynvml.nvmlDeviceGetAttributes(part)
    except pynvml.NVMLError as error:
        if last or not profile:
            raise
        return MigPart(profile, 0, gpu_instance, compute_instance, f"no answer: {error}")
    memory_bytes = int(attributes.memorySizeMB) << 20
    if not profile:
        total_bytes = total_bytes or int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        slices = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
        profile = profile_name(*slices, memory_bytes, total_bytes)
    return MigPart(profile, memory_bytes, gpu_instance, compute_instance)


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
    power of parts. A part that refuses is left out.

    Raises:
        NVMLError: the GPU does not answer.
    """
    mode = call_optional(pynvml.nvmlDeviceGetMigMode, handle)
    is_mig = bool(mode and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    rates = None if is_mig else call_optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = None if is_mig else call_optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    temperature = call_optional(
        pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
    )

    def measure(device: Any) -> Measurement:
        memory = call_optional(pynvml.nvmlDeviceGetMemoryInfo, device)
        return Measurement(
            stable_id(pynvml.nvmlDeviceGetUUID(device)),
            None if rates is None else float(rates.gpu),
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            None if temperature is None else float(temperature),
            None if milliwatts is None else milliwatts / 1000,
            _read_processes(device),
        )

    if not is_mig:
        return [measure(handle)]
    count = call_optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    part_of = partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle)
    results, _ = guard_each(range(count), lambda index: measure(part_of(index)), *REFUSALS)
    return [*results.values()]


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
