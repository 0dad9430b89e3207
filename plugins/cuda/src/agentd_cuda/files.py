"""The device files of a GPU, or of a MIG part.

Each GPU has `/dev/nvidiaN`, where N is its minor number; all share the control files. A MIG part
needs its GPU's file and those of two capabilities, of its GPU instance and its compute instance,
whose minor numbers the driver lists in /proc/driver/nvidia-caps/mig-minors (NVIDIA MIG User Guide,
"Device Nodes and Capabilities").
"""

from __future__ import annotations

from pathlib import Path

from agentd_cuda.nvml import Gpu, MigPart

COMMON = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")


def device_files(gpu: Gpu | None, part: MigPart | None, mig_minors: Path) -> list[str]:
    """Return the files of a GPU, or of a part of it, in the order of Slurm's MultipleFiles.

    Raises:
        LookupError: the driver does not tell its number, or lists no capability of it.
    """
    if gpu is None or gpu.minor is None:
        raise LookupError("the driver does not tell its minor number")
    files = [f"/dev/nvidia{gpu.minor}"]
    if part is None:
        return files
    instance = f"gpu{gpu.minor}/gi{part.gpu_instance}"
    minors = capability_minors(mig_minors)
    for name in (f"{instance}/access", f"{instance}/ci{part.compute_instance}/access"):
        if name not in minors:
            raise LookupError(f"{mig_minors} does not list {name}")
        files.append(f"/dev/nvidia-caps/nvidia-cap{minors[name]}")
    return files


def capability_minors(file: Path) -> dict[str, int]:
    """Return the minor number of each listed capability, none without the file."""
    try:
        lines = file.read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.rpartition(" ") for line in lines)
    return {name: int(number) for name, _, number in pairs if number.isdecimal()}
