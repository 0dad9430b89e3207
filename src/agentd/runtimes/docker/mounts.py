"""Host folders in containers: only what the operator allows, and only what was looked at.

A path can change between the look at it and the engine's mount, as somebody who may write
there can. So the file that a path leads to is known by device and inode (stat(2)); it is looked
up right before the engine is asked, looked for at its place in the started container, and its
path is followed once more: a kernel whose mount was exchanged is removed. What such a
kernel did in the moments before cannot be undone; the operator allows folders in which nobody
who is not trusted may replace what is there.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from agentd.core.kernel.edits import ContainerEdits, Mount
from agentd.errors import InvalidRequest, Problem, RuntimeFailure

_OCTAL = re.compile(r"\\([0-7]{3})")


class MountSource(NamedTuple):
    """Where a mount really comes from: symlinks and `..` resolved, and which file that is."""

    path: str
    device: int
    inode: int


def resolved(mounts: Sequence[Mount], allowed: Sequence[Path]) -> list[MountSource]:
    """Return the sources of a request's mounts.

    Raises:
        InvalidRequest: with each source that is not below an allowed folder, or not there.
    """
    folders = [real for folder in allowed if (real := _real(str(folder)))]
    sources: list[MountSource] = []
    problems: list[Problem] = []
    for index, mount in enumerate(mounts):
        path: Path | None
        try:
            source = _opened(mount.source)
            path = Path(source.path)
            is_there = True
        except OSError:
            path, is_there = _real(mount.source), False
        where = f"mounts.{index}.source"
        if path is None:
            problems.append(
                Problem(where, f"{mount.source} leads to a link that cannot be followed")
            )
        elif not any(path == folder or folder in path.parents for folder in folders):
            have = ", ".join(map(str, allowed)) or "none"
            why = f"{mount.source} is not below an allowed folder; allowed-mounts: {have}"
            problems.append(Problem(where, why))
        elif not is_there:
            problems.append(Problem(where, f"{mount.source} does not exist"))
        else:
            sources.append(source)
    if problems:
        raise InvalidRequest(problems)
    return sources


def _real(path: str) -> Path | None:
    """Return where a path leads; None where a link on the way cannot be followed."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, RecursionError):
        return None


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


def _opened(path: str) -> MountSource:
    """Follow a path once, and tell of what it led to."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        real = Path(f"/proc/self/fd/{descriptor}").readlink()
        return MountSource(str(real), found.st_dev, found.st_ino)
    finally:
        os.close(descriptor)


def refuse_exchanged(mounts: Sequence[Mount], sources: Sequence[MountSource]) -> None:
    """See that every path still leads to the file that it led to.

    Raises:
        RuntimeFailure: one was exchanged meanwhile.
    """
    for mount, source in zip(mounts, sources, strict=True):
        try:
            now = _opened(mount.source)
        except OSError:
            now = None
        if now != source:
            raise _exchanged(mount)


def verify_mounts(pid: int, mounts: Sequence[Mount], sources: Sequence[MountSource]) -> None:
    """See that a container has mounted the very files that were looked at, each at its target.

    A target that is reached by a link of the image has another name there; then as many
    mounts of the file must be there as were asked for.

    Raises:
        RuntimeFailure: one was exchanged before the engine mounted it.
        PermissionError: it cannot be told.
        FileNotFoundError, ProcessLookupError: the container has ended.
    """
    if not mounts:
        return
    mounted = list(_mounted(pid))
    at = dict(mounted)
    counts = Counter(identity for _, identity in mounted)
    for mount, source in zip(mounts, sources, strict=True):
        identity = (source.device, source.inode)
        counts[identity] -= 1
        if counts[identity] < 0 or at.get(os.path.normpath(mount.target), identity) != identity:
            raise _exchanged(mount)


def _exchanged(mount: Mount) -> RuntimeFailure:
    return RuntimeFailure(f"{mount.source} was replaced during the create")


def _mounted(pid: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each mount point that a process sees, with device and inode (proc_pid_mountinfo(5)).

    Raises:
        FileNotFoundError, ProcessLookupError: it has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_bytes().splitlines()
    except OSError as error:
        if error.errno == errno.EINVAL:  # it is just ending, and has no mounts of its own any more
            raise ProcessLookupError(pid) from error
        raise
    for line in lines:
        escaped = line.split(b" ")[4].decode("ascii", "surrogateescape")
        point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), escaped)
        try:
            found = Path(f"/proc/{pid}/root{point}").lstat()
        except (PermissionError, FileNotFoundError):
            continue
        yield point, (found.st_dev, found.st_ino)
