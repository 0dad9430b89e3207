"""AMD SMI's data about GPUs, through `pyrsmi`, with its quirks handled here.

- It passes 64-bit handles without declaring them, and `ctypes` cuts those to 32 bits: the library
  then knows no GPU (https://github.com/ROCm/pyrsmi/issues/28). The arguments are declared here
  before it is initialised.
- It returns -1 or "" on failure; here that is None.
- It has no temperature; the library is called directly.
- Its unique id is the PCI address, so a GPU is identified by that, until the driver reports a
  serial number.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace
from pyrsmi import rocml

from agentd.plugin_api import Measurement

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_ARGUMENTS = {
    "amdsmi_get_processor_handles": [_POINTER, _POINTER, _POINTER],
    "amdsmi_get_gpu_device_uuid": [_POINTER, _POINTER, _POINTER],
    "amdsmi_get_gpu_asic_info": [_POINTER, _POINTER],
    "amdsmi_get_gpu_device_bdf": [_POINTER, _POINTER],
    "amdsmi_get_gpu_activity": [_POINTER, _POINTER],
    "amdsmi_get_power_info": [_POINTER, _POINTER],
    "amdsmi_get_gpu_topo_numa_affinity": [_POINTER, _POINTER],
    "amdsmi_topo_get_numa_node_number": [_POINTER, _POINTER],
    "amdsmi_get_gpu_memory_total": [_POINTER, _INT, _POINTER],
    "amdsmi_get_gpu_memory_usage": [_POINTER, _INT, _POINTER],
    "amdsmi_get_temp_metric": [_POINTER, _INT, _INT, _POINTER],
}
_SENSORS, _CURRENT = (0, 1), 0
"""Sensors: edge, or hotspot if there is no edge sensor."""
_UNKNOWN = {2**bits - 1 for bits in (16, 32, 64)}
"""AMD SMI's "not available": every bit is set."""


class AmdGpu(msgspec.Struct, frozen=True):
    """A GPU as the library lists it."""

    index: int
    pci: str
    model: str
    memory_bytes: int
    partition_index: int = 0
    """Its index among the processors with one PCI address."""
    problem: str = ""
    """Why some of its values are only the last known ones."""


class NoLibraryError(Exception):
    """AMD SMI is not installed."""


def initialise() -> None:
    """Load the library and start it.

    Raises:
        NoLibraryError: the library is not installed.
        RuntimeError: the library does not start; the message is one line.
    """
    logging.disable(logging.ERROR)  # pyrsmi logs every missing metric of a GPU
    try:
        rocml._load_rocm_library()  # noqa: SLF001 - see the module's first quirk
        for name, arguments in _ARGUMENTS.items():
            if (function := getattr(rocml.rocm_lib, name, None)) is not None:
                function.argtypes = arguments
        rocml.smi_initialize()
    except rocml.ROCMLError_LibraryNotFound as error:
        raise NoLibraryError(f"libamd_smi.so is not installed: {error}") from None
    except Exception as error:  # noqa: BLE001 - pyrsmi raises anything
        raise RuntimeError(f"AMD SMI does not start: {error or type(error).__name__}") from None


def shut_down() -> None:
    """Shut the library down."""
    rocml.smi_shutdown()


def list_gpus(last: dict[int, AmdGpu]) -> Iterator[AmdGpu]:
    """Yield the GPUs and save them in `last`, which replaces a GPU that does not answer."""
    gpus_at_address: Counter[str] = Counter()
    for index in range(rocml.smi_get_device_count()):
        last_gpu = last.get(index)
        address = rocml.smi_get_device_pci_id(index)
        memory = _parse_number(rocml.smi_get_device_memory_total(index))
        model = rocml.smi_get_device_name(index)
        name = model if isinstance(model, str) else ""
        if address is None or address < 0:
            if last_gpu is None:
                continue
            gpu = replace(last_gpu, problem="no answer: AMD SMI does not tell its PCI address")
        else:
            pci = pci_address(address)
            last_memory = (
                last_gpu.memory_bytes if last_gpu is not None and last_gpu.pci == pci else 0
            )
            has_lost_memory = memory is None and last_memory > 0
            problem = "no answer: AMD SMI does not tell its memory" if has_lost_memory else ""
            gpu = AmdGpu(index, pci, name, memory or last_memory, gpus_at_address[pci], problem)
        last[index] = gpu
        gpus_at_address[gpu.pci] += 1
        yield gpu


def pci_address(packed: int) -> str:
    """Return an address as Linux writes it; bus from bit 8, device 3, function 0.

    The domain is from bit 16, or from bit 32 if pyrsmi uses the `amdsmi` package.
    """
    domain, bus, device = packed >> 32 or packed >> 16, packed >> 8 & 0xFF, packed >> 3 & 0x1F
    return f"{domain:04x}:{bus:02x}:{device:02x}.{packed & 7}"


def measure_gpu(index: int, stable_id: str) -> Measurement:
    """Return the current measurement of a GPU."""
    utilization = _parse_number(rocml.smi_get_device_utilization(index))
    power = _parse_number(rocml.smi_get_device_average_power(index))
    return Measurement(
        stable_id,
        None if utilization is None else float(utilization),
        _parse_number(rocml.smi_get_device_memory_used(index)),
        _parse_number(rocml.smi_get_device_memory_total(index)),
        _read_temperature(index),
        None if power is None else float(power),
    )


def _read_temperature(index: int) -> float | None:
    read_metric: Any = getattr(rocml.rocm_lib, "amdsmi_get_temp_metric", None)
    if read_metric is None:
        return None
    degrees = ctypes.c_int64()
    handle = rocml._get_processor_handle(index)  # noqa: SLF001 - there is no public function
    for sensor in _SENSORS:
        if read_metric(handle, sensor, _CURRENT, ctypes.byref(degrees)) == 0:
            return float(degrees.value)
    return None


def _parse_number(value: Any) -> int | None:
    is_known = isinstance(value, (int, float)) and value >= 0 and value not in _UNKNOWN
    return int(value) if is_known else None
