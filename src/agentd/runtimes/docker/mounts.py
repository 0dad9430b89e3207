"""Host folders in containers: only allowed ones, and only the files that were checked.

A path can change between the check and the engine's mount if a user may write there. So the file is
identified by device and inode (stat(2)). It is resolved right before the engine is called, searched
at its target in the started container, and its path is resolved once more: a kernel with a replaced
mount is removed. Its effects until then cannot be undone, so operators should only allow folders in
which no untrusted user may replace files.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from agentd.concurrency import call_in_time
from agentd.core.kernel.edits import ContainerEdits, Mount
from agentd.errors import AgentdError, InvalidRequest, Problem, RuntimeFailure, RuntimeUnavailable
from agentd.os_errors import ABSENT_PATH, UNUSABLE_PATH, ending_process_as_gone
from agentd.procfs import read_lines

_OCTAL = re.compile(r"\\([0-7]{3})")
MAX_LINKS = 40
"""Links that Linux follows in a path (path_resolution(7))."""


class MountSource(msgspec.Struct, frozen=True):
    """The real source of a mount, with links and `..` resolved, and the identity of its file."""

    path: str
    device: int
    inode: int


def resolve_sources(mounts: Sequence[Mount], allowed: Sequence[Path]) -> list[MountSource]:
    """Resolve the sources of a request's mounts.

    Raises:
        InvalidRequest: sources are missing or not below an allowed folder; lists all of them.
        RuntimeUnavailable: the file system of a source, or of a folder that may have it, fails.
    """
    folders: dict[Path, Path] = {}
    kinds = _read_mount_kinds()
    sources: list[MountSource] = []
    problems: list[Problem] = []
    for index, mount in enumerate(mounts):
        member, source = f"mounts.{index}.source", None
        try:
            if _find_folder(mount.source, allowed, folders, kinds):
                source = _resolve_source(mount.source)
        except OSError as error:
            if error.errno in ABSENT_PATH:
                problems.append(Problem(member, f"{mount.source} does not exist"))
            elif error.errno in UNUSABLE_PATH:
                reason = f"agentd cannot open {mount.source}: {error.strerror}"
                problems.append(Problem(member, reason))
            else:
                raise _failure_error(mount, error) from None
            continue
        if source is not None and _is_below(Path(source.path), folders.values()):
            sources.append(source)
        else:
            folders_text = ", ".join(map(str, allowed)) or "none"
            reason = (
                f"{mount.source} is not below an allowed folder; allowed-mounts: {folders_text}"
            )
            problems.append(Problem(member, reason))
    if problems:
        raise InvalidRequest(problems)
    return sources


def _find_folder(
    source: str, allowed: Sequence[Path], folders: dict[Path, Path], kinds: Mapping[Path, str]
) -> bool:
    """Return whether a source is below an allowed folder, and add the real paths of those tried.

    Those that its name is below come first. One that is silent holds up no source of another.

    Raises:
        RuntimeUnavailable: the source may be below a folder that does not answer.
    """
    silent = ""
    for folder in sorted(allowed, key=Path(source).is_relative_to, reverse=True):
        try:
            if folder not in folders:
                find = partial(_real_path, str(folder), (), {})
                folders[folder] = call_in_time(str(folder), find)
        except OSError as error:
            silent = f"{folder} (allowed-mounts): {error.strerror}"
            if Path(source).is_relative_to(folder):
                break
        else:
            if _is_below(_real_path(source, folders.values(), kinds), folders.values()):
                return True
    if silent:
        raise RuntimeUnavailable(silent)
    return False


def _failure_error(mount: Mount, error: OSError) -> RuntimeUnavailable:
    return RuntimeUnavailable(f"the file system of {mount.source} fails: {error.strerror}")


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _real_path(path: str, folders: Collection[Path], kinds: Mapping[Path, str]) -> Path:
    """Resolve the links of a path as far as nothing is mounted but what leads to the folders.

    Looking up a name in an automount can mount it: `/net/HOST` of any host.
    """
    names, current, links = [*reversed(Path(path).parts)], Path("/"), 0
    while names and links <= MAX_LINKS:
        name, parent = names.pop(), current
        current = parent.parent if name == ".." else parent / name.replace("//", "/")
        is_wanted = _is_below(current, folders) or any(f.is_relative_to(current) for f in folders)
        if not is_wanted and _kind_of(parent, kinds) == "autofs":
            break
        with suppress(OSError):  # no link, or opening it tells more
            names += reversed(current.readlink().parts)
            current = parent
            links += 1
    return current


def _kind_of(folder: Path, kinds: Mapping[Path, str]) -> str:
    """Return the type of a folder's file system."""
    return next((kinds[path] for path in (folder, *folder.parents) if path in kinds), "")


def _read_mount_kinds() -> dict[Path, str]:
    """Return the types of the file systems by mount point; what covers another one wins."""
    kinds: dict[Path, str] = {}
    for line in read_lines("/proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        kinds[Path(_unescape(place.split(" ")[4]))] = kind.split(" ")[0]
    return kinds


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda m: chr(int(m[1], 8)), text)


def refuse_missing(edits: ContainerEdits) -> None:
    """Refuse edits that name missing files of the host.

    Raises:
        RuntimeFailure: a plugin's device or mount is missing.
    """
    for path in (*(m.source for m in edits.mounts), *(n.host_path for n in edits.device_nodes)):
        try:
            _resolve_source(path)
        except OSError as error:
            if error.errno in ABSENT_PATH:
                reason = f"missing on this node: {path}, required by the devices"
                raise RuntimeFailure(reason) from None


def _resolve_source(path: str) -> MountSource:
    """Resolve a path once and return its identity.

    If nothing is mounted on an automount yet, opening it as a directory mounts it (open(2)).
    """
    flags = os.O_PATH | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECTORY)
    except NotADirectoryError:
        descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        real_path = Path(f"/proc/self/fd/{descriptor}").readlink()
        return MountSource(str(real_path), status.st_dev, status.st_ino)
    finally:
        os.close(descriptor)


def refuse_replaced(mounts: Sequence[Mount], sources: Sequence[MountSource]) -> None:
    """Check that every path still leads to the same file.

    Raises:
        RuntimeFailure: a file was replaced.
        RuntimeUnavailable: its file system fails.
    """
    for mount, source in zip(mounts, sources, strict=True):
        if error := _difference(mount, source):
            raise error


def verify_mounts(pid: int, mounts: Sequence[Mount], sources: Sequence[MountSource]) -> None:
    """Check that a container has mounted the checked files, each at its target.

    A target that goes through a link of the image has another name in the container. Then the
    number of mounts of the file must match.

    Raises:
        RuntimeFailure: a file was replaced before the engine mounted it.
        RuntimeUnavailable: its file system fails.
        PermissionError: the mounts cannot be read.
        FileNotFoundError, ProcessLookupError: the container has ended.
    """
    if not mounts:
        return
    mount_points = list(_read_mount_points(pid))
    by_target = dict(mount_points)
    counts = Counter(identity for _, identity in mount_points)
    for mount, source in zip(mounts, sources, strict=True):
        identity = (source.device, source.inode)
        counts[identity] -= 1
        if (
            counts[identity] < 0
            or by_target.get(os.path.normpath(mount.target), identity) != identity
        ):
            Path(f"/proc/{pid}/root").stat()  # one that ended meanwhile has lost its mounts
            raise _difference(mount, source) or _replaced_error(mount)


def _difference(mount: Mount, source: MountSource) -> AgentdError | None:
    """Return why a path does not lead to the checked file any more, None if it does."""
    try:
        if _resolve_source(mount.source) == source:
            return None
    except OSError as error:
        if error.errno not in UNUSABLE_PATH:
            return _failure_error(mount, error)
    return _replaced_error(mount)


def _replaced_error(mount: Mount) -> RuntimeFailure:
    return RuntimeFailure(f"{mount.source} was replaced during the create")


def _read_mount_points(pid: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the mount points of a process with device and inode (proc_pid_mountinfo(5)).

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended.
    """
    with ending_process_as_gone():
        lines = read_lines(f"/proc/{pid}/mountinfo")
    for line in lines:
        point = _unescape(line.split(" ")[4])
        try:
            status = Path(f"/proc/{pid}/root{point}").lstat()
        except ProcessLookupError:
            raise
        except OSError:  # not visible for agentd, or its file system fails
            continue
        yield point, (status.st_dev, status.st_ino)
