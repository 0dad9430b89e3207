"""Whether the host's systemd can run kernels: PID 1, a bus, a version, cgroup v2."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from agentd.host.systemd.unit_paths import user_runtime_folder

MIN_VERSION = 250
"""The oldest supported version, which introduced `ExitType=cgroup` (systemd.service(5))."""
CALL_TIMEOUT_S = 10.0


def is_booted(root: Path = Path("/")) -> bool:
    """Return whether systemd is PID 1 (sd_booted(3))."""
    return (root / "run/systemd/system").is_dir()


def has_manager(root: Path = Path("/")) -> bool:
    """Return whether this user has a manager."""
    return is_booted(root) and _bus_socket(root).exists()


def is_lingering(uid: int) -> bool:
    """Return whether a user's manager stays after the user has logged out (loginctl(1)).

    Not by the user's name: a directory that does not answer would deny it.
    """
    answer = _run("loginctl", "show-user", str(uid), "--property=Linger", "--value")
    return answer.strip() == "yes"


def systemd_problems(root: Path = Path("/")) -> list[str]:
    """Return why this user cannot run units here, nothing if it can."""
    return list(_find_problems(root))


def _find_problems(root: Path) -> Iterator[str]:
    if not is_booted(root):
        yield "systemd is not PID 1; use docker or process"
        return
    bus = _bus_socket(root)
    if not bus.exists():
        yield f"no D-Bus socket {bus}; install dbus, or dbus-user-session"
    if not (root / "sys/fs/cgroup/cgroup.controllers").exists():
        yield (
            "limits require cgroup v2 (systemd.unified_cgroup_hierarchy=1 on the kernel's"
            " command line); this host has v1"
        )
    version = parse_version(_run("systemctl", "--version"))
    if version is not None and version < MIN_VERSION:
        yield f"systemd {version} is too old: got {version}, expected {MIN_VERSION} or later"


def _bus_socket(root: Path) -> Path:
    if os.geteuid() == 0:
        return root / "run/dbus/system_bus_socket"
    return user_runtime_folder() / "bus"


def failed_units(pattern: str) -> list[str]:
    """Return the failed units of the system manager, none if it does not answer."""
    options = ("--failed", "--plain", "--no-legend", "--no-pager")
    lines = _run("systemctl", "list-units", *options, pattern).splitlines()
    return [line.split()[0] for line in lines if line.split()]


def _run(*command: str) -> str:
    try:
        process = subprocess.run(  # noqa: S603 - no word comes from a client
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout


def parse_version(text: str) -> int | None:
    """Return the version in the first line of `systemctl --version`, None if there is none."""
    match = re.match(r"systemd (\d+)", text)
    return int(match[1]) if match else None
