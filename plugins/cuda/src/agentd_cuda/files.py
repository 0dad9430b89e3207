"""The device files of a GPU, or of a MIG part.

Each GPU has `/dev/nvidiaN`, where N is its minor number; all share the control files. A MIG part
needs its GPU's file and those of two capabilities, of its GPU instance and its compute instance,
whose minor numbers the driver lists in /proc/driver/nvidia-caps/mig-minors (NVIDIA MIG User Guide,
"Device Nodes and Capabilities").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pynvml

from agentd_cuda import nvml

COMMON = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")


def device_files(uuids: Collection[str], mig_minors: Path = MIG_MINORS) -> list[str]:
    """Return the files of some GPUs and parts, including the shared ones.

    Raises:
        LookupError: a device does not answer, or the driver lists no capability of it.
    """
    files_by_uuid = {uuid: list(files) for uuid, files in _find_files(uuids, mig_minors)}
    if missing := [uuid for uuid in uuids if uuid not in files_by_uuid]:
        raise LookupError(f"{', '.join(missing)} does not answer")
    paths = [file for uuid in uuids for file in files_by_uuid[uuid]]
    return [*dict.fromkeys(paths), *COMMON]


def _find_files(uuids: Collection[str], mig_minors: Path) -> Iterator[tuple[str, Iterator[str]]]:
    for _, handle in nvml.handles():
        if (uuid := pynvml.nvmlDeviceGetUUID(handle)) in uuids:
            yield uuid, iter([_gpu_file(handle)])
        for _, part in nvml.part_handles(handle):
            if (uuid := pynvml.nvmlDeviceGetUUID(part)) in uuids:
                yield uuid, _part_files(handle, part, mig_minors)


def _gpu_file(handle: Any) -> str:
    return f"/dev/nvidia{pynvml.nvmlDeviceGetMinorNumber(handle)}"


def _part_files(handle: Any, part: Any, mig_minors: Path) -> Iterator[str]:
    gpu = pynvml.nvmlDeviceGetMinorNumber(handle)
    instance = f"gpu{gpu}/gi{pynvml.nvmlDeviceGetGpuInstanceId(part)}"
    compute = f"{instance}/ci{pynvml.nvmlDeviceGetComputeInstanceId(part)}"
    yield _gpu_file(handle)
    minors = capability_minors(mig_minors)
    for name in (f"{instance}/access", f"{compute}/access"):
        if name not in minors:
            raise LookupError(f"{mig_minors} does not list {name}")
        yield f"/dev/nvidia-caps/nvidia-cap{minors[name]}"


def capability_minors(file: Path) -> dict[str, int]:
    """Return the minor number of each listed capability, none without the file."""
    try:
        lines = file.read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.rpartition(" ") for line in lines)
    return {name: int(number) for name, _, number in pairs if number.isdecimal()}
