"""Host folders in containers: only allowed ones, and only the files that were checked.

A path can change between the check and the engine's mount if a user may write there. So the file is
identified by device and inode (stat(2)). It is resolved right before the engine is called, searched
at its target in the started container, and its path is resolved once more: a kernel with a replaced
mount is removed. Its effects until then cannot be undone, so operators should only allow folders in
which no untrusted user may replace files.
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
from agentd.procfs import read_lines

_OCTAL = re.compile(r"\\([0-7]{3})")


class MountSource(NamedTuple):
    """The real source of a mount, with links and `..` resolved, and the identity of its file."""

    path: str
    device: int
    inode: int


def resolved(mounts: Sequence[Mount], allowed: Sequence[Path]) -> list[MountSource]:
    """Resolve the sources of a request's mounts.

    Raises:
        InvalidRequest: sources are missing or not below an allowed folder; lists all of them.
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
            problems.append(Problem(where, f"{mount.source} cannot be resolved"))
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
    """Resolve a path; None if a link cannot be followed."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, RecursionError):
        return None


def refuse_missing(edits: ContainerEdits) -> None:
    """Refuse edits that name missing files of the host.

    Raises:
        RuntimeFailure: a plugin's device or mount is missing.
    """
    for path in (*(m.source for m in edits.mounts), *(n.host_path for n in edits.device_nodes)):
        try:
            is_there = Path(path).exists()
        except OSError:
            continue
        if not is_there:
            raise RuntimeFailure(f"missing on this node: {path}, required by the devices")


def _opened(path: str) -> MountSource:
    """Resolve a path once and return its identity."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        real = Path(f"/proc/self/fd/{descriptor}").readlink()
        return MountSource(str(real), found.st_dev, found.st_ino)
    finally:
        os.close(descriptor)


def refuse_exchanged(mounts: Sequence[Mount], sources: Sequence[MountSource]) -> None:
    """Check that every path still leads to the same file.

    Raises:
        RuntimeFailure: a file was replaced.
    """
    for mount, source in zip(mounts, sources, strict=True):
        try:
            now = _opened(mount.source)
        except OSError:
            now = None
        if now != source:
            raise _exchanged(mount)


def verify_mounts(pid: int, mounts: Sequence[Mount], sources: Sequence[MountSource]) -> None:
    """Check that a container has mounted the checked files, each at its target.

    A target that goes through a link of the image has another name in the container. Then the
    number of mounts of the file must match.

    Raises:
        RuntimeFailure: a file was replaced before the engine mounted it.
        PermissionError: the mounts cannot be read.
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
            Path(f"/proc/{pid}/root").stat()  # one that ended meanwhile has lost its mounts
            raise _exchanged(mount)


def _exchanged(mount: Mount) -> RuntimeFailure:
    return RuntimeFailure(f"{mount.source} was replaced during the create")


def _mounted(pid: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the mount points of a process with device and inode (proc_pid_mountinfo(5)).

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended.
    """
    try:
        lines = read_lines(f"/proc/{pid}/mountinfo")
    except OSError as error:
        if error.errno == errno.EINVAL:  # the process is ending and has lost its mounts
            raise ProcessLookupError(pid) from error
        raise
    for line in lines:
        point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), line.split(" ")[4])
        try:
            found = Path(f"/proc/{pid}/root{point}").lstat()
        except (PermissionError, FileNotFoundError):
            continue
        yield point, (found.st_dev, found.st_ino)
