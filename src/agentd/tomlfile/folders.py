"""Whether a folder can be created and written, determined without changing the disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from agentd.procfs import read_lines
from agentd.tomlfile.regular_files import kind_of

_OWN = {
    *("bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "mqueue", "proc", "pstore"),
    *("securityfs", "sysfs", "tracefs"),
}
"""File systems that Linux fills itself, where no folder can be created."""


def refusal(folder: Path) -> OSError | None:
    """Return why a folder cannot be created or written, None if it can."""
    try:
        nearest, mode = _nearest(folder)
        if not stat.S_ISDIR(mode):
            return OSError(errno.ENOTDIR, f"{nearest} is {kind_of(mode)}, expected a directory")
        if (system := _file_system(nearest)) in _OWN:
            why = f"{nearest} is on a {system} file system, expected one that keeps files"
            return OSError(errno.EPERM, why)
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            return OSError(errno.EROFS, f"{nearest} is on a read-only file system")
        if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
            return OSError(errno.EACCES, f"{nearest} cannot be written: permission denied")
    except OSError as error:
        return error
    return None


def _nearest(path: Path) -> tuple[Path, int]:
    """Return the nearest existing path at or above a path, and its mode.

    Raises:
        OSError: the path cannot be inspected.
    """
    try:
        return path, path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise OSError(errno.ENOENT, f"{path} is a dangling link") from None
        if path.parent == path:
            raise
        return _nearest(path.parent)


def _file_system(path: Path) -> str:
    """Return the type of a path's file system, empty if it is unknown."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = read_lines("/proc/self/mountinfo")
    except OSError:
        return ""
    for line in lines:
        if line.split(" ", 3)[2] == wanted:
            return line.partition(" - ")[2].split(" ", 1)[0]
    return ""
