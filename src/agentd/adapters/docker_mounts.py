"""Host folders in containers: only what the operator allows, and only what was looked at.

A path can change between the look at it and the engine's mount. So the file that a path
leads to is known by device and inode (stat(2)), and looked for among the mounts of the
started container; one that is not there was exchanged meanwhile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from agentd.core.edits import ContainerEdits, Mount
from agentd.errors import InvalidRequest, Problem, RuntimeFailure

_OCTAL = re.compile(r"\\([0-7]{3})")


class Source(NamedTuple):
    """Where a mount really comes from: symlinks and `..` resolved, and which file that is."""

    path: str
    device: int
    inode: int


def resolved(mounts: Sequence[Mount], allowed: Sequence[Path]) -> list[Source]:
    """Return the sources of a request's mounts.

    Raises:
        InvalidRequest: with each source that is below no allowed folder, or not there.
    """
    folders = [Path(os.path.realpath(folder)) for folder in allowed]
    sources: list[Source] = []
    problems: list[Problem] = []
    for index, mount in enumerate(mounts):
        try:
            source = _opened(mount.source)
            path = Path(source.path)
            is_there = True
        except OSError:
            path, is_there = Path(os.path.realpath(mount.source)), False
        where = f"mounts.{index}.source"
        if not any(path == folder or folder in path.parents for folder in folders):
            have = ", ".join(map(str, allowed)) or "none"
            why = f"{mount.source} is below no allowed folder; allowed-mounts: {have}"
            problems.append(Problem(where, why))
        elif not is_there:
            problems.append(Problem(where, f"{mount.source} does not exist"))
        else:
            sources.append(source)
    if problems:
        raise InvalidRequest(problems)
    return sources


def refuse_missing(edits: ContainerEdits) -> None:
    """Refuse edits that name files of the node that are not there.

    Raises:
        RuntimeFailure: a plugin's device or mount is missing.
    """
    for path in (*(m.source for m in edits.mounts), *(n.host_path for n in edits.device_nodes)):
        try:
            is_there = Path(path).exists()
        except OSError:
            continue
        if not is_there:
            raise RuntimeFailure(f"{path}, which its devices need, is not on this node")


def _opened(path: str) -> Source:
    """Follow a path once, and tell of what it led to."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        real = Path(f"/proc/self/fd/{descriptor}").readlink()
        return Source(str(real), found.st_dev, found.st_ino)
    finally:
        os.close(descriptor)


def verify_mounts(pid: int, sources: Collection[Source]) -> None:
    """See that a container has mounted the very files that were looked at.

    Raises:
        RuntimeFailure: one was exchanged before the engine mounted it.
        PermissionError, FileNotFoundError: it cannot be told, or the container has ended.
    """
    mounted = set(_mounted(pid)) if sources else set()
    for source in sources:
        if (source.device, source.inode) not in mounted:
            raise RuntimeFailure(f"{source.path} was exchanged while the kernel was created")


def _mounted(pid: int) -> Iterator[tuple[int, int]]:
    """Yield device and inode of every mount point that a process sees (proc_pid_mountinfo(5))."""
    for line in Path(f"/proc/{pid}/mountinfo").read_bytes().splitlines():
        escaped = line.split(b" ")[4].decode("ascii", "surrogateescape")
        point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), escaped)
        try:
            found = Path(f"/proc/{pid}/root{point}").lstat()
        except (PermissionError, FileNotFoundError):
            continue
        yield found.st_dev, found.st_ino
