"""Shares of GPUs with NVIDIA's Multi-Process Service (MPS), as a client of a running server.

Variables, files and rules: https://docs.nvidia.com/deploy/mps/. MPS is cooperative: a kernel can
unset its variables, so a share stays unenforced. One server serves the processes of one user at a
time; those of another user wait.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import Any

import msgspec
import pynvml

from agentd.plugin_api import ContainerEdits, Mount, SettingProblem
from agentd_cuda import nvml

KEYS = ("share-control", "mps-pipe-directory", "mps-shm-directory")
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES, _SHM = "/tmp/nvidia-mps", "/dev/shm"  # noqa: S108 - where they are by default
_CONTROL_PID = "nvidia-cuda-mps-control.pid"
_FIRST_CAPABLE = 7
"""Compute capability (Volta) from which a client can be limited to a fraction of the threads."""
_PATH = re.compile(r"/[^\0]*")


def problems(settings: Mapping[str, Any]) -> list[SettingProblem]:
    """Return the problems of the MPS settings."""
    setting_problems = []
    control = settings.get("share-control")
    if control not in (None, "mps"):
        reason = f'invalid value {control!r}: expected "mps", or no value (shares are not enforced)'
        setting_problems.append(SettingProblem("share-control", reason))
    elif control and settings.get("mode") != "shares":
        setting_problems.append(SettingProblem("share-control", 'requires mode = "shares"'))
    for key in KEYS[1:]:
        value = settings.get(key, "/")
        if not isinstance(value, str) or not _PATH.fullmatch(value):
            setting_problems.append(
                SettingProblem(key, f"invalid value {value!r}: expected an absolute path")
            )
        elif key in settings and not control:
            setting_problems.append(SettingProblem(key, 'requires share-control = "mps"'))
    return setting_problems


class MpsShare(msgspec.Struct, frozen=True):
    """A kernel's share of one GPU: `amount` of 1, and its memory (0: unknown)."""

    amount: Decimal
    memory_bytes: int


class MpsServer(msgspec.Struct, frozen=True):
    """A control daemon: the folder of its pipes, and the folder it uses as /dev/shm."""

    pipes: str
    shm: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> MpsServer | None:
        """Return the server of the settings, None if shares are not controlled."""
        if settings.get("share-control") != "mps":
            return None
        pipes = settings.get("mps-pipe-directory") or os.environ.get(_PIPES) or _DEFAULT_PIPES
        return cls(str(Path(pipes)), str(Path(settings.get("mps-shm-directory", _SHM))))

    def unavailable_reason(self) -> str:
        """Return why no client can reach it, empty if one can."""
        folder = Path(self.pipes)
        if owner := _foreign_owner(folder):
            return f"{folder} belongs to {owner}, expected root or the user of agentd"
        reason = _not_running_reason(folder / _CONTROL_PID)
        if reason and not _accepts_connections(folder / "control"):
            start = f"start it: {_PIPES}={self.pipes} nvidia-cuda-mps-control -d"
            return f"no MPS control daemon is running ({reason}); {start}"
        if not Path(self.shm).is_dir():
            return f"the shared memory of the MPS server, {self.shm}, is not a folder"
        return ""

    def require(self, runtime: str) -> None:
        """Refuse a runtime whose kernels do not see the server's shared memory.

        Raises:
            RuntimeError: they do not see it.
        """
        if runtime != "docker" and self.shm != _SHM:
            reason = f"plain processes use {_SHM}, but the MPS server uses {self.shm}"
            raise RuntimeError(f"{reason}: use containers, or a server with the host's {_SHM}")

    def edits(self, parts: Sequence[MpsShare]) -> ContainerEdits:
        """Return the edits that limit a client to its shares, in the order in which it sees GPUs.

        A client has one percentage for all of its GPUs: that of its smallest share. Without a known
        amount of memory there is no memory limit.
        """
        percentage = min(part.amount for part in parts) * 100
        limits = [
            f"{ordinal}={max(1, part.memory_bytes >> 20)}M"
            for ordinal, part in enumerate(parts)
            if part.memory_bytes
        ]
        env = {
            _PIPES: self.pipes,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": _format_percentage(percentage),
        }
        if limits:
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(limits)
        mounts = (
            Mount(self.pipes, self.pipes, read_only=False),
            Mount(self.shm, _SHM, read_only=False),
        )
        return ContainerEdits(env=env, mounts=mounts)


def _foreign_owner(folder: Path) -> str:
    """Return the owner of a folder, if it is neither root nor this user."""
    try:
        uid = folder.stat().st_uid
    except OSError:
        return ""
    return "" if uid in (0, os.geteuid()) else f"user {uid}"


def _not_running_reason(pid_file: Path) -> str:
    """Return why the control daemon of a file is not running, empty if it is."""
    try:
        if not pid_file.is_file():
            return f"{pid_file} is not a file"
        pid = int(pid_file.read_bytes())
        command = Path(f"/proc/{pid}/cmdline").read_bytes() if pid > 0 else b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "has no process id"
        return f"{pid_file}: {reason}"
    return "" if b"mps" in command else f"{pid_file}: process {pid} is not an MPS control daemon"


def _accepts_connections(control: Path) -> bool:
    """Return whether a control daemon listens, also in another pid namespace."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(control))
        except OSError:
            return False
    return True


def unsupported_reason(handle: Any) -> str:
    """Return why MPS cannot limit a client on a GPU, empty if it can or if that is unknown."""
    capability = nvml.call_optional(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    if capability is not None and capability[0] < _FIRST_CAPABLE:
        version = ".".join(map(str, capability))
        return f"compute capability {version} is below 7.0: MPS cannot limit clients"
    mode = nvml.call_optional(pynvml.nvmlDeviceGetComputeMode, handle)
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return "compute mode is Prohibited: no program can use it"
    return ""


def _format_percentage(number: Decimal) -> str:
    """Format a number without exponent and trailing zeros, rounded down."""
    text = format(number.quantize(Decimal("0.0001"), ROUND_DOWN), "f")
    return text.rstrip("0").rstrip(".")
