"""AMD SMI's data about GPUs, through `pyrsmi`, with its quirks handled here.

- It passes 64-bit handles without declaring them, and `ctypes` cuts those to 32 bits: the library
  then knows no GPU (https://github.com/ROCm/pyrsmi/issues/28). The arguments are declared here
  before it is initialised.
- It returns -1 or "" on failure, without the library's words; here that is an error, or None.
- It has no temperature; the library is called directly.
- Its unique id is the PCI address, so a GPU is identified by that, until the driver reports a
  serial number.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

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
_VRAM = 0
_NOT_OFFERED = (
    rocml.amdsmi_status_t.AMDSMI_STATUS_NOT_SUPPORTED,
    rocml.amdsmi_status_t.AMDSMI_STATUS_NOT_YET_IMPLEMENTED,
)
_MAX_ANSWER = 4096
"""Bytes, more than any of the answers above has."""
_UNKNOWN = {2**bits - 1 for bits in (16, 32, 64)}
"""AMD SMI's "not available": every bit is set."""


class NoLibraryError(Exception):
    """AMD SMI is not installed."""


class GpuRefusedError(Exception):
    """AMD SMI, or its driver, does not tell something about a GPU; the text has the words."""


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


class NotReportedError(GpuRefusedError):
    """AMD SMI does not offer something for a GPU."""


def count_gpus() -> int:
    """Return the number of GPUs, where each compute partition counts as one."""
    return int(rocml.smi_get_device_count())


def read_address(index: int) -> str:
    """Return the PCI address of a GPU.

    Raises:
        GpuRefusedError: the library does not tell it.
    """
    packed = rocml.smi_get_device_pci_id(index)
    if packed is None or packed < 0:
        raise _refusal("its PCI address", "amdsmi_get_gpu_device_bdf", index)
    return pci_address(packed)


def read_memory(index: int) -> int:
    """Return the size of a GPU's memory in bytes.

    Raises:
        GpuRefusedError: the library does not tell it.
        NotReportedError: the library has no such value of this GPU.
    """
    memory = _parse_number(rocml.smi_get_device_memory_total(index))
    if memory is None:
        raise _refusal("its memory", "amdsmi_get_gpu_memory_total", index, _VRAM)
    return memory


def read_model(index: int) -> str:
    """Return the name of a GPU's model, empty if the library does not tell it."""
    model = rocml.smi_get_device_name(index)
    return model if isinstance(model, str) else ""


def _refusal(what: str, name: str, index: int, *arguments: int) -> GpuRefusedError:
    """Return an error with the library's words, which pyrsmi drops: the call is repeated."""
    reason, function = (
        f"AMD SMI does not tell {what}",
        getattr(rocml.rocm_lib, name, None),
    )
    if function is None:
        return GpuRefusedError(reason)
    status = function(_handle(index), *arguments, ctypes.create_string_buffer(_MAX_ANSWER))
    words = rocml.amdsmi_status_verbose_err_out.get(status, f"status {status}")
    error = NotReportedError if status in _NOT_OFFERED else GpuRefusedError
    return error(f"{reason}: {words}" if status else reason)


def _handle(index: int) -> Any:
    return rocml._get_processor_handle(index)  # noqa: SLF001 - there is no public function


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
    for sensor in _SENSORS:
        if read_metric(_handle(index), sensor, _CURRENT, ctypes.byref(degrees)) == 0:
            return float(degrees.value)
    return None


def _parse_number(value: Any) -> int | None:
    is_known = isinstance(value, (int, float)) and value >= 0 and value not in _UNKNOWN
    return int(value) if is_known else None
